"""Prefixes that outlast the engine: what a row takes over from a store gives the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from queue_service.beginnings import common_length
from tests.engine_bench import GREEDY, VOCABULARY, Bench, WriteNow, request, tiny_model
from workers.checkpoint_tier import CheckpointTier
from workers.checkpoints.records import Identity
from workers.checkpoints.store import CheckpointStore, MemoryStore
from workers.packed import PackedRunner
from workers.padded import PaddedRunner
from workers.runner import Runner


def new_store() -> MemoryStore:
    return MemoryStore(Identity({"model": "tiny"}), 1 << 30)


def bench_on(store: CheckpointStore, runner: Runner | None = None, **options: object) -> Bench:
    runner = runner or PackedRunner(tiny_model())
    tier = CheckpointTier(store, WriteNow(store), runner)
    return Bench(runner=runner, tier=tier, **options)  # type: ignore[arg-type]


def prompts(shared: int, own: int, count: int, name: str = "p") -> list[list[int]]:
    chosen = random.Random(name)
    beginning = [chosen.randrange(1, VOCABULARY) for _ in range(shared)]
    return [beginning + [chosen.randrange(1, VOCABULARY) for _ in range(own)] for _ in range(count)]


def generate(bench: Bench, texts: Sequence[Sequence[int]], limit: int = 6) -> list[list[int]]:
    for index, tokens in enumerate(texts):
        bench.add(request(str(index), tokens=tokens, limit=limit, plan=GREEDY))
    found = bench.run()
    assert not bench.failed
    return [found[str(index)] for index in range(len(texts))]


def fresh(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    return generate(Bench(max_rows=1, prefix_bytes=0), texts)


RUNNERS = {
    "packed": lambda: PackedRunner(tiny_model()),
    "padded": lambda: PaddedRunner(tiny_model()),
    "alone": lambda: PaddedRunner(tiny_model(), batched=False),
}


@pytest.mark.parametrize("way", RUNNERS)
def test_a_new_engine_begins_with_what_another_stored(way: str) -> None:
    store, texts = new_store(), prompts(300, 20, 3)
    first = bench_on(store, RUNNERS[way]())
    assert generate(first, texts) == fresh(texts)
    second = bench_on(store, RUNNERS[way]())
    more = prompts(300, 20, 5)[3:]
    assert generate(second, more) == fresh(more)
    assert second.cached == {"0": 300, "1": 300}
    assert store.counts()["uses"] == 1  # both rows had it from one read


def test_tails_of_single_prompts_are_not_stored() -> None:
    store = new_store()
    bench = bench_on(store)
    generate(bench, [*prompts(0, 400, 3, "single"), *prompts(300, 100, 2)])
    assert store.counts()["writes"] == 1
    assert store.match(prompts(300, 100, 1)[0]).length == 300


def test_what_comes_for_the_second_time_is_stored() -> None:
    store, texts = new_store(), prompts(300, 30, 3)
    bench = bench_on(store, prefix_bytes=0)
    for index, tokens in enumerate(texts):
        bench.add(request(str(index), tokens=tokens))
        bench.run()
    assert [bench.cached[str(index)] for index in range(3)] == [0, 0, 300]


def test_what_begins_as_a_prompt_that_is_about_to_come_is_stored_by_the_first() -> None:
    store, texts = new_store(), prompts(300, 30, 3)
    bench = bench_on(store, prefix_bytes=0)
    bench.engine.expect(texts[1:])
    for index, tokens in enumerate(texts):
        bench.add(request(str(index), tokens=tokens))
        bench.run()
    assert [bench.cached[str(index)] for index in range(3)] == [0, 300, 300]
    assert store.match(texts[0]).length == 300


@pytest.mark.parametrize("chunk", [64, 1024])
def test_a_row_that_runs_keeps_what_the_next_one_begins_with(chunk: int) -> None:
    store, texts = new_store(), prompts(300, 30, 2)
    bench = bench_on(store, prefix_bytes=0, chunk=chunk)
    bench.add(request("0", tokens=texts[0], limit=4))
    bench.engine.step()
    bench.engine.expect(texts[1:])
    bench.run()
    assert store.match(texts[0]).length == 300


def test_a_prompt_that_was_expected_is_not_its_own_repetition() -> None:
    store, texts = new_store(), prompts(0, 300, 2, "single")
    bench = bench_on(store, prefix_bytes=0)
    bench.engine.expect(texts[:1])
    for index, tokens in enumerate(texts):
        bench.add(request(str(index), tokens=tokens))
        bench.engine.expect([tokens])  # looked at before it was claimed, told after
        bench.run()
    assert "writes" not in store.counts()


def test_choices_of_one_request_store_nothing() -> None:
    store = new_store()
    bench = bench_on(store)
    [tokens] = prompts(0, 300, 1)
    for index in range(3):
        bench.add(request(str(index), tokens=tokens, is_sibling=index > 0))
    bench.run()
    assert bench.cached == {"0": 0, "1": 299, "2": 299}
    assert "writes" not in store.counts()


def test_a_declared_prefix_is_stored_by_the_first_prompt() -> None:
    store, texts = new_store(), prompts(200, 30, 2)
    bench = bench_on(store, chunk=64)
    bench.add(request("first", tokens=texts[0], keep=(200,)))
    bench.run()
    other = bench_on(store)
    assert generate(other, texts[1:]) == fresh(texts[1:])
    assert other.cached == {"0": 200}


def test_a_chat_goes_on_where_its_answer_ended() -> None:
    store = new_store()
    [tokens] = prompts(0, 150, 1)
    first = bench_on(store)
    first.add(request("turn", tokens=tokens, limit=9, keeps_answer=True))
    answer = first.run()["turn"]
    assert first.kept == {"turn": (*tokens, *answer[:-1])}
    following = [*tokens, *answer, *prompts(0, 10, 1, "next")[0]]
    second = bench_on(store)
    assert generate(second, [following]) == fresh([following])
    assert second.cached == {"0": len(tokens) + len(answer) - 1}


def test_a_whole_prompt_that_is_stored_leaves_one_token_to_feed() -> None:
    store = new_store()
    texts = prompts(256, 0, 1) * 2
    generate(bench_on(store), texts)
    second = bench_on(store)
    assert generate(second, texts) == fresh(texts)
    assert second.cached == {"0": 255, "1": 255}


def test_a_store_of_another_model_is_not_used() -> None:
    store, texts = new_store(), prompts(300, 20, 3)
    generate(bench_on(store), texts)
    mx.random.seed(9)
    other = bench_on(store, PaddedRunner(tiny_model()))
    assert generate(other, texts) == fresh(texts)
    assert other.cached["0"] == 0


def test_rows_that_leave_while_their_prefix_is_read_are_forgotten() -> None:
    store, texts = new_store(), prompts(300, 20, 3)
    generate(bench_on(store), texts)
    bench = bench_on(store)
    bench.add(request("goes", tokens=texts[0]), request("stays", tokens=texts[1]))
    bench.engine.remove(["goes"])
    assert bench.run() == {"stays": fresh(texts[1:2])[0]}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
@pytest.mark.parametrize("way", RUNNERS)
def test_any_tree_of_prompts_gives_what_each_gives_alone(way: str, data: st.DataObject) -> None:
    """Prompts of one tree, engines one after the other on one store, any budget in memory."""
    store = new_store()
    chosen = random.Random(data.draw(st.integers(0, 1 << 16)))
    known: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 3))):
        runner = RUNNERS[way]()
        prefix_bytes = data.draw(st.sampled_from([0, runner.row_bytes(300), 1 << 30]))
        bench = bench_on(store, runner, prefix_bytes=prefix_bytes, chunk=64)
        texts = []
        for _ in range(data.draw(st.integers(1, 4))):
            beginning = chosen.choice(known)
            beginning = beginning[: chosen.randrange(len(beginning) + 1)]
            length = chosen.choice([1, 20, 130, 260])
            texts.append(beginning + [chosen.randrange(1, VOCABULARY) for _ in range(length)])
            known.append(texts[-1])
        assert generate(bench, texts, limit=3) == generate(
            Bench(max_rows=1, prefix_bytes=0), texts, limit=3
        )


class Board:
    """What another worker says that it computes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def others(self, tokens: Sequence[int]) -> int:
        return common_length(list(self.tokens), list(tokens))

    def announce(self, tokens: Sequence[int]) -> Board:
        self.announced = list(tokens)
        return self

    def done(self) -> None:
        self.announced = []


