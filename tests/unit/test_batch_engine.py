"""Our engine on a tiny random model: whatever happens around a row, its tokens stay its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.nn.layers.base import Module
from mlx_lm.models import qwen3

from tests.engine_bench import (
    EOS,
    GREEDY,
    NOISY,
    PLENTY,
    VOCABULARY,
    Bench,
    alone,
    budget_for,
    embeddings,
    expected,
    request,
    tiny_model,
)
from workers.engine import Failed, LogitRules, RowRequest
from workers.errors import InsufficientMemory, InvalidLogits
from workers.memory import MemoryGuard
from workers.packed import PackedRunner
from workers.runner import PromptChunk
from workers.sampling import SamplingPlan


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_rows_are_what_they_are_alone_whatever_joins_and_leaves(data: st.DataObject) -> None:
    """Any lengths, limits, sampling, order, budget and moments of joining."""
    drawn = st.tuples(
        st.sampled_from([1, 2, 9, 40, 127, 128, 129, 300]),
        st.sampled_from([1, 2, 7, 20]),
        st.sampled_from([GREEDY, NOISY, SamplingPlan(0.7, 1.0, 5)]),
    )
    rows = data.draw(st.lists(drawn, min_size=1, max_size=10))
    requests = [
        request(str(i), length=length, limit=limit, plan=plan)
        for i, (length, limit, plan) in enumerate(rows)
    ]
    bench = Bench(
        budget=data.draw(st.sampled_from([PLENTY, 512 * 1024])),
        max_rows=data.draw(st.sampled_from([1, 3, 8])),
        chunk=data.draw(st.sampled_from([17, 64, 1000])),
    )
    for one in requests:
        bench.add(one)
        for _ in range(data.draw(st.integers(0, 6))):
            bench.step()
    assert bench.run() == expected(requests)
    assert bench.failed == {}
    assert bench.engine.peak_kv_bytes <= bench.budget
    assert bench.runner.nbytes == 0


def test_a_row_that_is_removed_leaves_its_neighbours_as_they_are() -> None:
    bench = Bench()
    kept = [request(name, length=30, limit=12) for name in "abc"]
    bench.add(*kept, request("gone", length=30, limit=12), request("never", length=30))
    bench.engine.remove(["never", "unknown"])
    while len(bench.tokens.get("gone", [])) < 3:
        bench.step()
    bench.engine.remove(["gone"])
    late = request("late", length=50, limit=12)
    bench.add(late)
    bench.run()
    assert bench.tokens.pop("gone") == alone("gone", 30, 12, GREEDY)[:3]
    assert bench.tokens == expected([*kept, late])


def test_rows_are_decoded_together() -> None:
    bench = Bench()
    sizes: list[int] = []
    decode = bench.runner.decode

    def counted(order: Sequence[str], tokens: mx.array) -> mx.array:
        sizes.append(len(order))
        return decode(order, tokens)

    bench.runner.decode = counted  # type: ignore[method-assign]
    bench.add(*[request(name, length=5 + 30 * i, limit=40) for i, name in enumerate("abcd")])
    bench.run()
    assert max(sizes) == 4


# --- memory ---


def test_rows_that_outgrow_the_guess_are_pre_empted_and_lose_nothing() -> None:
    # Both fit while they are short; together they outgrow it.
    bench = Bench(budget=budget_for(3, 128))
    rows = [request(name, length=100, limit=60) for name in "ab"]
    bench.add(*rows)
    assert bench.run() == expected(rows)
    assert bench.engine.peak_kv_bytes <= bench.budget


def test_a_prompt_that_can_never_fit_is_refused_with_numbers() -> None:
    bench = Bench(budget=budget_for(1, 256))
    fits = request("fits", length=200, limit=3)
    bench.add(request("huge", length=300), fits)
    assert bench.run() == expected([fits])
    assert isinstance(bench.failed["huge"], InsufficientMemory)
    assert "301 tokens need" in str(bench.failed["huge"])
    assert "--kv-memory" in str(bench.failed["huge"])


def test_a_row_that_outgrows_all_memory_alone_fails_after_what_it_could_say() -> None:
    bench = Bench(budget=budget_for(1, 256))
    bench.add(request("long", length=250, limit=50))
    bench.run()
    assert isinstance(bench.failed["long"], InsufficientMemory)
    assert bench.tokens["long"] == alone("long", 250, 50, GREEDY)[: len(bench.tokens["long"])]
    assert len(bench.tokens["long"]) == 7  # 250 + 7 - 1 of them are in memory: 256


def test_under_memory_pressure_the_newest_rows_give_theirs_back_and_lose_nothing() -> None:
    limit = budget_for(5, 128)
    bench = Bench(max_rows=8)
    bench.engine._memory = MemoryGuard(limit, active_bytes=lambda: bench.runner.nbytes)
    rows = [request(name, limit=80) for name in "abcdefgh"]
    bench.add(*rows)
    while len(bench.tokens.get("h", [])) < 3:
        bench.step()
    assert bench.runner.nbytes == budget_for(8, 128)
    for _ in range(200):
        bench.step()
        if bench.runner.nbytes <= limit:
            break
    assert bench.runner.nbytes <= limit
    assert bench.engine.num_rows == 8  # those that gave their memory back wait
    assert bench.run() == expected(rows)
    assert bench.failed == {}


def test_nothing_is_admitted_while_memory_is_tight_and_somebody_runs() -> None:
    active = 0
    bench = Bench(memory=MemoryGuard(1000, active_bytes=lambda: active))
    bench.add(request("a", limit=80))
    while len(bench.tokens.get("a", [])) < 3:
        bench.step()
    active = 1010
    for _ in range(20):
        bench.step()
    bench.add(request("late", limit=3))
    while len(bench.tokens["a"]) < 70:
        bench.step()
    assert "late" not in bench.tokens
    bench.run()  # and the last one is tried even so
    assert bench.tokens["late"] == alone("late", 9, 3, GREEDY)


# --- containment ---


def poisoned_model() -> Module:
    """Return the tiny model with an embedding that is not a number, that of token 127."""
    model: Any = qwen3.Model(tiny_model().args)  # type: ignore[attr-defined]
    model.update(tiny_model().parameters())  # type: ignore[no-untyped-call]
    # Untied, so that the poison is in one row's states and not in everyone's logits.
    weight = embeddings()
    model.model.embed_tokens.weight = weight
    clean = model.model.embed_tokens

    class Poisoned(Module):
        def __call__(self, ids: mx.array) -> mx.array:
            embedded: mx.array = clean(ids)
            return mx.where((ids == 127)[..., None], mx.nan, embedded)

        def as_linear(self, x: mx.array) -> mx.array:
            logits: mx.array = clean.as_linear(x)
            return logits

    model.model.embed_tokens = Poisoned()  # type: ignore[no-untyped-call]
    return model  # type: ignore[no-any-return]


def test_nan_ends_its_row_alone_and_does_not_stay_in_memory() -> None:
    bench = Bench(model=poisoned_model(), max_rows=2)
    rows = [request(name, length=40, limit=10) for name in "abcdefghijkl"]
    clean = [row for row in rows if 127 not in row.prompt_ids]
    bench.add(request("bad", tokens=[5, 127, 9, 3]), *clean)
    bench.run()
    assert isinstance(bench.failed.pop("bad"), InvalidLogits)
    assert bench.failed == {}
    assert bench.tokens == expected(clean)
    assert len(clean) >= 2  # one of them took the slot that had held NaN


def test_nan_of_a_row_that_left_before_anybody_saw_it_harms_no_other() -> None:
    bench = Bench(model=poisoned_model(), max_rows=2)
    neighbour = request("neighbour", tokens=[6] * 90, limit=10)
    bench.add(request("bad", tokens=[*[5] * 60, 127, 9, 3]), neighbour)
    while (
        not bench.runner.store.blocks
        or min(map(bench.runner.store.length, ("bad", "neighbour"))) < 62
    ):
        bench.step()
    bench.engine.remove(["bad"])
    bench.add(request("heir", tokens=[6, 7, 8, 9, 10], limit=10))
    bench.run()
    assert bench.failed == {}
    assert len(bench.tokens["heir"]) == 10


def test_nan_in_a_prefix_is_not_handed_on() -> None:
    bench = Bench(model=poisoned_model(), chunk=64)
    shared = [5] * 60
    heirs = [request(f"heir-{i}", tokens=[*shared, 7, 8 + i], limit=5) for i in range(3)]
    bench.add(request("bad", tokens=[*shared, 127, 9, 3]), *heirs)
    bench.run()
    assert set(bench.failed) == {"bad"}
    assert all(len(bench.tokens[heir.row_id]) == 5 for heir in heirs)


def test_a_row_whose_every_token_is_forbidden_fails_alone() -> None:
    class Nothing:
        def fill(self, mask_row: npt.NDArray[np.uint32]) -> None:
            mask_row[:] = 0

        def accept(self, token_id: int) -> None: ...

    plain = request("plain")
    bench = Bench()
    bench.add(plain, request("none", matcher=Nothing()))
    bench.run()
    assert isinstance(bench.failed["none"], InvalidLogits)
    assert bench.tokens == expected([plain])


def test_a_token_outside_the_vocabulary_never_reaches_the_model() -> None:
    bench = Bench()
    good = request("good")
    bench.add(request("high", tokens=[5, VOCABULARY]), good, request("low", tokens=[-1, 5]))
    assert bench.run() == expected([good])
    assert set(bench.failed) == {"high", "low"}


class Breaking(PackedRunner):
    """A runner that raises in the calls that are asked for."""

    def __init__(self, should_raise: Callable[[str, int], bool]) -> None:
        super().__init__(tiny_model())
        self._should_raise = should_raise
        self.calls = {"prefill": 0, "decode": 0}

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[mx.array]:
        self._count("prefill")
        return super().prefill(chunks)

    def decode(self, order: Sequence[str], tokens: mx.array) -> mx.array:
        self._count("decode")
        return super().decode(order, tokens)

    def _count(self, name: str) -> None:
        self.calls[name] += 1
        if self._should_raise(name, self.calls[name]):
            raise RuntimeError("the device is on fire")


@pytest.mark.parametrize("what", ["prefill", "decode"])
@pytest.mark.parametrize("when", [1, 2, 5])
def test_a_step_that_raises_costs_no_row_a_token(what: str, when: int) -> None:
    bench = Bench(runner=Breaking(lambda name, count: name == what and count == when))
    rows = [request(name, length=20 * (i + 1), limit=12) for i, name in enumerate("abcd")]
    rows += [request("noisy", plan=NOISY, limit=12)]
    bench.add(*rows)
    assert bench.run() == expected(rows)
    assert bench.failed == {}


def test_steps_that_go_on_raising_are_reported() -> None:
    bench = Bench(runner=Breaking(lambda name, count: name == "decode" and count > 3))
    bench.add(request("a", limit=12))
    with pytest.raises(RuntimeError, match="on fire"):
        bench.run()
    assert bench.tokens["a"] == alone("a", 9, 12, GREEDY)[: len(bench.tokens["a"])]


def test_failures_far_apart_are_not_added_up() -> None:
    bench = Bench(runner=Breaking(lambda name, count: name == "decode" and count % 4 == 0))
    row = request("a", limit=30)
    bench.add(row)
    assert bench.run() == expected([row])


def test_an_end_of_sequence_token_ends_a_row() -> None:
    """Some seed among these draws the end of sequence before the limit."""
    plans = [SamplingPlan(3.0, 1.0, seed) for seed in range(20)]
    rows = [request(str(i), limit=20, plan=plan) for i, plan in enumerate(plans)]
    bench = Bench()
    bench.add(*rows)
    assert bench.run() == expected(rows)
    ended = [tokens for tokens in bench.tokens.values() if len(tokens) < 20]
    assert ended
    assert all(tokens[-1] == EOS and EOS not in tokens[:-1] for tokens in ended)


def test_events_of_refused_rows_come_without_any_other_work() -> None:
    bench = Bench()
    bench.add(request("bad", tokens=[VOCABULARY]))
    assert bench.engine.has_work
    [event] = bench.engine.step()
    assert isinstance(event, Failed)
    assert not bench.engine.has_work


# --- what a row may ask for ---


def first_logits(prompt: Sequence[int]) -> mx.array:
    model: Any = tiny_model()
    logits: mx.array = model(mx.array([list(prompt)]))[0, -1]
    return logits


def test_bias_forbids_and_forces_tokens_of_its_own_row_only() -> None:
    plain = request("plain", limit=8)
    favourite = alone("plain", 9, 8, GREEDY)[0]
    bench = Bench()
    bench.add(
        plain,
        request(
            "without", tokens=plain.prompt_ids, limit=8, rules=LogitRules(((favourite, -100),))
        ),
        request("forced", tokens=plain.prompt_ids, limit=8, rules=LogitRules(((77, 100.0),))),
    )
    bench.run()
    assert bench.tokens["plain"] == alone("plain", 9, 8, GREEDY)
    assert favourite not in bench.tokens["without"]
    assert bench.tokens["forced"] == [77] * 8


@pytest.mark.parametrize(
    "rules",
    [
        LogitRules(repetition_penalty=9.0),
        LogitRules(frequency_penalty=20.0),
        LogitRules(presence_penalty=50.0, bias=((5, 1.0),)),
    ],
)
def test_penalties_follow_the_whole_history(rules: LogitRules) -> None:
    """Against a loop of their definitions over mlx-lm's own logits."""
    made = request("a", length=40, limit=12, rules=rules)
    bench = Bench()
    bench.add(request("neighbour", length=70, limit=12), made, request("last", limit=12))
    bench.run()
    tokens = list(made.prompt_ids)
    for token in bench.tokens["a"]:
        logits = np.array(first_logits(tokens))
        answer = Counter(tokens[len(made.prompt_ids) :])
        for seen in set(tokens):
            value = logits[seen]
            factor = rules.repetition_penalty
            logits[seen] = value / factor if value > 0 else value * factor
            if answer[seen]:
                logits[seen] -= rules.frequency_penalty * answer[seen] + rules.presence_penalty
        for biased, value in rules.bias:
            logits[biased] += value
        assert token == int(np.argmax(logits))
        tokens.append(token)
    assert bench.tokens["a"] != alone("a", 40, 12, GREEDY)


