"""Requests of every kind, lost after any number of tokens, go on as if nothing had happened."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from queue_service import tasks
from queue_service.payload import encode_call
from queue_service.progress import TokenScores, encode_scores, encode_tokens, join_elements
from queue_service.responses import Choice
from tests.harness import make_claimed
from tests.kinds import KINDS, LOGPROB_TOLERANCE, jobs_of_every_kind, make_model
from workers.answer_forms import Piece
from workers.batch_engine import BatchEngine
from workers.engine import TokenLogprobs
from workers.generation import NO_TOKEN, EngineParts, GenerationThread
from workers.main import answer_forms
from workers.models import load_model
from workers.packed import PackedRunner
from workers.preparation import Limits, Preparer
from workers.requests import Generated, PreparedRequest
from workers.scheduler import Policy
from workers.structured import ConstraintCompiler

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

_PLENTY = 1 << 30
_TOKENS = 24
_SECONDS = 300.0


@dataclass
class Sink:
    """Keeps tokens, scores and texts by execution and choice."""

    ended: queue.SimpleQueue[Generated | Exception] = field(default_factory=queue.SimpleQueue)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    scores: dict[tuple[str, int], list[TokenScores]] = field(default_factory=dict)
    texts: dict[tuple[str, int], str] = field(default_factory=dict)

    def begin(self, request: PreparedRequest) -> None:
        for choice in range(len(request.samplings)):
            key = request.execution_id, choice
            self.tokens[key], self.scores[key], self.texts[key] = [], [], ""

    def resume(
        self, execution_id: str, choice: int, token_ids: Sequence[int], pieces: Sequence[Piece]
    ) -> None:
        self.texts[execution_id, choice] += "".join(piece.text for piece in pieces)

    def note_cached(self, execution_id: str, num_tokens: int) -> None: ...

    def advance(
        self,
        execution_id: str,
        choice: int,
        token_id: int,
        pieces: Sequence[Piece],
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        key = execution_id, choice
        self.texts[key] += "".join(piece.text for piece in pieces)
        if token_id != NO_TOKEN:
            self.tokens[key].append(token_id)
        if logprobs is not None:
            self.scores[key].append((logprobs.logprob, logprobs.top))

    def end(self, generated: Generated) -> None:
        self.ended.put(generated)

    def fail(self, execution_id: str, error: Exception) -> None:
        self.ended.put(error)

    def drop(self, execution_id: str) -> None: ...


@dataclass
class Bench:
    """An engine on the demo model, and the jobs that it runs."""

    preparer: Preparer
    thread: GenerationThread
    sink: Sink

    def run(
        self, name: str, progress: Mapping[str, Sequence[bytes]] | None = None
    ) -> dict[str, Generated]:
        """Run a job of every kind; each execution's id is its job's with a name in front."""
        requests = []
        for job in jobs_of_every_kind(len(KINDS), tokens=_TOKENS):
            claimed = make_claimed(
                job_id=job.job_id,
                execution_id=f"{name} {job.job_id}",
                data=encode_call(tasks.CHAT, dict(job.body)),
            )
            if progress is not None:
                joined = join_elements(progress[job.job_id])
                claimed = replace(claimed, fields={**claimed.fields, "qsvc_progress": joined})
            requests.append(self.preparer.prepare(claimed))
        if progress is not None:
            assert all(request.resumed is not None for request in requests)
        self.thread.submit(requests)
        ended = {}
        for _ in requests:
            generated = self.sink.ended.get(timeout=_SECONDS)
            assert isinstance(generated, Generated), generated
            ended[generated.claimed.job_id] = generated
        return ended

    def lost(
        self, whole: Mapping[str, Generated], cut: Callable[[int, int], int]
    ) -> dict[str, list[bytes]]:
        """Return the progress of executions that were lost after so many tokens of each choice."""
        progress = {}
        for job_id, generated in whole.items():
            execution_id = generated.claimed.execution_id
            elements = [generated.request.progress_header(cached_tokens=3).encode()]
            for choice in range(len(generated.choices)):
                tokens = self.sink.tokens[execution_id, choice]
                count = cut(choice, len(tokens))
                elements.append(encode_tokens(choice, tokens[:count]))
                if scores := self.sink.scores[execution_id, choice]:
                    elements.append(encode_scores(choice, scores[:count]))
            progress[job_id] = elements
        return progress


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = make_model(tmp_path_factory.mktemp("model") / "demo")
    loaded = load_model(str(folder), dtype="float32")
    info, sink = loaded.info, Sink()
    compiler = ConstraintCompiler(
        loaded.tokenizer, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
    )

    def make_parts() -> EngineParts:
        engine = BatchEngine(
            PackedRunner(loaded.model, budget_bytes=_PLENTY),
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            policy=Policy(kv_budget_bytes=_PLENTY, max_rows=16, expected_tokens=32),
        )
        return EngineParts(engine, loaded.tokenizer)

    preparer = Preparer(
        loaded.tokenizer,
        Limits(info.context_length, info.vocab_size, info.eos_token_ids),
        model="demo",
        forms=answer_forms(loaded.tokenizer, compiler),
        model_digest=info.digest,
    )
    thread = GenerationThread(make_parts, sink, on_failure=sink.ended.put, max_rows=16)  # type: ignore[arg-type]
    thread.start()
    yield Bench(preparer, thread, sink)
    thread.stop()


@pytest.fixture(scope="module")
def whole(bench: Bench) -> dict[str, Generated]:
    return bench.run("whole")


CUTS: Mapping[str, Callable[[int, int], int]] = {
    "one token": lambda choice, count: 1,
    "a third": lambda choice, count: count // 3,
    "half of the first choice, all of the others": lambda choice, count: (
        count if choice else count // 2
    ),
    "everything": lambda choice, count: count,
}


@pytest.mark.parametrize("name", CUTS)
def test_what_was_lost_goes_on(bench: Bench, whole: dict[str, Generated], name: str) -> None:
    again = bench.run(name, bench.lost(whole, CUTS[name]))
    for job_id, generated in whole.items():
        result = again[job_id]
        assert result.cached_tokens == 3
        for mine, yours in zip(result.choices, generated.choices, strict=True):
            _check_alike(mine, yours)
        for choice in range(len(generated.choices)):
            first, second = (one.claimed.execution_id for one in (generated, result))
            assert bench.sink.texts[first, choice] == bench.sink.texts[second, choice]


def _check_alike(mine: Choice, yours: Choice) -> None:
    assert replace(mine, logprobs=None) == replace(yours, logprobs=None)
    if mine.logprobs is None or yours.logprobs is None:
        assert mine.logprobs == yours.logprobs
        return
    for one, other in zip(mine.logprobs, yours.logprobs, strict=True):
        pairs = zip((one.token, *one.top), (other.token, *other.top), strict=True)
        for a, b in pairs:
            assert a.token == b.token
            assert a.logprob == pytest.approx(b.logprob, abs=LOGPROB_TOLERANCE)
