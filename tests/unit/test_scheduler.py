"""The scheduler in named situations: who is admitted, prefilled, pre-empted, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from workers.scheduler import Chunk, Plan, Policy, Scheduler, SchedulerCorrupt, State

UNSET = 2**31
PREFILL = 512


def in_classes(num_tokens: int) -> int:
    """Bytes of a row whose capacity is 0, 256, 512, 1024 … tokens, at a byte a token."""
    if num_tokens == 0:
        return 0
    return max(256, 1 << (num_tokens - 1).bit_length())


def unpadded(num_tokens: int) -> int:
    return num_tokens


def make(kv_bytes: Callable[[int], int] = unpadded, **policy: Any) -> Scheduler:
    return Scheduler(Policy(**{"kv_budget_bytes": 10_000} | policy), kv_bytes)


def add_all(scheduler: Scheduler, *names: str, num_tokens: int = 10, token_limit: int = 10) -> None:
    for name in names:
        scheduler.add(name, num_tokens=num_tokens, token_limit=token_limit)


def step(scheduler: Scheduler, prefill_tokens: int = PREFILL) -> Plan:
    plan = scheduler.plan(prefill_tokens)
    scheduler.check_integrity()
    return plan


def until_preempted(scheduler: Scheduler) -> Plan:
    for _ in range(1000):
        plan = step(scheduler)
        if plan.preempted:
            return plan
    raise AssertionError("nothing was pre-empted in 1000 plans")


def run_out(scheduler: Scheduler, lengths: dict[str, int], most_plans: int = 10_000) -> list[str]:
    """Run to the end, each row for its length; return the order in which the rows ended."""
    num_generated = dict.fromkeys(lengths, 0)
    ended: list[str] = []
    for _ in range(most_plans):
        if not scheduler.has_work:
            return ended
        for name in step(scheduler).decoding:
            num_generated[name] += 1
            if num_generated[name] == lengths[name]:
                scheduler.remove(name)
                scheduler.finished_with(lengths[name])
                ended.append(name)
    raise AssertionError(f"still at work after {most_plans} plans: {ended} ended")


# One sequence.


def test_a_prompt_is_prefilled_but_for_its_last_token_and_then_decoded_to_its_limit() -> None:
    scheduler = make()
    scheduler.add("a", num_tokens=10, token_limit=2)
    assert scheduler.state_of("a") is State.WAITING
    assert step(scheduler, 6) == Plan((), (), ("a",), (Chunk("a", 0, 6, is_last=False),), ())
    assert scheduler.state_of("a") is State.PREFILLING
    assert step(scheduler, 6) == Plan((), (), (), (Chunk("a", 6, 9, is_last=True),), ())
    assert scheduler.state_of("a") is State.DECODING
    assert [step(scheduler).decoding for _ in range(3)] == [("a",), ("a",), ()]
    assert (scheduler.tokens_of("a"), scheduler.decoding) == (11, ("a",))
    scheduler.remove("a")
    assert (scheduler.has_work, scheduler.kv_bytes_used) == (False, 0)


def test_prefill_begins_after_the_cached_tokens() -> None:
    scheduler = make()
    scheduler.add("a", num_tokens=10, token_limit=2, cached_tokens=2)
    scheduler.set_cached("a", 7)
    assert step(scheduler).chunks == (Chunk("a", 7, 9, is_last=True),)


@pytest.mark.parametrize(("num_tokens", "cached_tokens"), [(1, 0), (10, 9)])
def test_a_row_with_nothing_to_prefill_decodes_from_the_plan_after_its_admission_on(
    num_tokens: int, cached_tokens: int
) -> None:
    scheduler = make()
    scheduler.add("a", num_tokens=num_tokens, token_limit=5, cached_tokens=cached_tokens)
    assert step(scheduler) == Plan((), (), ("a",), (), ())
    assert scheduler.state_of("a") is State.DECODING
    assert step(scheduler).decoding == ("a",)


# Prefill.


def test_short_prompts_start_within_a_few_steps_beside_one_of_6000_tokens() -> None:
    scheduler = make(max_rows=64, kv_budget_bytes=1_000_000)
    shorts = [f"s{index}" for index in range(63)]
    scheduler.add("long", num_tokens=6000, token_limit=50)
    add_all(scheduler, *shorts, num_tokens=60, token_limit=50)
    long_chunks = []
    for num_steps in range(1, 9):
        plan = step(scheduler, 1024)
        long_chunks += [chunk for chunk in plan.chunks if chunk.sequence_id == "long"]
        assert len(long_chunks) == num_steps
        assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= 1024
        if scheduler.num_decoding == len(shorts):
            break
    assert scheduler.num_prefilling == 1
    for _ in range(10 - num_steps):
        step(scheduler, 1024)
    # 6000 + 63 x 60 tokens are nearly ten full budgets: none is wasted.
    assert scheduler.state_of("long") is State.DECODING


def test_a_stream_of_short_prompts_does_not_stop_a_long_one() -> None:
    scheduler = make(max_rows=8, kv_budget_bytes=1_000_000)
    scheduler.add("long", num_tokens=1001, token_limit=5)
    names = (f"s{index}" for index in count())
    for _ in range(20):
        while scheduler.num_waiting < 8:
            add_all(scheduler, next(names), num_tokens=101)
        for name in step(scheduler, 100).decoding:
            scheduler.remove(name)
    assert scheduler.state_of("long") is State.DECODING


def test_what_the_short_prompts_leave_goes_to_the_oldest() -> None:
    scheduler = make()
    scheduler.add("long", num_tokens=1000, token_limit=5)
    scheduler.add("middle", num_tokens=31, token_limit=5)
    scheduler.add("short", num_tokens=11, token_limit=5)
    assert [(c.sequence_id, c.stop) for c in step(scheduler, 60).chunks] == [
        ("long", 30),
        ("short", 10),
        ("middle", 20),
    ]
    assert [(c.sequence_id, c.stop) for c in step(scheduler, 60).chunks] == [
        ("long", 80),
        ("middle", 30),
    ]


# Admission.


def test_a_huge_limit_does_not_empty_the_batch() -> None:
    scheduler = make(in_classes, max_rows=32, kv_budget_bytes=32 * 512, expected_tokens=256)
    names = [f"r{index}" for index in range(40)]
    add_all(scheduler, *names, num_tokens=100, token_limit=UNSET)
    assert step(scheduler).admitted == tuple(names[:32])


def test_guesses_follow_the_lengths_that_were_observed() -> None:
    scheduler = make(expected_tokens=256)
    assert scheduler.expected_tokens == 256
    for _ in range(400):
        scheduler.finished_with(20)
    assert 20 <= scheduler.expected_tokens <= 21
    for _ in range(40):
        scheduler.finished_with(500)
    assert scheduler.expected_tokens > 400


def test_a_guess_is_never_above_the_limit_of_the_row() -> None:
    scheduler = make(kv_budget_bytes=200, expected_tokens=256)
    add_all(scheduler, *"abcdefghijk", num_tokens=10, token_limit=10)
    assert len(step(scheduler).admitted) == 10
    assert scheduler.kv_bytes_reserved == 200


def test_higher_priorities_come_first_and_equal_ones_in_their_order() -> None:
    scheduler = make(max_rows=4)
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)]:
        scheduler.add(name, num_tokens=5, token_limit=5, priority=priority)
    assert step(scheduler).admitted == ("b", "d", "a", "c")


def test_a_sequence_that_fits_passes_a_head_that_does_not() -> None:
    scheduler = make(kv_budget_bytes=100)
    add_all(scheduler, "first", num_tokens=40)
    add_all(scheduler, "large", num_tokens=80)
    add_all(scheduler, "small", num_tokens=20)
    assert step(scheduler).admitted == ("first", "small")


def test_a_head_that_does_not_fit_is_not_starved() -> None:
    scheduler = make(kv_budget_bytes=100, max_overtakes=3)
    names = (f"s{index}" for index in count())
    add_all(scheduler, next(names), next(names))
    step(scheduler)
    add_all(scheduler, "large", num_tokens=80)
    admitted: list[str] = []
    for _ in range(20):
        add_all(scheduler, next(names))
        plan = step(scheduler)
        admitted += plan.admitted
        for name in scheduler.decoding:
            if scheduler.tokens_of(name) == 19:
                scheduler.remove(name)
    assert admitted[:4] == ["s2", "s3", "s4", "large"]


def test_a_sequence_expected_to_outgrow_the_budget_runs_alone() -> None:
    scheduler = make(kv_budget_bytes=100, expected_tokens=256)
    add_all(scheduler, "small", token_limit=5)
    add_all(scheduler, "large", num_tokens=90, token_limit=UNSET)
    add_all(scheduler, "late", token_limit=5)
    assert scheduler.fits_alone(99)
    assert not scheduler.fits_alone(100)
    assert run_out(scheduler, {"small": 5, "large": 8, "late": 5}) == ["small", "late", "large"]


def test_an_admission_waits_for_company_while_others_decode() -> None:
    scheduler = make(max_rows=8, join_wait_steps=3, min_joins=3)
    add_all(scheduler, "a", "b")
    assert step(scheduler).admitted == ("a", "b")
    add_all(scheduler, "c", "d")
    assert [step(scheduler).admitted for _ in range(4)] == [(), (), (), ("c", "d")]
    add_all(scheduler, "e", "f", "g")
    assert step(scheduler).admitted == ("e", "f", "g")


def test_a_held_sequence_keeps_its_place_and_blocks_nobody() -> None:
    scheduler = make(max_rows=2)
    add_all(scheduler, "a", "b", "c", "d")
    scheduler.hold("a")
    scheduler.hold("b")
    scheduler.release("b")
    assert step(scheduler).admitted == ("b", "c")
    assert scheduler.num_waiting == 2
    scheduler.release("a")
    scheduler.remove("c")
    assert step(scheduler).admitted == ("a",)


def test_nothing_but_held_sequences_is_no_work() -> None:
    scheduler = make()
    add_all(scheduler, "a")
    scheduler.hold("a")
    assert not scheduler.has_work
    assert step(scheduler) == Plan((), (), (), (), ())
    scheduler.release("a")
    assert scheduler.has_work


def test_a_pause_stops_admission_and_nothing_else() -> None:
    scheduler = make(max_rows=2)
    add_all(scheduler, "a")
    step(scheduler)
    scheduler.pause_admission(True)
    add_all(scheduler, "b")
    assert step(scheduler) == Plan((), (), (), (), ("a",))
    scheduler.remove("a")
    assert not scheduler.has_work
    scheduler.pause_admission(False)
    assert step(scheduler).admitted == ("b",)


# Pre-emption.


def test_rows_are_preempted_newest_first_when_the_guess_was_short() -> None:
    scheduler = make(in_classes, kv_budget_bytes=4 * 256, expected_tokens=10)
    lengths = dict.fromkeys("abcd", 300)
    add_all(scheduler, *lengths, num_tokens=200, token_limit=UNSET)
    assert step(scheduler, 10_000).admitted == tuple("abcd")
    # At 257 tokens each row needs twice the room: two of four stay.
    plans = [step(scheduler) for _ in range(58)]
    assert [plan.preempted for plan in plans] == [()] * 57 + [("d", "c")]
    assert plans[-1].decoding == ("a", "b")
    assert scheduler.kv_bytes_used == 2 * 512
    # They come back in their order, with what they generated to feed again.
    scheduler.remove("a")
    assert step(scheduler).admitted == ("c",)
    assert scheduler.state_of("c") is State.DECODING
    assert scheduler.tokens_of("c") == 200 + 57 - 1


def test_lower_priorities_are_preempted_before_newer_rows() -> None:
    scheduler = make(kv_budget_bytes=64, expected_tokens=1)
    scheduler.add("low", num_tokens=20, token_limit=50, priority=-1)
    step(scheduler)
    scheduler.add("high", num_tokens=20, token_limit=50)
    assert until_preempted(scheduler).preempted == ("low",)


def test_a_preempted_row_comes_back_before_those_that_waited_and_with_headroom() -> None:
    scheduler = make(kv_budget_bytes=60, expected_tokens=1, headroom_tokens=16)
    add_all(scheduler, "a", num_tokens=20, token_limit=UNSET)
    add_all(scheduler, "large", num_tokens=45)
    add_all(scheduler, "b", num_tokens=20, token_limit=UNSET)
    assert step(scheduler).admitted == ("a", "b")
    assert until_preempted(scheduler).preempted == ("b",)
    assert (scheduler.state_of("b"), scheduler.tokens_of("b")) == (State.WAITING, 0)
    scheduler.remove("a")
    assert step(scheduler).admitted == ("b",)
    assert scheduler.kv_bytes_reserved == 31 + 16


def test_a_row_that_outlived_the_guess_keeps_headroom_from_those_that_wait() -> None:
    scheduler = make(kv_budget_bytes=60, expected_tokens=1, headroom_tokens=16)
    add_all(scheduler, "a", num_tokens=20, token_limit=UNSET)
    add_all(scheduler, "short", num_tokens=20, token_limit=4)
    for _ in range(3):
        step(scheduler)
    assert (scheduler.tokens_of("a"), scheduler.tokens_of("short")) == (21, 21)
    assert scheduler.kv_bytes_reserved == (21 + 16) + 23


def test_a_plan_that_preempts_admits_nobody() -> None:
    scheduler = make(kv_budget_bytes=60, expected_tokens=1, headroom_tokens=16)
    add_all(scheduler, "a", "b", num_tokens=20, token_limit=UNSET)
    step(scheduler)
    while scheduler.tokens_of("a") < 30:
        step(scheduler)
    add_all(scheduler, "small", num_tokens=1, token_limit=1)
    plan = step(scheduler)
    assert (plan.preempted, plan.admitted, plan.decoding) == (("b",), (), ("a",))


def test_preemption_does_not_thrash() -> None:
    scheduler = make(in_classes, kv_budget_bytes=8 * 512, expected_tokens=16)
    lengths = {f"r{index}": 400 for index in range(24)}
    add_all(scheduler, *lengths, num_tokens=100, token_limit=UNSET)
    num_generated = dict.fromkeys(lengths, 0)
    prefilled = 0
    for _ in range(2000):
        plan = step(scheduler)
        prefilled += sum(chunk.stop - chunk.start for chunk in plan.chunks)
        for name in plan.decoding:
            num_generated[name] += 1
            if num_generated[name] == lengths[name]:
                scheduler.remove(name)
    assert not scheduler.has_work
    # Sixteen rows of 256 began where eight of 512 fit: what they lose they lose about once.
    assert prefilled < 24 * 100 * 2.5


def test_the_engine_may_preempt_a_row_in_any_phase() -> None:
    scheduler = make(max_rows=2)
    scheduler.add("a", num_tokens=10, token_limit=10, cached_tokens=9)
    scheduler.add("b", num_tokens=40, token_limit=10, cached_tokens=4)
    step(scheduler, 8)
    step(scheduler, 8)
    assert scheduler.first_to_go() == "b"
    scheduler.preempt("b")
    scheduler.preempt("a")
    scheduler.preempt("a")
    assert scheduler.first_to_go() is None
    assert scheduler.num_waiting == 2
    plan = step(scheduler)
    assert plan.admitted == ("a", "b")
    assert plan.chunks == (Chunk("a", 0, 10, is_last=True), Chunk("b", 0, 39, is_last=True))
    decoded = [step(scheduler).decoding for _ in range(10)]
    assert decoded == [("a", "b")] * 9 + [("b",)]


def test_a_row_that_alone_outgrows_the_budget_is_reported_and_forgotten() -> None:
    scheduler = make(kv_budget_bytes=20, expected_tokens=1)
    add_all(scheduler, "a", token_limit=UNSET)
    plans = [step(scheduler) for _ in range(13)]
    assert [plan.overflowed for plan in plans] == [()] * 12 + [("a",)]
    # One plan to admit and prefill it, then the 11 tokens that fit.
    assert sum(len(plan.decoding) for plan in plans) == 11
    assert scheduler.state_of("a") is None
    assert not scheduler.has_work


def test_a_prompt_beyond_the_budget_is_reported_and_delays_nobody() -> None:
    scheduler = make(kv_budget_bytes=50)
    add_all(scheduler, "huge", num_tokens=51)
    add_all(scheduler, "a")
    assert not scheduler.fits_alone(51)
    plan = step(scheduler)
    assert (plan.overflowed, plan.admitted) == (("huge",), ("a",))


def test_a_row_that_waits_for_its_last_token_keeps_its_room_and_is_not_preempted() -> None:
    scheduler = make(kv_budget_bytes=30, expected_tokens=1)
    scheduler.add("a", num_tokens=10, token_limit=UNSET)
    scheduler.add("b", num_tokens=14, token_limit=2)
    for _ in range(3):
        step(scheduler)
    assert scheduler.tokens_of("b") == 15
    with pytest.raises(ValueError, match="remove it instead"):
        scheduler.preempt("b")
    assert until_preempted(scheduler).preempted == ("a",)
    assert scheduler.decoding == ("b",)
    assert scheduler.first_to_go() is None


# Numbers and mistakes.


def test_the_counts_say_where_the_sequences_are() -> None:
    scheduler = make(max_rows=3)
    add_all(scheduler, "a", "b", num_tokens=5)
    step(scheduler)
    add_all(scheduler, "c", num_tokens=100)
    add_all(scheduler, "d", "e")
    scheduler.hold("e")
    step(scheduler, 10)
    counts = (scheduler.num_waiting, scheduler.num_prefilling, scheduler.num_decoding)
    assert (*counts, scheduler.num_rows) == (2, 1, 2, 3)
    assert scheduler.decoding == ("a", "b")
    assert scheduler.first_to_go() == "c"
    assert scheduler.kv_bytes_used == 5 + 5 + 10
    assert scheduler.kv_bytes_reserved == 15 + 15 + 110


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_tokens": 0, "token_limit": 1},
        {"num_tokens": 1, "token_limit": 0},
        {"num_tokens": 1, "token_limit": 1, "cached_tokens": 1},
        {"num_tokens": 1, "token_limit": 1, "cached_tokens": -1},
    ],
)
def test_bad_numbers_are_refused_and_leave_nothing_behind(numbers: dict[str, int]) -> None:
    scheduler = make()
    with pytest.raises(ValueError, match="a "):
        scheduler.add("a", **numbers)
    assert scheduler.state_of("a") is None
    scheduler.check_integrity()


def test_an_id_in_use_is_refused_and_an_unknown_one_is_not_removed() -> None:
    scheduler = make()
    add_all(scheduler, "a")
    with pytest.raises(ValueError, match="already"):
        add_all(scheduler, "a")
    scheduler.remove("b")
    scheduler.release("b")
    with pytest.raises(KeyError):
        scheduler.hold("b")


def test_a_row_can_be_neither_held_nor_given_cached_tokens() -> None:
    scheduler = make()
    add_all(scheduler, "a")
    step(scheduler)
    with pytest.raises(ValueError, match="not waiting"):
        scheduler.hold("a")
    with pytest.raises(ValueError, match="not waiting"):
        scheduler.set_cached("a", 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_budget_bytes", 0),
        ("max_rows", 0),
        ("expected_tokens", 0),
        ("headroom_tokens", 0),
        ("max_overtakes", -1),
        ("oldest_share", 1.1),
        ("join_wait_steps", -1),
        ("min_joins", -1),
    ],
)
def test_a_policy_out_of_range_cannot_be_built(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Policy(**{"kv_budget_bytes": 1} | {name: value})  # type: ignore[arg-type]


def test_a_budget_of_no_prefill_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill_tokens"):
        make().plan(0)


def test_a_negative_completion_length_is_refused() -> None:
    with pytest.raises(ValueError, match="completion_tokens"):
        make().finished_with(-1)


def test_a_contradiction_is_noticed() -> None:
    sizes = [1]
    scheduler = make(lambda num_tokens: num_tokens * sizes[0], kv_budget_bytes=50)
    add_all(scheduler, "a", num_tokens=30)
    step(scheduler)
    sizes[0] = 2
    with pytest.raises(SchedulerCorrupt, match="58 bytes of 50"):
        scheduler.check_integrity()


def test_a_plan_looks_at_the_head_of_a_long_queue_only() -> None:
    lengths_asked: list[int] = []

    def counted(num_tokens: int) -> int:
        lengths_asked.append(num_tokens)
        return num_tokens

    scheduler = make(counted, kv_budget_bytes=1000, max_rows=4)
    add_all(scheduler, "a", num_tokens=500)
    step(scheduler)
    for index in range(5000):
        add_all(scheduler, f"large{index}", num_tokens=800)
    lengths_asked.clear()
    scheduler.plan(PREFILL)
    assert len(lengths_asked) < 100


# --- rows that make room for a far higher priority ---


def test_the_youngest_of_the_lowest_rows_makes_room_for_an_urgent_one() -> None:
    scheduler = make(max_rows=3, yield_gap=10)
    for name, priority in (("old", 0), ("low", -10), ("young", 0)):
        scheduler.add(name, num_tokens=4, token_limit=50, priority=priority)
    scheduler.plan(100)
    scheduler.add("urgent", num_tokens=4, token_limit=50, priority=10)
    assert scheduler.plan(100).preempted == ("low",)
    assert scheduler.plan(100).admitted == ("urgent",)
    scheduler.add("also", num_tokens=4, token_limit=50, priority=10)
    assert scheduler.plan(100).preempted == ("young",)


def test_nobody_makes_room_for_a_little_more_priority_or_more_often_than_twice() -> None:
    scheduler = make(max_rows=1, yield_gap=10, max_yields=2)
    scheduler.add("row", num_tokens=4, token_limit=50)
    scheduler.plan(100)
    scheduler.add("more", num_tokens=4, token_limit=50, priority=9)
    assert scheduler.plan(100).preempted == ()
    scheduler.remove("more")
    for times in range(3):
        scheduler.add("urgent", num_tokens=4, token_limit=50, priority=10)
        assert scheduler.plan(100).preempted == (("row",) if times < 2 else ())
        if times < 2:
            assert scheduler.plan(100).admitted == ("urgent",)
        scheduler.remove("urgent")
        scheduler.plan(100)
    assert scheduler.state_of("row") is State.DECODING


def test_no_row_leaves_for_one_that_would_not_fit_all_the_same() -> None:
    scheduler = make(kv_budget_bytes=100, yield_gap=10)
    scheduler.add("peer", num_tokens=60, token_limit=2, priority=10)
    scheduler.add("row", num_tokens=20, token_limit=2)
    scheduler.plan(100)
    scheduler.add("urgent", num_tokens=60, token_limit=2, priority=10)
    assert scheduler.plan(100).preempted == ()