def test_no_stop_token_is_drawn_before_the_least_number_of_tokens() -> None:
    always_eos = ((EOS, 100.0),)
    bench = Bench()
    bench.add(
        request("at once", limit=9, rules=LogitRules(always_eos)),
        request("later", limit=9, rules=LogitRules(always_eos, min_tokens=5)),
    )
    bench.run()
    assert bench.tokens["at once"] == [EOS]
    assert len(bench.tokens["later"]) == 6
    assert bench.tokens["later"].index(EOS) == 5


def test_log_probabilities_are_those_of_the_model_at_each_place() -> None:
    asked = request("asked", length=30, limit=10, plan=NOISY, num_top_logprobs=3)
    bare = request("bare", length=50, limit=10, num_top_logprobs=0)
    bench = Bench()
    bench.add(asked, request("silent", length=20, limit=10), bare)
    bench.run()
    assert "silent" not in bench.logprobs
    assert all(not found.top for found in bench.logprobs["bare"])
    tokens = list(asked.prompt_ids)
    for token, found in zip(bench.tokens["asked"], bench.logprobs["asked"], strict=True):
        logits = first_logits(tokens)
        expected_logprobs = np.array(logits - mx.logsumexp(logits))
        assert found.logprob == pytest.approx(float(expected_logprobs[token]), abs=1e-4)
        best = np.argsort(-expected_logprobs)[:3]
        assert [i for i, _ in found.top] == best.tolist()
        assert [v for _, v in found.top] == pytest.approx(expected_logprobs[best], abs=1e-4)
        tokens.append(token)


