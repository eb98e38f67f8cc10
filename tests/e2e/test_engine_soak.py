"""The engine over long times: memory stays flat, the budget is kept, nobody starves."""

from __future__ import annotations

import gc
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from tests.engine_bench import GREEDY, NOISY, Bench, alone, budget_for, request

SOAK_SECONDS = 600


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_memory_is_flat_over_two_thousand_short_jobs() -> None:
    bench = Bench(max_rows=32, chunk=512)
    marks: list[tuple[int, int]] = []
    for start in range(0, 2000, 250):
        bench.add(*[request(str(i), length=5 + i % 40, limit=4) for i in range(start, start + 250)])
        bench.run()
        assert len(bench.tokens) == start + 250
        gc.collect()
        mx.clear_cache()
        marks.append((mx.get_active_memory(), resident_bytes()))
    (live_before, resident_before), (live_after, resident_after) = marks[1], marks[-1]
    assert live_after <= live_before + 64_000  # bytes; one leaked row would be as much
    assert resident_after <= resident_before + 24_000_000
    assert bench.runner.nbytes == 0


def test_no_row_starves_beside_a_prompt_of_six_thousand_tokens() -> None:
    """The short ones start while the long one is taken in, and it comes to its end beside them."""
    budget = budget_for(64, 128) + budget_for(1, 6144)
    bench = Bench(budget=budget, max_rows=64, chunk=256)
    bench.add(request("long", length=6000, limit=4))
    bench.add(*[request(str(i), length=20 + i % 40, limit=60) for i in range(63)])
    first_step: dict[str, int] = {}
    for step in range(10_000):
        if not bench.engine.has_work:
            break
        bench.step()
        for name in bench.tokens:
            first_step.setdefault(name, step)
    assert set(first_step) == {"long", *map(str, range(63))}
    last_short = max(step for name, step in first_step.items() if name != "long")
    # 8,500 tokens of prompts, 256 a step: at the latest all begin together when they are in.
    assert last_short <= 36
    assert first_step["long"] <= 60
    assert bench.engine.peak_kv_bytes <= budget
    assert all(len(tokens) in (4, 60) for tokens in bench.tokens.values())


def drawn_requests(seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, prompt length, token limit) for ever; few names, so that answers are known."""
    source = random.Random(seed)
    while True:
        length = source.choice([1, 3, 20, 60, 120, 130, 250, 500])
        yield f"kind-{source.randrange(4)}", length, source.choice([1, 5, 30, 140])


@pytest.mark.slow
@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_a_soak_keeps_the_budget_and_every_token() -> None:
    source = random.Random(7)
    requests = drawn_requests(11)
    bench = Bench(budget=budget_for(12, 128), max_rows=16, chunk=96)
    kinds: dict[str, tuple[str, int, int, bool]] = {}
    removed: set[str] = set()
    num_added = 0
    deadline = time.monotonic() + SOAK_SECONDS
    while time.monotonic() < deadline or bench.engine.has_work:
        is_over = time.monotonic() >= deadline
        if not is_over and source.random() < 0.3 and bench.engine.num_rows < 40:
            kind, length, limit = next(requests)
            is_noisy = source.random() < 0.3
            name = f"{num_added} {kind}"
            plan = NOISY if is_noisy else GREEDY
            num_added += 1
            kinds[name] = (kind, length, limit, is_noisy)
            bench.add(request(kind, row_id=name, length=length, limit=limit, plan=plan))
        if source.random() < 0.02 and bench.engine.num_rows:
            victim = source.choice(sorted(kinds))
            bench.engine.remove([victim])
            removed.add(victim)
        bench.step()
        assert bench.runner.nbytes <= bench.budget
        bench.engine.check_integrity()
    assert bench.failed == {}
    assert num_added > 500
    for name, (kind, length, limit, is_noisy) in kinds.items():
        expected = alone(kind, length, limit, NOISY if is_noisy else GREEDY)
        found = bench.tokens.get(name, [])
        assert found == expected[: len(found)]
        assert name in removed or found == expected
    assert bench.engine.peak_kv_bytes <= bench.budget
