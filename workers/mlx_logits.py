"""Changes logits before a token is drawn: bias, penalties, forbidden tokens, matchers' masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from workers.engine import LogitRules, TokenLogprobs

# Tokens of an answer for which there is room at first.
_ROOM = 64


_Ids = npt.NDArray[np.int32]
_Values = npt.NDArray[np.float32]


class RowRules:
    """The rules of one row, and what its tokens so far mean for them.

    Args:
        rules: what to apply.
        stop_ids: what may not be drawn before ``min_tokens``.
        prompt_ids: the row's prompt.
    """

    def __init__(
        self, rules: LogitRules, stop_ids: Sequence[int], prompt_ids: Sequence[int]
    ) -> None:
        self.rules = rules
        self._num_generated = 0
        self._bias_ids = np.array([i for i, _ in rules.bias], dtype=np.int32)
        self._biases = np.array([value for _, value in rules.bias], dtype=np.float32)
        self._stop_ids = np.array(stop_ids, dtype=np.int32)
        self._banned = np.full(len(stop_ids), -np.inf, dtype=np.float32)
        # Every token of prompt and answer once, and how often it is in the answer.
        history = prompt_ids if rules.has_penalties else ()
        seen = np.unique(np.array(history, dtype=np.int32))
        self._num_seen = len(seen)
        self._ids: _Ids = np.zeros(len(seen) + _ROOM, dtype=np.int32)
        self._ids[: len(seen)] = seen
        self._counts: _Values = np.zeros(len(self._ids), dtype=np.float32)
        self._places = {int(token_id): place for place, token_id in enumerate(seen)}

    @classmethod
    def of_row(
        cls, rules: LogitRules, stop_ids: Sequence[int], prompt_ids: Sequence[int]
    ) -> RowRules | None:
        """Return the rules of a row that has generated nothing; None where nothing applies."""
        if not (rules.bias or rules.has_penalties or rules.min_tokens):
            return None
        return cls(rules, stop_ids, prompt_ids)

    def push(self, token_id: int) -> None:
        """Take the next token of the answer."""
        self._num_generated += 1
        if not self.rules.has_penalties:
            return
        place = self._places.setdefault(token_id, self._num_seen)
        if place == self._num_seen:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._num_seen += 1
        self._counts[place] += 1

    def divided(self) -> _Ids:
        """Return the tokens to which the repetition penalty applies, each once."""
        return self._ids[: self._num_seen if self.rules.repetition_penalty != 1 else 0]

    def added(self) -> tuple[_Ids, _Values]:
        """Return token ids, perhaps some of them twice, and what to add to the logits of each."""
        rules = self.rules
        ids, values = [self._bias_ids], [self._biases]
        if rules.frequency_penalty or rules.presence_penalty:
            counts = self._counts[: self._num_seen]
            in_answer = np.flatnonzero(counts)
            ids.append(self._ids[in_answer])
            values.append(-rules.frequency_penalty * counts[in_answer] - rules.presence_penalty)
        if self._num_generated < rules.min_tokens:
            ids.append(self._stop_ids)
            values.append(self._banned)
        return np.concatenate(ids), np.concatenate(values)


def apply_rules(logits: mx.array, rows: Sequence[tuple[int, RowRules]]) -> mx.array:
    """Return logits with the rules applied to some rows, all of them at once.

    Args:
        logits: (rows, vocabulary), float32.
        rows: index and rules of the rows that have some.
    """
    divided = [one.divided() for _, one in rows]
    if any(map(len, divided)):
        counts = [len(ids) for ids in divided]
        penalties = [one.rules.repetition_penalty for _, one in rows]
        place = _place(rows, divided, counts)
        found = logits[place]
        factor = mx.array(np.repeat(np.array(penalties, dtype=np.float32), counts))
        logits[place] = mx.where(found > 0, found / factor, found * factor)
    added = [one.added() for _, one in rows]
    counts = [len(ids) for ids, _ in added]
    if any(counts):
        values = mx.array(np.concatenate([values for _, values in added]))
        logits = logits.at[_place(rows, [ids for ids, _ in added], counts)].add(values)
    return logits


def _place(
    rows: Sequence[tuple[int, RowRules]], ids: Sequence[_Ids], counts: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """Return the row and the token id of each number of logits that some rows name."""
    indices = np.repeat(np.array([row for row, _ in rows], dtype=np.int32), counts)
    return mx.array(indices), mx.array(np.concatenate(ids))


def apply_masks(logits: mx.array, rows: Sequence[int], masks: npt.NDArray[np.uint32]) -> mx.array:
    """Return logits with every token of some rows forbidden that its mask does not allow.

    Args:
        logits: (rows, vocabulary).
        rows: indices of the rows that have a mask.
        masks: (len(rows), words), bit ``id % 32`` of word ``id // 32`` allows an id.
    """
    vocab_size = logits.shape[-1]
    as_bytes = masks.astype("<u4", copy=False).view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=-1, count=vocab_size, bitorder="little").astype(np.bool_)
    allowed = mx.array(bits)
    if len(rows) == logits.shape[0]:
        return mx.where(allowed, logits, -mx.inf)
    chosen = mx.array(list(rows))
    logits[chosen] = mx.where(allowed, logits[chosen], -mx.inf)
    return logits


@dataclass(frozen=True, slots=True)
class CapturedLogprobs:
    """Log-probabilities of one step, not evaluated: those of the rows that asked.

    Attributes:
        wanted: for each row that asked, its index and how many likeliest tokens it wants.
        chosen: (rows that asked,), of the drawn tokens.
        top_ids: (rows that asked, most wanted).
        top: likewise, in no order.
    """

    wanted: Sequence[tuple[int, int]]
    chosen: mx.array
    top_ids: mx.array
    top: mx.array

    def read(self) -> dict[int, TokenLogprobs]:
        """Wait for them and return them by row index."""
        chosen = np.array(self.chosen)
        ids, values = np.array(self.top_ids), np.array(self.top)
        result = {}
        for place, (row, count) in enumerate(self.wanted):
            order = np.argsort(-values[place], kind="stable")[:count]
            top = tuple((int(ids[place, i]), float(values[place, i])) for i in order)
            result[row] = TokenLogprobs(float(chosen[place]), top)
        return result


def capture_logprobs(
    logits: mx.array, tokens: mx.array, wanted: Sequence[tuple[int, int]]
) -> CapturedLogprobs | None:
    """Return the log-probabilities of drawn tokens for the rows that asked, None if none did.

    Args:
        logits: (rows, vocabulary), as the model gave them.
        tokens: (rows,), what was drawn.
        wanted: index of each row that asked, and how many likeliest tokens it wants.
    """
    if not wanted:
        return None
    rows = mx.array([row for row, _ in wanted])
    some = logits[rows].astype(mx.float32)
    logprobs = some - mx.logsumexp(some, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[rows][:, None], axis=-1)[:, 0]
    most = max(1, *(count for _, count in wanted))
    top_ids = mx.argpartition(-logprobs, kth=most - 1, axis=-1)[:, :most]
    return CapturedLogprobs(wanted, chosen, top_ids, mx.take_along_axis(logprobs, top_ids, axis=-1))