class Alternating:
    """Allows even ids, then odd ones, and so on; notes what it was told."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fill(self, mask_row: npt.NDArray[np.uint32]) -> None:
        mask_row[:] = 0xAAAAAAAA if len(self.accepted) % 2 else 0x55555555

    def accept(self, token_id: int) -> None:
        if token_id % 2 != len(self.accepted) % 2:
            raise ValueError(f"token {token_id} is not allowed here")
        self.accepted.append(token_id)


def test_a_matcher_decides_its_rows_tokens_and_no_others() -> None:
    matcher = Alternating()
    plain = request("plain", length=25, limit=20)
    bench = Bench(chunk=64)
    bench.add(
        request("matched", length=40, limit=20, matcher=matcher, plan=NOISY, tokens=None), plain
    )
    bench.run()
    tokens = bench.tokens["matched"]
    assert [token % 2 for token in tokens if token != EOS] == [i % 2 for i in range(len(tokens))][
        : len([t for t in tokens if t != EOS])
    ]
    assert matcher.accepted == [token for token in tokens if token != EOS]
    assert bench.tokens["plain"] == alone("plain", 25, 20, GREEDY)


def test_a_matcher_that_raises_ends_its_row_alone() -> None:
    class Broken(Alternating):
        def fill(self, mask_row: npt.NDArray[np.uint32]) -> None:
            if len(self.accepted) == 3:
                raise ValueError("lost its way")
            super().fill(mask_row)

    plain = request("plain", limit=20)
    bench = Bench()
    bench.add(plain, request("broken", limit=20, matcher=Broken()))
    bench.run()
    assert str(bench.failed["broken"]) == "lost its way"
    assert len(bench.tokens["broken"]) == 3
    assert bench.tokens["plain"] == alone("plain", 9, 20, GREEDY)


def test_rows_with_one_prompt_prefill_it_once() -> None:
    leader = request("a", length=100, limit=10, plan=SamplingPlan(1.0, 1.0, 1))
    others = [
        request(
            "a",
            row_id=f"a/{seed}",
            length=100,
            limit=10,
            plan=SamplingPlan(1.0, 1.0, seed),
        )
        for seed in (2, 3, 4)
    ]
    bench = Bench()
    fed = fed_tokens(bench)
    bench.add(leader, *others)
    bench.run()
    assert fed() == 99
    for one in (leader, *others):
        assert bench.tokens[one.row_id] == alone("a", 100, 10, one.sampling)


def test_a_prompt_is_not_kept_for_others_where_there_is_no_room_for_the_copy() -> None:
    bench = Bench(budget=budget_for(2, 512), prefix_bytes=1000, chunk=512)
    rows = [request("a", row_id=f"a/{i}", length=500, limit=5) for i in range(3)]
    bench.add(*rows)
    bench.run()
    assert all(tokens == alone("a", 500, 5, GREEDY) for tokens in bench.tokens.values())
    assert bench.engine.peak_kv_bytes <= bench.budget


def test_cancelled_rows_do_not_teach_that_answers_are_short() -> None:
    bench = Bench(max_rows=1)
    bench.add(*[request(str(i)) for i in range(40)])
    before = bench.engine._scheduler.expected_tokens
    bench.engine.remove([str(i) for i in range(1, 40)])
    assert bench.engine._scheduler.expected_tokens == before


def test_rows_that_wait_for_a_prompt_go_on_without_the_one_that_computes_it() -> None:
    leader = request("a", length=100, limit=10)
    others = [request("a", row_id=f"a/{i}", length=100, limit=10) for i in range(3)]
    bench = Bench()
    bench.add(leader, *others)
    bench.step()
    bench.engine.remove(["a"])
    bench.run()
    assert {one.row_id for one in others} == set(bench.tokens)
    assert all(tokens == alone("a", 100, 10, GREEDY) for tokens in bench.tokens.values())


# --- prefixes that prompts share ---


def fed_tokens(bench: Bench) -> Callable[[], int]:
    """Count the prompt tokens that the bench's runner is fed from now on."""
    fed = 0
    prefill = bench.runner.prefill

    def counted(chunks: Sequence[PromptChunk]) -> list[mx.array]:
        nonlocal fed
        fed += sum(len(chunk.tokens) for chunk in chunks)
        return prefill(chunks)

    bench.runner.prefill = counted  # type: ignore[method-assign]
    return lambda: fed


