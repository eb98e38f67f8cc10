"""The engine: one loop of steps over a scheduler, a runner and a sampler.

A step launches the forward pass of every decoding row before it reads what the last one gave, so
that the device never waits for Python; a row's end is therefore seen one step late, and what that
step computed for it is thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from workers.checkpoint_tier import CheckpointTier
from workers.engine import Begun, Event, Failed, Kept, RowRequest, StepWork, Token
from workers.errors import InsufficientMemory, InvalidLogits
from workers.memory import MemoryGuard, Pressure
from workers.mlx_logits import (
    CapturedLogprobs,
    RowRules,
    apply_masks,
    apply_rules,
    capture_logprobs,
)
from workers.mlx_sampling import draw
from workers.pace import PrefillPace
from workers.runner import PromptChunk, Runner
from workers.scheduler import NOTHING, Chunk, Plan, Policy, Scheduler, SchedulerCorrupt
from workers.shared_prefixes import PrefixFigures, SharedPrefixes, Start

logger = logging.getLogger(__name__)

# The allocator keeps freed buffers for reuse; after so many steps it gives them back.
_STEPS_BETWEEN_CLEARS = 256
_STEPS_BETWEEN_MEMORY_CHECKS = 16
# A step that fails so often in a row, with nothing generated in between, is not repeated.
_MOST_FAILURES = 3
_NO_TOKEN = -1
# A row that could have its first token waits so long at most for the prompts of others.
_MOST_FILLING_SECONDS = 4.0
# With nothing to compute before a prefix was read from disk, so long is waited for it at a time.
_RESTORE_WAIT_SECONDS = 0.05


@dataclass(slots=True)
class _Row:
    """One request's row.

    Attributes:
        tokens: the prompt and what was generated.
        rules: what its logits go through, None for nothing.
    """

    request: RowRequest
    tokens: list[int]
    rules: RowRules | None

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
    logprobs: CapturedLogprobs | None
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A forward pass whose tokens were not drawn yet."""

    rows: Sequence[_Row]
    logits: mx.array
    positions: Sequence[int]


