"""The engine on mlx-lm's BatchGenerator, which tests and benchmarks compare ours with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator

from workers.engine import Event, RowRequest, StepWork, Token
from workers.mlx_sampling import draw, greedy
from workers.sampling import SamplingPlan

RowSampler = Callable[[mx.array], mx.array]


def make_row_sampler(plan: SamplingPlan, start_position: int = 0) -> RowSampler:
    """Return the sampler of one row of an mlx-lm batch.

    Greedy rows all get the same function, since mlx-lm samples a batch in one call where the rows
    share a sampler. Another row gets its own: it takes the row's log-probabilities or logits,
    shape (1, vocabulary), and returns its token, shape (1,), uint32. It counts its calls, one per
    completion token in order.

    Args:
        plan: how to draw.
        start_position: completion tokens the row has already, when it is taken up again.
    """
    if plan.is_greedy:
        return greedy
    position = start_position

    def sample(logits: mx.array) -> mx.array:
        nonlocal position
        position += 1
        return draw(logits, [plan], [position - 1])

    return sample


class ReferenceEngine:
    """Runs requests as rows of one BatchGenerator.

    Args:
        model: evaluated weights; used only on the thread that calls this engine.
        eos_token_ids: a row that generates one of these leaves the batch.
        max_rows: rows decoded together.
        prefill_rows: rows prefilled together.
        prefill_step_tokens: the most prompt tokens of one row in one step.
    """

    def __init__(
        self,
        model: Module,
        *,
        eos_token_ids: frozenset[int],
        max_rows: int,
        prefill_rows: int,
        prefill_step_tokens: int,
    ) -> None:
        self._generator = BatchGenerator(
            model,
            stop_tokens=[[token_id] for token_id in sorted(eos_token_ids)],
            completion_batch_size=max_rows,
            prefill_batch_size=min(prefill_rows, max_rows),
            prefill_step_size=prefill_step_tokens,
        )
        self.on_step: Callable[[StepWork], None] | None = None
        self._row_ids: dict[int, str] = {}
        self._uids: dict[str, int] = {}

    def add(self, requests: Iterable[RowRequest]) -> None:
        """Take requests in; they join the batch as rows within the next steps."""
        requests = list(requests)
        uids = self._generator.insert(
            [list(request.prompt_ids) for request in requests],
            max_tokens=[request.token_limit for request in requests],
            samplers=[make_row_sampler(request.sampling) for request in requests],
        )
        for uid, request in zip(uids, requests, strict=True):
            self._row_ids[uid] = request.row_id
            self._uids[request.row_id] = uid

    def expect(self, prompts: Iterable[Sequence[int]]) -> None:
        """Nothing: it keeps no prefixes."""

    def remove(self, row_ids: Iterable[str]) -> None:
        """Forget rows wherever they are; unknown ids are ignored."""
        uids = [self._uids.pop(e) for e in row_ids if e in self._uids]
        for uid in uids:
            del self._row_ids[uid]
        if uids:
            self._generator.remove(uids)  # type: ignore[no-untyped-call]

    def step(self) -> list[Event]:
        """Decode one token for every running row and prefill one chunk of the waiting ones."""
        _, responses = self._generator.next()  # type: ignore[no-untyped-call]
        tokens: list[Event] = []
        for response in responses:
            row_id = self._row_ids[response.uid]
            tokens.append(Token(row_id, response.token))
            if response.finish_reason is not None:
                del self._row_ids[response.uid], self._uids[row_id]
        return tokens

    @property
    def has_work(self) -> bool:
        """Whether any row is in the batch or waits for it."""
        return bool(self._uids)

    @property
    def num_rows(self) -> int:
        """Rows being prefilled or decoded."""
        return len(self._uids)

    @property
    def peak_bytes(self) -> int:
        """The most memory that the model and its rows took."""
        return mx.get_peak_memory()

    @property
    def kv_bytes(self) -> int:
        """What the keys and values of its rows take now; not known."""
        return 0
