"""What a running job has generated, as its worker tells Redis and the next one takes up.

The list `qsvc:progress:<job>:<execution>` has elements of three kinds: headers, which are JSON
objects, of which the last one counts; token ids; and log-probabilities, for requests that ask for
them. The latter two are unsigned words of 32 bits, the lowest byte first. The first word is the
choice, with the kind in its highest byte; then come the ids, or for each token its log-probability
as a float of the same size, and pairs of an id and a log-probability for each alternative.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_VERSION: Final = 2
_TOKENS, _LOGPROBS = 0, 1
_KIND_SHIFT: Final = 24
_LENGTH_DIGITS: Final = 8

# The log-probability of a token, and those of the likeliest at its place.
TokenScores = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class ProgressHeader:
    """What must be the same for a job to go on, and what would be forgotten.

    Attributes:
        prompt: a digest of the tokens of all prompts.
        model: the digest of the model.
        seed: of the first choice.
        cached_tokens: prompt tokens that were not computed at first.
    """

    prompt: str
    model: str
    seed: int
    cached_tokens: int = 0

    def encode(self) -> bytes:
        """Return the element that says so."""
        fields = {
            "v": _VERSION,
            "prompt": self.prompt,
            "model": self.model,
            "seed": self.seed,
            "cached": self.cached_tokens,
        }
        return json.dumps(fields, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Progress:
    """What an execution has generated before it was lost or given back.

    Attributes:
        tokens: the token ids of each choice that has some.
        scores: their log-probabilities, where they were asked for.
    """

    header: ProgressHeader
    tokens: Mapping[int, tuple[int, ...]]
    scores: Mapping[int, tuple[TokenScores, ...]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(map(len, self.tokens.values()))

    @classmethod
    def decode(cls, joined: bytes, *, num_top_logprobs: int | None) -> Progress | None:
        """Read elements, each behind its length in eight hex digits; None if they are no progress.

        Args:
            num_top_logprobs: alternatives of each token; None where no scores are kept.
        """
        try:
            return cls._decode(joined, num_top_logprobs)
        except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
            return None

    @classmethod
    def _decode(cls, joined: bytes, num_top_logprobs: int | None) -> Progress | None:
        header: ProgressHeader | None = None
        tokens: dict[int, list[int]] = defaultdict(list)
        scores: dict[int, list[TokenScores]] = defaultdict(list)
        for element in _elements(joined):
            if element.startswith(b'{"'):
                header = _header(json.loads(element))
                continue
            words = _words(element)
            kind, choice = words[0] >> _KIND_SHIFT, words[0] & ((1 << _KIND_SHIFT) - 1)
            if kind == _TOKENS:
                tokens[choice].extend(words[1:])
            elif kind == _LOGPROBS and num_top_logprobs is not None:
                scores[choice].extend(_scores(words[1:], num_top_logprobs))
        if header is None:
            return None
        if num_top_logprobs is not None and any(
            len(ids) != len(scores[choice]) for choice, ids in tokens.items()
        ):
            return None
        return cls(
            header,
            {choice: tuple(ids) for choice, ids in tokens.items()},
            {choice: tuple(values) for choice, values in scores.items()},
        )


def encode_tokens(choice: int, token_ids: Sequence[int]) -> bytes:
    """Return the element of some tokens of a choice."""
    return _element(_TOKENS, choice, array("I", token_ids))


def encode_scores(choice: int, scores: Sequence[TokenScores]) -> bytes:
    """Return the element of the log-probabilities of some tokens of a choice."""
    words = array("I")
    for logprob, alternatives in scores:
        words.append(_bits(logprob))
        for token_id, value in alternatives:
            words.append(token_id)
            words.append(_bits(value))
    return _element(_LOGPROBS, choice, words)


def join_elements(elements: Sequence[bytes]) -> bytes:
    """Return elements as the server hands them over."""
    return b"".join(b"%08x%s" % (len(element), element) for element in elements)


def _element(kind: int, choice: int, words: array[int]) -> bytes:
    whole = array("I", [kind << _KIND_SHIFT | choice]) + words
    if sys.byteorder == "big":
        whole.byteswap()
    return whole.tobytes()


def _words(element: bytes) -> array[int]:
    words = array("I")
    words.frombytes(element)
    if sys.byteorder == "big":
        words.byteswap()
    if not words:
        raise ValueError("an empty element")
    return words


def _elements(joined: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(joined):
        start = at + _LENGTH_DIGITS
        at = start + int(joined[at:start], 16)
        if at > len(joined):
            raise ValueError("the last element is cut")
        yield joined[start:at]


def _header(fields: Mapping[str, Any]) -> ProgressHeader:
    if fields["v"] != _VERSION:
        raise ValueError("progress of another version")
    return ProgressHeader(
        str(fields["prompt"]), str(fields["model"]), int(fields["seed"]), int(fields["cached"])
    )


def _scores(words: array[int], num_top: int) -> Iterator[TokenScores]:
    width = 1 + 2 * num_top
    if len(words) % width:
        raise ValueError("scores of another number of alternatives")
    for at in range(0, len(words), width):
        pairs = words[at + 1 : at + width]
        yield (
            _number(words[at]),
            tuple(zip(pairs[::2], map(_number, pairs[1::2]), strict=True)),
        )


def _bits(number: float) -> int:
    return int(array("I", array("f", [number]).tobytes())[0])


def _number(bits: int) -> float:
    number = array("f", array("I", [bits]).tobytes())[0]
    if math.isnan(number):
        raise ValueError("a log-probability that is no number")
    return number