class BatchEngine:
    """Generates tokens for many requests at once. See `workers.engine.Engine`.

    Args:
        runner: runs the model; used only on the thread that calls this engine.
        vocab_size: ids at and above it never reach the model.
        eos_token_ids: what ends an answer, which no sampling leaves out.
        policy: what the scheduler may use.
        pace: how much of the prompts a step takes in.
        memory: watches what the device has left.
        prefix_bytes: what prefixes shared by several prompts may take, beside the rows.
        tier: checkpoints on disk; None for none.
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
        prefix_bytes: int = 0,
        tier: CheckpointTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._policy = policy
        self._pace = pace or PrefillPace()
        self._memory = memory
        self._clock = clock
        self.on_step: Callable[[StepWork], None] | None = None
        self._rows: dict[str, _Row] = {}
        self._scheduler = Scheduler(policy, runner.row_bytes)
        self._launched: _Launched | None = None
        self._prefixes = SharedPrefixes(
            runner,
            self._scheduler,
            prefix_bytes,
            tier,
            seconds_per_token=lambda: self._pace.seconds_per_token,
        )
        self._events: list[Event] = []
        self._num_steps = 0
        self._num_failures = 0
        self._ready_since: float | None = None  # rows wait for their first token

    def add(self, requests: Iterable[RowRequest]) -> None:
        """Take requests in; they join the batch as rows when there is room for them."""
        for request in requests:
            error = self._refusal(request)
            if error is not None:
                self._events.append(Failed(request.row_id, error))
                continue
            prompt = list(request.prompt_ids)
            rules = RowRules.of_row(request.rules, sorted(request.stop_ids), prompt)
            if rules is not None:
                for token_id in request.generated_ids:
                    rules.push(token_id)
            row = _Row(request, [*prompt, *request.generated_ids], rules)
            self._rows[request.row_id] = row
            self._schedule(row)
            # What is kept at the end holds the prompt too, where a part of it can be had.
            keep = () if request.keeps_answer and self._runner.is_sliceable else request.keep
            self._prefixes.add(
                request.row_id, tuple(row.tokens), keep=keep, is_sibling=request.is_sibling
            )

    def expect(self, prompts: Iterable[Sequence[int]]) -> None:
        """Note prompts that are about to come: what rows have in common with them is kept."""
        for prompt in prompts:
            self._prefixes.expect(tuple(prompt))

    def remove(self, row_ids: Iterable[str]) -> None:
        """Forget rows wherever they are; unknown ids are ignored."""
        for row_id in row_ids:
            row = self._rows.get(row_id)
            if row is None:
                continue
            if row.num_generated:  # what never began says nothing about the length of answers
                self._end(row)
            else:
                self._leave(row)

    def step(self) -> list[Event]:
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
    def prefix_figures(self) -> PrefixFigures:
        """What sharing the beginnings of prompts did."""
        return self._prefixes.figures

    @property
    def peak_bytes(self) -> int:
        """The most memory that the model and its rows took."""
        return mx.get_peak_memory()

    @property
    def kv_bytes(self) -> int:
        """What the keys and values of its rows take now, padding included, prefixes not."""
        return self._scheduler.kv_bytes_used

    @property
    def peak_kv_bytes(self) -> int:
        """The most that the keys and values of all rows took, padding included, prefixes not."""
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
        self._prefixes.poll()
        plan = self._plan(began)
        if plan == NOTHING and self._launched is None:
            self._prefixes.poll(_RESTORE_WAIT_SECONDS)
            self._keep_memory()
            return
        for row_id in plan.preempted:
            logger.info("row waits again, others need its room row=%s", row_id)
            if self._rows[row_id].num_generated:  # the last token is not fed
                self._prefixes.save(row_id, tuple(self._rows[row_id].tokens[:-1]))
            self._runner.drop(row_id)
        self._make_room([self._rows[row_id] for row_id in plan.admitted])
        prefilled = self._prefill(plan.chunks)
        num_prompt_tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        before, self._launched = self._launched, None
        forwarded = self._forward(plan.decoding, before) if plan.decoding else None
        if forwarded is None and prefilled:
            mx.eval(prefilled)
        if before is not None:
            self._read(before)
            self._num_failures = 0
        if forwarded is not None:
            self._launched = self._sample(forwarded, num_prompt_tokens)
        for row_id in plan.overflowed:
            overflowed = self._rows.get(row_id)
            if overflowed is not None:  # it did not end with the token just read
                self._fail(overflowed, self._too_long(len(overflowed.tokens)))
        for row_id in plan.preempted:  # now that others hold what this step computed
            if row_id in self._rows:
                self._prefixes.add_again(row_id, tuple(self._rows[row_id].tokens))
        self._observe(began, before, num_prompt_tokens)
        if self.on_step is not None:
            chunks = [(chunk.sequence_id, chunk.stop - chunk.start) for chunk in plan.chunks]
            decoded = [row.request.row_id for row in before.rows] if before is not None else ()
            self.on_step(StepWork(began, chunks, decoded))
        self._keep_memory()

    def _plan(self, now: float) -> Plan:
        """Plan the step. While nobody has a token to be kept from the next, the batch is filled.

        So it begins full, instead of with the few rows whose prompts came first.
        """
        is_running = self._has_running_row()
        if is_running or not self._scheduler.decoding:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = now
        waited = 0.0 if self._ready_since is None else now - self._ready_since
        if not is_running and waited < _MOST_FILLING_SECONDS:
            plan = self._scheduler.plan(self._pace.most_tokens, decode=False)
            if plan != NOTHING:
                return plan
        num_decoding = self._scheduler.num_decoding
        return self._scheduler.plan(self._pace.tokens(num_decoding=num_decoding))

    def _has_running_row(self) -> bool:
        return any(
            self._rows[row_id].num_generated or row_id in self._in_flight
            for row_id in self._scheduler.decoding
        )

    @property
    def _in_flight(self) -> Mapping[str, int]:
        return self._launched.index if self._launched is not None else {}

    def _prefill(self, chunks: Sequence[Chunk]) -> list[mx.array]:
        if not chunks:
            return []
        made = self._runner.prefill(
            [
                PromptChunk(c.sequence_id, self._rows[c.sequence_id].tokens[c.start : c.stop])
                for c in chunks
            ]
        )
        mx.async_eval(made)  # type: ignore[no-untyped-call]
        for chunk in chunks:
            self._prefixes.computed(chunk)
        return made

    def _forward(self, row_ids: Sequence[str], before: _Launched | None) -> _Forwarded:
        """Launch the pass that gives the next logits, fed with tokens that may not be read yet."""
        order = self._runner.arrange(row_ids)
        rows = [self._rows[row_id] for row_id in order]
        index = before.index if before is not None else {}
        # A row's last token is either known or the one that is being computed for it now.
        known: list[int] = []
        sources: list[int] = []
        for row_id, row in zip(order, rows, strict=True):
            if row_id in index:
                sources.append(index[row_id])
            else:
                sources.append(len(index) + len(known))
                known.append(row.tokens[-1])
        feed = mx.array(known, dtype=mx.int32)
        if before is not None:
            feed = mx.concatenate([mx.maximum(before.tokens, 0), feed])
        if sources != list(range(feed.size)):
            feed = feed[mx.array(sources)]
        logits = self._runner.decode(order, feed)
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        positions = [row.num_generated + (row.request.row_id in index) for row in rows]
        for row, position in zip(rows, positions, strict=True):
            if position + 1 == row.request.token_limit and not row.request.keeps_answer:
                self._runner.drop(row.request.row_id)  # its last token: nothing follows
                self._prefixes.lose(row.request.row_id)
        return _Forwarded(rows, logits, positions)

    def _read(self, launched: _Launched) -> None:
        tokens: list[int] = launched.tokens.tolist()  # type: ignore[assignment]
        logprobs = launched.logprobs.read() if launched.logprobs is not None else {}
        for place, (row, token_id) in enumerate(zip(launched.rows, tokens, strict=True)):
            request = row.request
            if self._rows.get(request.row_id) is not row:
                continue  # it left after this was launched
            if token_id == _NO_TOKEN:
                self._fail(row, InvalidLogits(len(row.tokens)))
                continue
            has_ended = token_id in request.stop_ids
            try:
                if request.matcher is not None and not has_ended:
                    request.matcher.accept(token_id)
            except Exception as error:  # one row's matcher: its neighbours go on
                self._fail(row, error)
                continue
            row.tokens.append(token_id)
            if row.rules is not None:
                row.rules.push(token_id)
            self._events.append(Token(request.row_id, token_id, logprobs.get(place)))
            if has_ended or row.tokens_left == 0:
                self._end(row)

    def _sample(self, forwarded: _Forwarded, num_prompt_tokens: int) -> _Launched:
        """Draw the tokens of a pass, now that those before them are known; do not wait for them."""
        rows = forwarded.rows
        logits = self._apply_masks(self._apply_rules(forwarded.logits, rows), rows)
        tokens = draw(
            logits,
            [row.request.sampling for row in rows],
            forwarded.positions,
            never_excluded=self._eos_token_ids,
        )
        is_valid = mx.isfinite(logits.max(axis=-1))
        logprobs = capture_logprobs(
            forwarded.logits,
            tokens,
            [
                (place, row.request.num_top_logprobs)
                for place, row in enumerate(rows)
                if row.request.num_top_logprobs is not None
            ],
        )
        tokens = mx.where(is_valid, tokens.astype(mx.int32), _NO_TOKEN)
        wanted = [logprobs.chosen, logprobs.top_ids, logprobs.top] if logprobs is not None else []
        mx.async_eval(tokens, *wanted)  # type: ignore[no-untyped-call]
        index = {row.request.row_id: place for place, row in enumerate(rows)}
        return _Launched(rows, index, tokens, logprobs, num_prompt_tokens)

    def _apply_rules(self, logits: mx.array, rows: Sequence[_Row]) -> mx.array:
        ruled = [(place, row.rules) for place, row in enumerate(rows) if row.rules is not None]
        if not ruled:
            return logits
        # A copy, since the logits themselves may be wanted for log-probabilities.
        return apply_rules(mx.array(logits.astype(mx.float32)), ruled)

    def _apply_masks(self, logits: mx.array, rows: Sequence[_Row]) -> mx.array:
        matched = [
            (place, row, row.request.matcher)
            for place, row in enumerate(rows)
            if row.request.matcher is not None and row.request.row_id in self._rows
        ]
        if not matched:
            return logits
        masks = np.zeros((len(matched), -(-self._vocab_size // 32)), dtype=np.uint32)
        for mask, (_, row, matcher) in zip(masks, matched, strict=True):
            try:
                matcher.fill(mask)
            except Exception as error:  # one row's matcher: its neighbours go on
                mask[:] = np.uint32(0xFFFFFFFF)
                self._fail(row, error)
        return apply_masks(mx.array(logits), [place for place, _, _ in matched], masks)

    def _observe(self, began: float, before: _Launched | None, num_prompt_tokens: int) -> None:
        seconds = self._clock() - began
        is_prefill_only = self._launched is None and num_prompt_tokens > 0
        if before is not None:
            if not is_prefill_only:  # it waited for its own prefill as well as for that of before
                self._pace.observe(
                    seconds, prompt_tokens=before.prompt_tokens, num_decoded=len(before.rows)
                )
        elif self._launched is None:
            self._pace.observe(seconds, prompt_tokens=num_prompt_tokens, num_decoded=0)

    # Rows that come and go ------------------------------------------------------------------

    def _schedule(self, row: _Row) -> None:
        self._scheduler.add(
            row.request.row_id,
            num_tokens=len(row.tokens),
            token_limit=row.tokens_left,
            priority=row.request.priority,
        )

    def _make_room(self, rows: Sequence[_Row]) -> None:
        alone: dict[str, int] = {}
        behind: dict[Start, dict[str, int]] = {}
        for row in rows:
            row_id = row.request.row_id
            start = self._prefixes.take(row_id)
            group = alone if start is None else behind.setdefault(start, {})
            group[row_id] = len(row.tokens)
            self._events.append(Begun(row_id, start.length if start is not None else 0))
        self._runner.add(alone)
        for start, group in behind.items():
            self._runner.add_with(group, start.prefix.state, start.length, start.shared)

    def _refusal(self, request: RowRequest) -> Exception | None:
        # The preparer has checked it; an id outside the vocabulary would end the process.
        tokens = (*request.prompt_ids, *request.generated_ids)
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            return ValueError("a token of the prompt is outside the vocabulary")
        if not self._scheduler.fits_alone(len(tokens)):
            return self._too_long(len(tokens) + 1)
        return None

    def _too_long(self, num_tokens: int) -> InsufficientMemory:
        return InsufficientMemory(
            num_tokens, self._runner.row_bytes(num_tokens), self._policy.kv_budget_bytes
        )

    def _end(self, row: _Row) -> None:
        """Let a row go that has its answer."""
        request = row.request
        self._scheduler.finished_with(row.num_generated)
        # The last token was drawn and never fed.
        if request.keeps_answer and self._prefixes.finish(request.row_id, row.tokens[:-1]):
            self._events.append(Kept(request.row_id, tuple(row.tokens[:-1])))
        self._leave(row)

    def _leave(self, row: _Row) -> None:
        row_id = row.request.row_id
        del self._rows[row_id]
        self._prefixes.remove(row_id)
        self._scheduler.remove(row_id)
        self._runner.drop(row_id)

    def _fail(self, row: _Row, error: Exception) -> None:
        self._leave(row)
        self._events.append(Failed(row.request.row_id, error))

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
        self._prefixes.restart(self._scheduler)
        for row in self._rows.values():
            self._schedule(row)
            self._prefixes.add(row.request.row_id, tuple(row.tokens), is_sibling=True)

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
        last = self._scheduler.first_to_go()
        if pressure is Pressure.SEVERE and last is not None and self._scheduler.num_rows > 1:
            logger.warning("memory is short, a row waits until there is more row=%s", last)
            self._scheduler.preempt(last)
            self._runner.drop(last)
            self._prefixes.add_again(last, tuple(self._rows[last].tokens))
            self._runner.shrink()
