"""Changes logits before a token is drawn: bias, penalties, forbidden tokens, matchers' masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from workers.engine import LogitRules, TokenLogprobs


@dataclass(slots=True)
class RowRules:
    """The rules of one row, and what its tokens so far mean for them.

    Attributes:
        rules: what to apply.
        stop_ids: what may not be drawn before ``min_tokens``.
    """

    rules: LogitRules
    stop_ids: Sequence[int]
    num_generated: int = 0
    # Every token of prompt and answer once, and how often it is in the answer.
    _ids: list[int] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _places: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of_row(
        cls, rules: LogitRules, stop_ids: Sequence[int], prompt_ids: Sequence[int]
    ) -> RowRules | None:
        """Return the rules of a row that has generated nothing; None where nothing applies."""
        if not (rules.bias or rules.has_penalties or rules.min_tokens):
            return None
        row = cls(rules, stop_ids)
        if rules.has_penalties:
            for token_id in prompt_ids:
                row._place(token_id)
        return row

    def push(self, token_id: int) -> None:
        """Take the next token of the answer."""
        self.num_generated += 1
        if self.rules.has_penalties:
            self._counts[self._place(token_id)] += 1

    def divided(self) -> list[int]:
        """Return the tokens to which the repetition penalty applies, each once."""
        return self._ids if self.rules.repetition_penalty != 1 else []

    def added(self) -> tuple[list[int], list[float]]:
        """Return token ids, perhaps some of them twice, and what to add to the logits of each."""
        rules = self.rules
        ids = [token_id for token_id, _ in rules.bias]
        values = [value for _, value in rules.bias]
        if rules.frequency_penalty or rules.presence_penalty:
            for token_id, count in zip(self._ids, self._counts, strict=True):
                if count:
                    ids.append(token_id)
                    values.append(-rules.frequency_penalty * count - rules.presence_penalty)
        if self.num_generated < rules.min_tokens:
            ids += self.stop_ids
            values += [-np.inf] * len(self.stop_ids)
        return ids, values

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        return place


def apply_rules(logits: mx.array, rows: Sequence[tuple[int, RowRules]]) -> mx.array:
    """Return logits with the rules applied to some rows, all of them at once.

    Args:
        logits: (rows, vocabulary), float32.
        rows: index and rules of the rows that have some.
    """
    divided = [(row, i, one.rules.repetition_penalty) for row, one in rows for i in one.divided()]
    if divided:
        at, ids, penalties = zip(*divided, strict=True)
        place = (mx.array(at), mx.array(ids))
        found, factor = logits[place], mx.array(penalties)
        logits[place] = mx.where(found > 0, found / factor, found * factor)
    added = [(row, i, v) for row, one in rows for i, v in zip(*one.added(), strict=True)]
    if added:
        at, ids, values = zip(*added, strict=True)
        logits = logits.at[mx.array(at), mx.array(ids)].add(mx.array(values))
    return logits


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