def test_a_prefix_that_another_worker_computes_is_waited_for() -> None:
    store, board, texts = new_store(), Board(), prompts(300, 20, 3)
    bench = bench_on(store)
    tier = bench.engine._prefixes.tier
    assert tier is not None
    tier.announcements = board  # type: ignore[assignment]
    board.tokens = texts[0][:300]
    bench.add(request("0", tokens=texts[2]))
    for _ in range(5):
        bench.step()
    assert not bench.tokens
    generate(bench_on(store), texts[:2])  # the other worker
    assert bench.run()["0"] == fresh(texts[2:])[0]
    assert bench.cached == {"0": 300}


def test_a_worker_that_computes_nothing_after_all_is_not_waited_for() -> None:
    board, texts = Board(), prompts(300, 20, 1)
    bench = bench_on(new_store())
    assert bench.engine._prefixes.tier is not None
    bench.engine._prefixes.tier.announcements = board  # type: ignore[assignment]
    board.tokens = texts[0][:300]
    bench.add(request("0", tokens=texts[0]))
    bench.step()
    board.tokens = []
    assert bench.run()["0"] == fresh(texts)[0]


def test_what_others_will_follow_is_announced_until_its_row_leaves() -> None:
    board, texts = Board(), prompts(300, 20, 2)
    bench = bench_on(new_store())
    assert bench.engine._prefixes.tier is not None
    bench.engine._prefixes.tier.announcements = board  # type: ignore[assignment]
    bench.add(*(request(str(i), tokens=tokens) for i, tokens in enumerate(texts)))
    assert board.announced == texts[0][:300]
    bench.run()
    assert board.announced == []


@pytest.mark.parametrize("is_right", [True, False])
def test_one_read_in_so_many_is_computed_again_and_compared(is_right: bool) -> None:
    store, texts = new_store(), prompts(300, 20, 3)
    generate(bench_on(store), texts)
    if not is_right:
        for segment in store._segments.values():
            for tensor in segment.layers[0].tensors:
                tensor.data.flags.writeable = True
                tensor.data[...] += 1
    bench = bench_on(store)
    assert bench.engine._prefixes.tier is not None
    bench.engine._prefixes.tier.verify_every = 1
    assert generate(bench, texts[:1]) == fresh(texts[:1])
    figures = bench.engine._prefixes.tier.figures
    assert (figures.verified, figures.mismatches) == (1, 0 if is_right else 1)