def test_a_prefix_of_many_prompts_is_computed_once_and_counted_as_cached() -> None:
    bench = Bench(max_rows=4)
    fed = fed_tokens(bench)
    shared = list(request("shared", length=200).prompt_ids)
    rows = [request(str(i), tokens=[*shared, 1 + i, 50, 60 + i], limit=5) for i in range(10)]
    bench.add(*rows)
    bench.run()
    assert fed() == 202 + 9 * 2  # the last token of a prompt is fed by its first step
    assert sorted(bench.cached.values()) == [0] + [200] * 9
    fresh = Bench(max_rows=1, prefix_bytes=0)
    fresh.add(*rows)
    assert fresh.run() == bench.tokens
    assert set(fresh.cached.values()) == {0}


def test_a_prompt_that_comes_later_uses_what_is_kept() -> None:
    bench = Bench()
    shared = list(request("shared", length=100).prompt_ids)
    first, second, third = (request(str(i), tokens=[*shared, 7, i + 1, 9]) for i in range(3))
    bench.add(first, second)
    bench.run()
    fed = fed_tokens(bench)
    bench.add(third)
    bench.run()
    assert (fed(), bench.cached["2"]) == (1, 101)


def test_a_running_row_gives_its_prefix_to_one_that_comes() -> None:
    bench = Bench()
    shared = list(request("shared", length=100).prompt_ids)
    bench.add(request("runs", tokens=[*shared, 3], limit=30))
    while len(bench.tokens.get("runs", [])) < 5:
        bench.step()
    bench.add(request("comes", tokens=[*shared, 4, 5], limit=5))
    bench.run()
    assert bench.cached["comes"] == 100


