"""The engine with the demo model: rows join and leave, and none depends on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from workers.batch_engine import BatchEngine
from workers.engine import Begun, RowRequest, Token
from workers.model_info import DEMO_MODEL
from workers.models import LoadedModel, load_model
from workers.pace import PrefillPace
from workers.packed import PackedRunner
from workers.sampling import SamplingPlan
from workers.scheduler import Policy

pytestmark = pytest.mark.model

GREEDY = SamplingPlan(temperature=0.0, top_p=1.0, seed=0)
SAMPLED = SamplingPlan(temperature=1.0, top_p=0.9, seed=1234)
# Of very different lengths, so that a batch of them is ragged.
PROMPTS = {
    "short": "Hi",
    "middle": "Name three colours of the rainbow and say what each of them reminds you of.",
    "long": "Go on: " + "the sea was calm and the wind was low, " * 6,
}
TOKEN_LIMIT = 10


class RecordingRunner(PackedRunner):
    """A runner that notes how many rows each decoding step had."""

    def __init__(self, model: Module) -> None:
        super().__init__(model)
        self.decoded_together: list[int] = []

    def decode(self, order: Sequence[str], tokens: mx.array) -> mx.array:
        self.decoded_together.append(len(order))
        return super().decode(order, tokens)


class Bench:
    """An engine on the demo model, driven by hand."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.runner = RecordingRunner(loaded.model)
        self.engine = BatchEngine(
            self.runner,
            vocab_size=loaded.info.vocab_size,
            eos_token_ids=loaded.info.eos_token_ids,
            policy=Policy(kv_budget_bytes=1 << 30, max_rows=8),
            pace=PrefillPace(most_tokens=64),
        )
        self.tokens: dict[str, list[int]] = {}
        self._loaded = loaded

    def add(self, *names: str, plan: SamplingPlan = GREEDY, limit: int = TOKEN_LIMIT) -> None:
        self.engine.add([self._request(name, plan, limit) for name in names])

    def step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, Begun):
                continue
            assert isinstance(event, Token)
            self.tokens.setdefault(event.row_id, []).append(event.token_id)

    def step_until_tokens(self, name: str, count: int) -> None:
        while len(self.tokens.get(name, [])) < count:
            self.step()

    def run(self) -> dict[str, list[int]]:
        while self.engine.has_work:
            self.step()
        return self.tokens

    def _request(self, name: str, plan: SamplingPlan, limit: int) -> RowRequest:
        tokenizer = self._loaded.tokenizer
        prompt = PROMPTS.get(name, name)
        rendered = tokenizer.render_chat([{"role": "user", "content": prompt}])
        return RowRequest(
            row_id=name,
            prompt_ids=tuple(tokenizer.encode_chat(rendered)),
            token_limit=limit,
            sampling=plan,
            stop_ids=self._loaded.info.eos_token_ids,
        )


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """The demo model, loaded once."""
    return load_model(DEMO_MODEL, dtype="float32")


@pytest.fixture
def bench(loaded: LoadedModel) -> Bench:
    return Bench(loaded)


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> dict[str, list[int]]:
    """What each prompt is answered with greedily in a batch of its own."""
    tokens: dict[str, list[int]] = {}
    for name in PROMPTS:
        bench = Bench(loaded)
        bench.add(name)
        tokens |= bench.run()
        assert set(bench.runner.decoded_together) == {1}
    return tokens


def test_greedy_rows_of_a_ragged_batch_are_as_they_are_alone(
    bench: Bench, alone: dict[str, list[int]]
) -> None:
    bench.add(*PROMPTS)
    assert bench.engine.num_rows == 3
    assert bench.run() == alone
    assert max(bench.runner.decoded_together) == 3
    assert not bench.engine.has_work


def test_a_row_joins_a_running_batch_and_leaves_it(
    bench: Bench, alone: dict[str, list[int]]
) -> None:
    bench.add("middle")
    bench.step_until_tokens("middle", 3)
    assert set(bench.runner.decoded_together) == {1}
    bench.add("short", limit=2)
    bench.step_until_tokens("short", 2)
    assert 3 < len(bench.tokens["middle"]) < TOKEN_LIMIT
    assert bench.engine.num_rows == 1
    bench.add("long")
    bench.run()
    assert bench.tokens == {**alone, "short": alone["short"][:2]}
    assert max(bench.runner.decoded_together) == 2
    assert bench.runner.decoded_together[-1] == 1


def test_a_row_that_is_removed_leaves_its_neighbours_as_they_are(
    bench: Bench, alone: dict[str, list[int]]
) -> None:
    bench.add(*PROMPTS)
    bench.step_until_tokens("middle", 3)
    bench.engine.remove(["long", "unknown"])
    num_tokens = len(bench.tokens["long"])
    bench.run()
    assert bench.tokens == {**alone, "long": alone["long"][:num_tokens]}
    assert {2, 3} <= set(bench.runner.decoded_together)


def test_a_row_that_is_removed_before_its_first_token_never_runs(
    bench: Bench, alone: dict[str, list[int]]
) -> None:
    bench.add("short", "long")
    bench.engine.remove(["long"])
    assert bench.run() == {"short": alone["short"]}


def test_a_seeded_sampled_row_is_the_same_alone_and_among_others(loaded: LoadedModel) -> None:
    single, crowd, reseeded = Bench(loaded), Bench(loaded), Bench(loaded)
    single.add("middle", plan=SAMPLED, limit=6)
    crowd.add("short", limit=6)
    crowd.add("middle", plan=SAMPLED, limit=6)
    crowd.add("long", plan=SamplingPlan(temperature=0.7, top_p=1.0, seed=99), limit=6)
    assert crowd.run()["middle"] == single.run()["middle"]
    assert max(crowd.runner.decoded_together) == 3
    reseeded.add("middle", plan=SamplingPlan(temperature=1.0, top_p=0.9, seed=1235), limit=6)
    assert reseeded.run()["middle"] != single.tokens["middle"]


def test_a_row_ends_with_the_end_of_sequence_token(loaded: LoadedModel, bench: Bench) -> None:
    question = "What is the capital of France?"
    bench.add(question, limit=32)
    [*answer, last] = bench.run()[question]
    assert last in loaded.info.eos_token_ids
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris."
