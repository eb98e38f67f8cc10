"""The engine: one loop of steps over a scheduler, a runner and a sampler.

A step launches the forward pass of every decoding row before it reads what the last one gave, so
that the device never waits for Python; a row's end is therefore seen one step late, and what that
step computed for it is thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from workers.engine import Failed, Token
from workers.errors import InsufficientMemory, InvalidLogits, TransientError
from workers.memory import MemoryGuard, Pressure
from workers.mlx_sampling import draw
from workers.pace import PrefillPace
from workers.requests import PreparedRequest
from workers.runner import PromptChunk, Runner
from workers.scheduler import Chunk, Policy, Scheduler, SchedulerCorrupt

logger = logging.getLogger(__name__)

# The allocator keeps freed buffers for reuse; after so many steps it gives them back.
_STEPS_BETWEEN_CLEARS = 256
_STEPS_BETWEEN_MEMORY_CHECKS = 16
# A step that fails so often in a row, with nothing generated in between, is not repeated.
_MOST_FAILURES = 3
_NO_TOKEN = -1


@dataclass(slots=True)
class _Row:
    """One request's row.

    Attributes:
        tokens: the prompt and what was generated.
    """

    request: PreparedRequest
    tokens: list[int]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def tokens_left(self) -> int:
        return self.request.token_limit - self.num_generated


@dataclass(frozen=True, slots=True)
class _Launched:
    """A forward pass whose tokens were not read yet, and how many prompt tokens went before it."""

    rows: Sequence[_Row]
    index: dict[str, int]
    tokens: mx.array
    prompt_tokens: int


class BatchEngine:
    """Generates tokens for many requests at once. See `workers.engine.Engine`.

    Args:
        runner: runs the model; used only on the thread that calls this engine.
        vocab_size: ids at and above it never reach the model.
        eos_token_ids: a row that generates one of these leaves the batch.
        policy: what the scheduler may use.
        pace: how much of the prompts a step takes in.
        memory: watches what the device has left.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        policy: Policy,
        pace: PrefillPace | None = None,
        memory: MemoryGuard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._policy = policy
        self._pace = pace or PrefillPace()
        self._memory = memory
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._scheduler = Scheduler(policy, runner.row_bytes)
        self._launched: _Launched | None = None
        self._events: list[Token | Failed] = []
        self._num_steps = 0
        self._num_failures = 0
        self._step_began = 0.0

    def add(self, requests: Iterable[PreparedRequest]) -> None:
        """Take requests in; they join the batch as rows when there is room for them."""
        for request in requests:
            error = self._refusal(request)
            if error is not None:
                self._events.append(Failed(request.execution_id, error))
                continue
            row = _Row(request, list(request.prompt_ids))
            self._rows[request.execution_id] = row
            self._schedule(row)

    def remove(self, execution_ids: Iterable[str]) -> None:
        """Forget rows wherever they are; unknown ids are ignored."""
        for execution_id in execution_ids:
            row = self._rows.get(execution_id)
            if row is not None:
                self._leave(row)

    def step(self) -> list[Token | Failed]:
        """Decode one token for every running row, take in some of the prompts of the others.

        Raises:
            Exception: steps fail again and again; whatever the last one raised.
        """
        if self._rows:
            try:
                self._step()
            except Exception as error:
                self._recover(error)
            if not self._rows:
                self.check_integrity()
        events, self._events = self._events, []
        return events

    @property
    def has_work(self) -> bool:
        """Whether any row is here, or something to say of one that was."""
        return bool(self._rows or self._events)

    @property
    def num_rows(self) -> int:
        """Rows waiting, being prefilled or decoded."""
        return len(self._rows)

    @property
    def peak_bytes(self) -> int:
        """The most memory that the model and its rows took."""
        return mx.get_peak_memory()

    @property
    def peak_kv_bytes(self) -> int:
        """The most that the keys and values of all rows took, padding included."""
        return self._runner.peak_bytes

    def check_integrity(self) -> None:
        """Raise SchedulerCorrupt when the scheduler contradicts itself or our rows."""
        self._scheduler.check_integrity()
        num_scheduled = self._scheduler.num_waiting + self._scheduler.num_rows
        if num_scheduled != len(self._rows):
            raise SchedulerCorrupt(f"{len(self._rows)} rows, {num_scheduled} of them scheduled")

    # A step ---------------------------------------------------------------------------------

    def _step(self) -> None:
        began = self._clock()
        plan = self._scheduler.plan(
            self._pace.tokens(beside_decoding=self._scheduler.num_decoding > 0)
        )
        for execution_id in plan.preempted:
            logger.info("row waits again, the guess of its length was short row=%s", execution_id)
            self._runner.drop(execution_id)
        for execution_id in plan.admitted:
            self._runner.add(execution_id, len(self._rows[execution_id].tokens))
        prefilled = self._prefill(plan.chunks)
        num_prompt_tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        before, self._launched = self._launched, None
        if plan.decoding:
            self._launched = self._launch(plan.decoding, before, num_prompt_tokens)
        elif prefilled:
            mx.eval(prefilled)
        if before is not None:
            self._read(before)
            self._num_failures = 0
        for execution_id in plan.overflowed:
            overflowed = self._rows.get(execution_id)
            if overflowed is not None:  # it did not end with the token just read
                self._fail(overflowed, self._too_long(len(overflowed.tokens)))
        self._observe(began, before, num_prompt_tokens)
        self._keep_memory()

    def _prefill(self, chunks: Sequence[Chunk]) -> list[mx.array]:
        if not chunks:
            return []
        made = self._runner.prefill(
            [
                PromptChunk(
                    chunk.sequence_id, self._rows[chunk.sequence_id].tokens[c.start : c.stop]
                )
                for chunk in chunks
                for c in (chunk,)
            ]
        )
        mx.async_eval(made)  # type: ignore[no-untyped-call]
        return made

    def _launch(
        self, execution_ids: Sequence[str], before: _Launched | None, num_prompt_tokens: int
    ) -> _Launched:
        order = self._runner.arrange(execution_ids)
        rows = [self._rows[execution_id] for execution_id in order]
        index = before.index if before is not None else {}
        # A row's last token is either known or the one that is being computed for it now.
        known = [row.tokens[-1] for row in rows if row.request.execution_id not in index]
        sources: list[int] = []
        num_known = 0
        for execution_id in order:
            if execution_id in index:
                sources.append(index[execution_id])
            else:
                sources.append(len(index) + num_known)
                num_known += 1
        feed = mx.array(known, dtype=mx.int32)
        if before is not None:
            feed = mx.concatenate([mx.maximum(before.tokens, 0), feed])
        if sources != list(range(feed.size)):
            feed = feed[mx.array(sources)]
        logits = self._runner.decode(order, feed)
        positions = [row.num_generated + (row.request.execution_id in index) for row in rows]
        tokens = draw(logits, [row.request.sampling for row in rows], positions)
        chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        tokens = mx.where(mx.isnan(chosen), _NO_TOKEN, tokens.astype(mx.int32))
        mx.async_eval(tokens)  # type: ignore[no-untyped-call]
        return _Launched(rows, {e: i for i, e in enumerate(order)}, tokens, num_prompt_tokens)

    def _read(self, launched: _Launched) -> None:
        tokens: list[int] = launched.tokens.tolist()  # type: ignore[assignment]
        for row, token_id in zip(launched.rows, tokens, strict=True):
            execution_id = row.request.execution_id
            if self._rows.get(execution_id) is not row:
                continue  # it left after this was launched
            if token_id == _NO_TOKEN:
                self._fail(row, InvalidLogits(len(row.tokens)), wipe=True)
                continue
            row.tokens.append(token_id)
            self._events.append(Token(execution_id, token_id))
            if token_id in self._eos_token_ids or row.tokens_left == 0:
                self._leave(row)

    def _observe(self, began: float, before: _Launched | None, num_prompt_tokens: int) -> None:
        seconds = self._clock() - began
        if before is not None:
            self._pace.observe(seconds, prompt_tokens=before.prompt_tokens, decoded=True)
        elif self._launched is None:
            self._pace.observe(seconds, prompt_tokens=num_prompt_tokens, decoded=False)

    # Rows that come and go ------------------------------------------------------------------

    def _schedule(self, row: _Row) -> None:
        self._scheduler.add(
            row.request.execution_id, num_tokens=len(row.tokens), token_limit=row.tokens_left
        )

    def _refusal(self, request: PreparedRequest) -> Exception | None:
        # The preparer has checked it; an id outside the vocabulary would end the process.
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self._vocab_size:
            return ValueError("a prompt token is outside the vocabulary")
        if not self._scheduler.fits_alone(len(request.prompt_ids)):
            return self._too_long(len(request.prompt_ids) + 1)
        return None

    def _too_long(self, num_tokens: int) -> InsufficientMemory:
        return InsufficientMemory(
            num_tokens, self._runner.row_bytes(num_tokens), self._policy.kv_budget_bytes
        )

    def _leave(self, row: _Row, *, wipe: bool = False) -> None:
        execution_id = row.request.execution_id
        del self._rows[execution_id]
        self._scheduler.finished_with(row.num_generated)
        self._scheduler.remove(execution_id)
        self._runner.drop(execution_id, wipe=wipe)

    def _fail(self, row: _Row, error: Exception, *, wipe: bool = False) -> None:
        self._leave(row, wipe=wipe)
        self._events.append(Failed(row.request.execution_id, error))

    def _recover(self, error: Exception) -> None:
        """Start over with every row's tokens, after a step that raised."""
        self._num_failures += 1
        if self._num_failures >= _MOST_FAILURES:
            raise error
        logger.error(
            "a step failed; its rows are computed again rows=%d", len(self._rows), exc_info=error
        )
        self._launched = None
        self._runner.clear()
        mx.clear_cache()
        policy = replace(self._policy, expected_tokens=self._scheduler.expected_tokens)
        self._scheduler = Scheduler(policy, self._runner.row_bytes)
        for row in self._rows.values():
            self._schedule(row)

    # Memory ---------------------------------------------------------------------------------

    def _keep_memory(self) -> None:
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
        if self._memory is None or self._num_steps % _STEPS_BETWEEN_MEMORY_CHECKS:
            return
        pressure = self._memory.check()
        # With no row left there is nothing to wait for: the next one is tried alone.
        has_rows = self._scheduler.num_rows > 0
        self._scheduler.pause_admission(has_rows and pressure is not Pressure.NONE)
        newest = self._scheduler.newest()
        if pressure is Pressure.SEVERE and newest is not None and self._scheduler.num_rows > 1:
            self._fail(self._rows[newest], TransientError("the worker ran short of memory"))