def test_groups_within_groups_compute_each_part_once() -> None:
    bench = Bench(max_rows=16, chunk=64)
    fed = fed_tokens(bench)
    system = list(request("system", length=60).prompt_ids)
    rows = []
    for group in "abc":
        part = list(request(group, length=80).prompt_ids)
        rows += [request(f"{group}{i}", tokens=[*system, *part, i + 1, 2]) for i in range(4)]
    bench.add(*rows)
    bench.run()
    distinct = 60 + 3 * 80 + 12
    assert fed() <= distinct + 3
    assert bench.failed == {}


def test_a_prefix_outlives_what_there_is_no_room_for_only_while_somebody_waits() -> None:
    row_bytes = budget_for(1, 128)
    bench = Bench(prefix_bytes=row_bytes, max_rows=2)
    for name in "xyz":
        shared = list(request(name, length=100).prompt_ids)
        bench.add(*[request(f"{name}{i}", tokens=[*shared, i + 1, 3]) for i in range(3)])
        bench.run()
        assert bench.engine._prefixes.in_memory.num_bytes == row_bytes
    assert [bench.cached[f"{name}1"] for name in "xyz"] == [100] * 3


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_rows_that_share_prefixes_are_what_they_are_alone(data: st.DataObject) -> None:
    """Any tree of prompts, moments of joining and leaving, budgets of rows and prefixes."""
    parts = [list(request(f"part-{i}", length=n).prompt_ids) for i, n in enumerate((20, 70, 150))]
    bench = Bench(
        budget=data.draw(st.sampled_from([PLENTY, 512 * 1024])),
        prefix_bytes=data.draw(st.sampled_from([0, 100_000, PLENTY])),
        max_rows=data.draw(st.sampled_from([2, 8])),
        chunk=data.draw(st.sampled_from([17, 200])),
    )
    added: dict[str, RowRequest] = {}
    for i in range(data.draw(st.integers(2, 9))):
        chosen = data.draw(st.lists(st.sampled_from(parts), min_size=0, max_size=2))
        tail = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        plan = data.draw(st.sampled_from([GREEDY, NOISY]))
        made = request(str(i), tokens=[*chain(*chosen), *tail], limit=6, plan=plan)
        added[made.row_id] = made
        bench.add(made)
        for _ in range(data.draw(st.integers(0, 4))):
            bench.step()
        if data.draw(st.integers(0, 5)) == 0:
            victim = data.draw(st.sampled_from(sorted(added)))
            bench.engine.remove([victim])
    bench.run()
    assert bench.failed == {}
    assert bench.engine.peak_kv_bytes <= bench.budget
    plain = Bench(max_rows=1, prefix_bytes=0)
    plain.add(*added.values())
    plain.run()
    for row_id, tokens in bench.tokens.items():
        assert tokens == plain.tokens[row_id][: len(tokens)]


