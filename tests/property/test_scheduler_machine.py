"""The scheduler against a simple list: whatever the order of events, its plans keep the rules.

The model knows no queue and no estimate. It takes each plan, checks that it was allowed and moves
its own sequences; at the end everything that is left must run to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from workers.scheduler import Plan, Policy, Scheduler, State

UNSET = 10**9
LONGEST_RUN = 40

KV_BYTES: dict[str, Callable[[int], int]] = {
    "unpadded": lambda num_tokens: num_tokens,
    "steps of 8": lambda num_tokens: -(-num_tokens // 8) * 8,
    "classes": lambda num_tokens: max(4, 1 << (num_tokens - 1).bit_length()) if num_tokens else 0,
}

policies = st.builds(
    Policy,
    kv_budget_bytes=st.integers(8, 120),
    max_rows=st.integers(1, 6),
    expected_tokens=st.integers(1, 20),
    headroom_tokens=st.integers(1, 8),
    max_overtakes=st.integers(0, 3),
    oldest_share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    join_wait_steps=st.integers(0, 3),
    min_joins=st.integers(0, 4),
    yield_gap=st.just(2),
    max_yields=st.integers(0, 2),
)
picks = st.integers(0, 30)


@dataclass
class Sequence:
    """What the model knows of a sequence.

    Attributes:
        num_new: tokens it generates before its end, its own secret; at most its limit.
        kv_tokens: the length of its row.
        generated: tokens since it was added.
        fed_from: tokens to feed at its last admission or pre-emption.
        overtaken: admissions past it while it was the first to wait.
        joined: when it was admitted; None while it waits.
        shared: of its tokens, those that take nothing of the budget.
        cuts: lengths of its prompt at which a chunk ends.
        yields: how often it made room for one of a far higher priority.
    """

    id: str
    priority: int
    arrival: int
    fed_from: int
    limit: int
    num_new: int
    cached: int
    state: State = State.WAITING
    is_held: bool = False
    was_preempted: bool = False
    kv_tokens: int = 0
    generated: int = 0
    overtaken: int = 0
    joined: int | None = None
    shared: int = 0
    cuts: set[int] = field(default_factory=set)
    yields: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        return -self.priority, 0 if self.was_preempted else 1, self.arrival

    @property
    def may_decode(self) -> bool:
        return self.state is State.DECODING and self.generated < self.limit

    @property
    def needed(self) -> int:
        if self.state is State.DECODING:
            return self.kv_tokens + self.may_decode
        return self.fed_from

    def wait_again(self) -> None:
        if self.state is State.DECODING:
            self.fed_from = self.kv_tokens + 1
        self.state, self.joined, self.was_preempted = State.WAITING, None, True
        self.kv_tokens = self.cached = self.shared = self.overtaken = 0

    def until_cut(self) -> int:
        """Tokens to the next cut, or to the end of its prefill."""
        ends = [cut for cut in self.cuts if cut > self.kv_tokens] + [self.fed_from - 1]
        return min(ends) - self.kv_tokens


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences of a few tokens in a batch of a few rows, so that everything is tight."""

    @initialize(policy=policies, kv_bytes=st.sampled_from(sorted(KV_BYTES)))
    def begin(self, policy: Policy, kv_bytes: str) -> None:
        self.policy = policy
        self.kv_bytes = KV_BYTES[kv_bytes]
        self.scheduler = Scheduler(policy, self.kv_bytes)
        self.sequences: list[Sequence] = []
        self.num_added = 0
        self.num_joined = 0
        self.is_paused = False

    # What happens.

    @rule(
        num_tokens=st.integers(1, 40),
        cached=st.integers(0, 39),
        limit=st.integers(1, 30) | st.just(UNSET),
        num_new=st.integers(1, LONGEST_RUN),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def add(self, num_tokens: int, cached: int, limit: int, num_new: int, priority: int) -> None:
        sequence = Sequence(
            id=f"s{self.num_added}",
            priority=priority,
            arrival=self.num_added,
            fed_from=num_tokens,
            limit=limit,
            num_new=min(num_new, limit),
            cached=min(cached, num_tokens - 1),
        )
        self.num_added += 1
        self.sequences.append(sequence)
        self.scheduler.add(
            sequence.id,
            num_tokens=num_tokens,
            token_limit=limit,
            cached_tokens=sequence.cached,
            priority=priority,
        )

    @rule(prefill_tokens=st.integers(1, 40), times=st.integers(1, 6))
    def plan(self, prefill_tokens: int, times: int) -> None:
        for _ in range(times):
            self.carry_out(self.scheduler.plan(prefill_tokens), prefill_tokens)
            self.in_budget()

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def remove(self, pick: int) -> None:
        sequence = self.sequences.pop(pick % len(self.sequences))
        self.scheduler.remove(sequence.id)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        rows = [sequence for sequence in self.sequences if sequence.generated]
        if rows:
            self.finish(rows[pick % len(rows)])

    @precondition(lambda self: self.waiting)
    @rule(pick=picks)
    def hold(self, pick: int) -> None:
        sequence = self.waiting[pick % len(self.waiting)]
        sequence.is_held = True
        self.scheduler.hold(sequence.id)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        sequence = self.sequences[pick % len(self.sequences)]
        sequence.is_held = False
        self.scheduler.release(sequence.id)

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, cached=picks, shared=picks)
    def cache(self, pick: int, cached: int, shared: int) -> None:
        sequence = self.waiting[pick % len(self.waiting)]
        sequence.cached = min(cached, sequence.fed_from - 1)
        sequence.shared = min(shared, sequence.cached)
        self.scheduler.set_cached(sequence.id, sequence.cached, shared_tokens=sequence.shared)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, num_tokens=st.integers(1, 45))
    def cut(self, pick: int, num_tokens: int) -> None:
        sequence = self.sequences[pick % len(self.sequences)]
        sequence.cuts.add(num_tokens)
        self.scheduler.cut(sequence.id, num_tokens)

    @precondition(lambda self: self.rows)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        row = self.rows[pick % len(self.rows)]
        if row.state is State.DECODING and not row.may_decode:
            with pytest.raises(ValueError, match="generated all"):
                self.scheduler.preempt(row.id)
        else:
            self.scheduler.preempt(row.id)
            row.wait_again()

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.is_paused = paused
        self.scheduler.pause_admission(paused)

    @rule(completion_tokens=st.integers(0, LONGEST_RUN))
    def observe(self, completion_tokens: int) -> None:
        self.scheduler.finished_with(completion_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.pause(False)
        for index in range(len(self.sequences)):
            self.release(index)
        longest = sum(s.fed_from + s.num_new + 4 for s in self.sequences)
        for _ in range(10 + 4 * longest):
            if not self.scheduler.has_work:
                break
            self.plan(8, 1)
            for row in [row for row in self.rows if row.generated >= row.num_new]:
                self.finish(row)
        assert self.sequences == []
        assert not self.scheduler.has_work

    # What must hold of a plan.

    def carry_out(self, plan: Plan, prefill_tokens: int) -> None:
        self.check_overflowed(plan)
        self.check_preempted(plan)
        could_decode = [row.id for row in self.rows if row.may_decode]
        self.check_admitted(plan)
        self.check_chunks(plan, prefill_tokens)
        assert sorted(plan.decoding) == sorted(could_decode)
        in_join_order = [name for name in self.scheduler.decoding if name in plan.decoding]
        assert list(plan.decoding) == in_join_order
        for name in plan.decoding:
            row = self.get(name)
            row.kv_tokens += 1
            row.generated += 1
        for chunk in plan.chunks:
            row = self.get(chunk.sequence_id)
            row.kv_tokens = chunk.stop
            if chunk.is_last:
                row.state = State.DECODING

    def check_overflowed(self, plan: Plan) -> None:
        for name in plan.overflowed:
            sequence = self.get(name)
            assert self.own_bytes(sequence, sequence.needed) > self.policy.kv_budget_bytes
            assert not sequence.is_held
            self.sequences.remove(sequence)

    def check_preempted(self, plan: Plan) -> None:
        may_go = [row for row in self.rows if row.state is State.PREFILLING or row.may_decode]
        may_go.sort(key=lambda row: (row.priority, -(row.joined or 0)))
        is_for_one_that_waits = self.bytes_needed() <= self.policy.kv_budget_bytes
        if plan.preempted and is_for_one_that_waits:
            head = min((s for s in self.waiting if not s.is_held), key=lambda s: s.place)
            may_go = [
                row
                for row in may_go
                if row.priority + self.policy.yield_gap <= head.priority
                and row.yields < self.policy.max_yields
            ]
        assert list(plan.preempted) == [row.id for row in may_go[: len(plan.preempted)]]
        for name in plan.preempted:
            row = self.get(name)
            if is_for_one_that_waits:
                row.yields += 1
            else:
                assert self.bytes_needed() > self.policy.kv_budget_bytes
            row.wait_again()
        assert self.bytes_needed() <= self.policy.kv_budget_bytes

    def check_admitted(self, plan: Plan) -> None:
        could_join = sorted(
            (s for s in self.waiting if not s.is_held), key=lambda sequence: sequence.place
        )
        if plan.preempted or self.is_paused:
            assert plan.admitted == ()
        elif could_join and not self.rows:
            assert plan.admitted[:1] == (could_join[0].id,)
        assert set(plan.admitted) <= {sequence.id for sequence in could_join}
        left = [sequence for sequence in could_join if sequence.id not in plan.admitted]
        for name in plan.admitted:
            row = self.get(name)
            if left and row.place > left[0].place:
                left[0].overtaken += 1
                assert left[0].overtaken <= self.policy.max_overtakes
            row.joined = self.num_joined
            self.num_joined += 1
            row.kv_tokens = row.cached
            is_prefilled = row.cached == row.fed_from - 1
            row.state = State.DECODING if is_prefilled else State.PREFILLING

    def check_chunks(self, plan: Plan, prefill_tokens: int) -> None:
        prefilling = [row for row in self.rows if row.state is State.PREFILLING]
        lacking = {row.id: row.fed_from - 1 - row.kv_tokens for row in prefilling}
        sizes = {chunk.sequence_id: chunk.stop - chunk.start for chunk in plan.chunks}
        assert len(sizes) == len(plan.chunks)
        assert all(sizes.values())
        assert sum(sizes.values()) <= min(prefill_tokens, sum(lacking.values()))
        if not any(row.cuts for row in prefilling):
            assert sum(sizes.values()) == min(prefill_tokens, sum(lacking.values()))
        for chunk in plan.chunks:
            row = self.get(chunk.sequence_id)
            assert chunk.start == row.kv_tokens
            assert chunk.is_last == (chunk.stop == row.fed_from - 1)
            assert sizes[row.id] <= row.until_cut() <= lacking[row.id]
        if prefilling:
            oldest = min(prefilling, key=lambda row: row.joined or 0)
            share = prefill_tokens * self.policy.oldest_share
            assert sizes.get(oldest.id, 0) >= min(oldest.until_cut(), share)

    # What must hold always.

    @invariant()
    def in_budget(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        used = sum(self.own_bytes(row, row.kv_tokens) for row in self.rows)
        assert scheduler.kv_bytes_used == used <= self.policy.kv_budget_bytes
        assert scheduler.num_rows == len(self.rows) <= self.policy.max_rows
        assert scheduler.num_waiting == len(self.waiting)
        assert scheduler.kv_bytes_reserved >= self.bytes_needed()
        for sequence in self.sequences:
            assert scheduler.state_of(sequence.id) is sequence.state
            assert scheduler.tokens_of(sequence.id) == sequence.kv_tokens
        going_on = [row for row in self.rows if row.state is State.PREFILLING or row.may_decode]
        first = min(going_on, key=lambda row: (row.priority, -(row.joined or 0)), default=None)
        assert scheduler.first_to_go() == (first.id if first else None)

    # Helpers.

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.state is State.WAITING]

    @property
    def rows(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.state is not State.WAITING]

    def get(self, name: str) -> Sequence:
        [sequence] = [sequence for sequence in self.sequences if sequence.id == name]
        return sequence

    def bytes_needed(self) -> int:
        return sum(self.own_bytes(row, row.needed) for row in self.rows)

    def own_bytes(self, sequence: Sequence, num_tokens: int) -> int:
        return self.kv_bytes(max(num_tokens - sequence.shared, 0))

    def finish(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.scheduler.remove(sequence.id)
        self.scheduler.finished_with(sequence.generated)


def run(max_examples: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_plans_keep_the_rules() -> None:
    run(120)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_plans_keep_the_rules_for_long() -> None:
    run(2000)
