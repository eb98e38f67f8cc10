"""A prompt that begins with a checkpoint gets the tokens that it gets without, in every family."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import pytest

from tests.e2e.test_families import FAST
from tests.engine_bench import Bench, WriteNow, request
from tests.families import FAMILIES, Family
from tests.family_check import fresh_runner
from workers.checkpoint_tier import CheckpointTier
from workers.checkpoints.directory import DirectoryStore
from workers.checkpoints.records import Identity
from workers.runner import Runner
from workers.self_test import choose_runner

# More than the windows of the families that have some, and than the shortest checkpoint.
SHARED = 150
LIMIT = 8


def tokens_of(name: str, length: int) -> list[int]:
    chosen = random.Random(name)
    return [chosen.randrange(3, 120) for _ in range(length)]


PREFIX = tokens_of("shared", SHARED)
COLD = [PREFIX + tokens_of("one", 20), PREFIX + tokens_of("two", 31)] * 2
WARM = [
    PREFIX + tokens_of("three", 25),
    PREFIX + tokens_of("one", 20),
    PREFIX + tokens_of("four", 1),
    PREFIX,
    PREFIX[:140] + tokens_of("five", 30),
]


def generate(runner: Runner, store: DirectoryStore | None, texts: Sequence[list[int]]) -> Bench:
    tier = None if store is None else CheckpointTier(store, WriteNow(store), runner)
    bench = Bench(
        runner=runner,
        tier=tier,
        max_rows=8 if tier else 1,
        prefix_bytes=1 << 30 if tier else 0,
        chunk=64,
    )
    for index, tokens in enumerate(texts):
        bench.add(request(str(index), tokens=tokens, limit=LIMIT))
    bench.run()
    assert not bench.failed
    runner.clear()
    return bench


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, id=f.name, marks=() if f.name in FAST else pytest.mark.slow)
        for f in FAMILIES
    ],
)
def test_hits_give_what_misses_give(family: Family, tmp_path: Path) -> None:
    model = family.build()
    batching, runner = choose_runner(model)
    expected = {tuple(text): generate(runner, None, [text]).tokens["0"] for text in [*COLD, *WARM]}
    facts = Identity({"layers": [asdict(layer) for layer in runner.describe_layers()]})
    for texts in (COLD, WARM, WARM):
        # A new process: another runner, and what the store finds on disk.
        store = DirectoryStore(tmp_path, facts, budget_bytes=1 << 30)
        bench = generate(fresh_runner(model, batching), store, texts)
        found = [bench.tokens[str(index)] for index in range(len(texts))]
        assert found == [expected[tuple(text)] for text in texts]
        if texts is WARM and family.extractable:
            # A state that cannot be cut is of use to prompts that begin with all of it.
            partial = [SHARED - 1, 140] if runner.is_sliceable else [0, 0]
            cached = [bench.cached[str(index)] for index in range(len(texts))]
            assert min(cached[:3]) >= SHARED
            assert [one >= least for one, least in zip(cached[3:], partial, strict=True)] == [1, 1]
        store.close()
    mx.clear_cache()