# --- rows that go on with what an earlier one generated ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plan": NOISY},
        {"rules": LogitRules(repetition_penalty=3.0, frequency_penalty=5.0)},
        {"plan": NOISY, "rules": LogitRules(presence_penalty=3.0, min_tokens=9)},
        {"num_top_logprobs": 2},
    ],
)
@pytest.mark.parametrize("num_before", [1, 7, 11])
def test_a_row_goes_on_as_if_nothing_had_happened(num_before: int, options: Any) -> None:
    whole = Bench()
    whole.add(request("a", length=40, limit=12, **options))
    expected_tokens = whole.run()["a"]
    before = tuple(expected_tokens[:num_before])
    resumed = Bench()
    resumed.add(
        request("neighbour", length=90, limit=20),
        request("a", length=40, limit=12, generated_ids=before, **options),
    )
    resumed.run()
    assert [*before, *resumed.tokens["a"]] == expected_tokens
    for found, wanted in zip(
        resumed.logprobs.get("a", []), whole.logprobs.get("a", [])[num_before:], strict=True
    ):
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_a_row_that_goes_on_uses_what_is_known_of_its_prompt() -> None:
    bench = Bench()
    first = request("first", length=200, limit=4)
    bench.add(first, request("beside", tokens=first.prompt_ids, limit=4))
    answer = bench.run()["first"]
    bench.add(request("again", tokens=first.prompt_ids, limit=4, generated_ids=tuple(answer[:2])))
    bench.run()
    assert bench.tokens["again"] == answer[2:]
    assert bench.cached["again"] == 199


# --- rows that make room for urgent ones ---


@pytest.mark.parametrize("prefix_bytes", [0, PLENTY])
def test_an_urgent_row_takes_a_place_at_once_and_the_other_loses_nothing(prefix_bytes: int) -> None:
    bench = Bench(max_rows=2, prefix_bytes=prefix_bytes, chunk=64)
    low = [request(name, length=40, limit=30, plan=NOISY) for name in ("a", "b")]
    bench.add(*low)
    while len(bench.tokens.get("b", [])) < 5:
        bench.step()
    urgent = request("urgent", length=40, limit=5, priority=1 << 33)
    bench.add(urgent)
    for _ in range(4):  # one makes room, it is admitted and prefilled, decoded, read
        bench.step()
    assert bench.tokens["urgent"]
    assert len(bench.tokens["b"]) < 10
    bench.run()
    assert bench.tokens == expected([*low, urgent])
    if prefix_bytes:  # what it held was kept
        assert bench.cached["b"] > 40
