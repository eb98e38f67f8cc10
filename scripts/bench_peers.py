"""The programs that `bench_engine` measures, each in a process of its own after its BLAS is loaded.

Each prints one line of JSON: ``ours FILE ROWS``, ``reference FILE ROWS``, ``script FILE ROWS``,
``check FILE ROWS``, ``profile ROWS``, ``export FOLDER``, ``export-gguf FILE``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from queue_service.requests import ChatRequest, Endpoint, parse_request
from workers.batch_engine import BatchEngine
from workers.checkpoint_tier import CheckpointTier
from workers.engine import Begun, Failed, RowRequest, Token
from workers.gguf import read_gguf
from workers.memory import MemoryGuard, apply_limits, plan_memory
from workers.mlx_sampling import draw
from workers.model_info import DEMO_MODEL
from workers.models import LoadedModel, demo_file, load_model
from workers.pace import PrefillPace
from workers.packed import PackedRunner
from workers.runner import PromptChunk, Runner
from workers.sampling import SamplingPlan
from workers.scheduler import Policy
from workers.self_test import choose_runner
from workers.text import TextPipeline

# A script that means well keeps longer prompts out of its batches, where all would be padded.
_LONG_PROMPT_TOKENS = 256
# What a library does once, compiling kernels, is done on these.
_WARM_UP = [list(range(3, 8)), list(range(3, 15))]

GREEDY = SamplingPlan(temperature=0.0, top_p=1.0, seed=0)

# The profile's rows: prompts of these lengths, so that they hold about 100 tokens each while they
# are measured and none outgrows its slot of 128.
_PROFILE_LENGTHS = range(70, 102)
_PROFILE_REPEATS = 4
_PROFILE_STEPS = 4
_PROFILE_TOKEN_LIMIT = 64
_PROFILE_TEXT = "The boats came back at noon with nets that were empty, and nobody was surprised. "


@dataclass(frozen=True, slots=True)
class Job:
    """A line of a batch file: what the model is fed, and the most tokens it may answer."""

    prompt_ids: list[int]
    token_limit: int


@dataclass
class NotedPace(PrefillPace):
    """A pace that keeps the seconds of the steps that only decoded."""

    decode_seconds: list[float] = field(default_factory=list)

    def observe(self, seconds: float, *, prompt_tokens: int, num_decoded: int) -> None:
        if num_decoded and prompt_tokens == 0:
            self.decode_seconds.append(seconds)
        super().observe(seconds, prompt_tokens=prompt_tokens, num_decoded=num_decoded)


# What is measured ---------------------------------------------------------------------------


def run_ours(loaded: LoadedModel, jobs: Sequence[Job], max_rows: int) -> dict[str, Any]:
    pace = NotedPace()
    return measure_engine(loaded, make_engine(loaded, max_rows, pace), pace, jobs)


def measure_engine(
    loaded: LoadedModel, engine: BatchEngine, pace: NotedPace, jobs: Sequence[Job]
) -> dict[str, Any]:
    """Run jobs to their ends and return what a `Run` holds."""
    started = time.perf_counter()
    made = generate(engine, jobs, loaded.info.eos_token_ids)
    seconds = time.perf_counter() - started
    kept = [[t for t in row if t not in loaded.info.eos_token_ids] for row in made.tokens]
    return {
        "seconds": seconds,
        "tokens": sum(map(len, kept)),
        "texts": [loaded.tokenizer.decode(row) for row in kept],
        "figures": {
            "longest_pause_seconds": made.longest_pause_seconds,
            "computed_tokens": made.computed_tokens,
            "cached_tokens": sum(made.cached_tokens),
            "peak_kv_mb": engine.peak_kv_bytes / 1e6,
            "decode_step_ms": 1e3 * mean(pace.decode_seconds) if pace.decode_seconds else None,
            "decode_only_steps": len(pace.decode_seconds),
        },
    }


def run_reference(loaded: LoadedModel, jobs: Sequence[Job], max_rows: int) -> dict[str, Any]:
    warm_up(loaded, max_rows)
    started = time.perf_counter()
    tokens = batch(loaded, jobs, max_rows)
    return answers(loaded, tokens, time.perf_counter() - started)


def run_script(loaded: LoadedModel, jobs: Sequence[Job], max_rows: int) -> dict[str, Any]:
    """Run the long prompts one by one and the others in a batch; nothing when none is long."""
    short = [i for i, job in enumerate(jobs) if len(job.prompt_ids) <= _LONG_PROMPT_TOKENS]
    long = [i for i, job in enumerate(jobs) if len(job.prompt_ids) > _LONG_PROMPT_TOKENS]
    figures = {"long_prompts": len(long)}
    if not long:
        return {**answers(loaded, [], 0.0), "figures": figures}
    warm_up(loaded, max_rows)
    tokens: dict[int, list[int]] = {}
    started = time.perf_counter()
    for index in long:
        row = [token for token, _ in _alone(loaded, jobs[index])]
        tokens[index] = [t for t in row if t not in loaded.info.eos_token_ids]
    if short:
        tokens |= zip(short, batch(loaded, [jobs[i] for i in short], max_rows), strict=True)
    seconds = time.perf_counter() - started
    made = answers(loaded, [tokens[i] for i in range(len(jobs))], seconds)
    return {**made, "figures": figures}


def run_check(loaded: LoadedModel, jobs: Sequence[Job], max_rows: int) -> dict[str, Any]:
    """Compare the greedy tokens of every row with those of the row alone and of another order."""
    # First, while mlx-lm's attention is its own.
    alone = [
        [(token, _margin(logprobs)) for token, logprobs in _alone(loaded, job)] for job in jobs
    ]
    ours, turned = (
        generate(
            make_engine(loaded, max_rows, PrefillPace()), order, loaded.info.eos_token_ids
        ).tokens
        for order in (jobs, jobs[::-1])
    )
    expected = [[token for token, _ in row] for row in alone]
    differences = []
    for index, (row, own) in enumerate(zip(expected, ours, strict=True)):
        if row != own:
            pairs = enumerate(zip(row, own, strict=False))
            position = next((i for i, (a, b) in pairs if a != b), min(len(row), len(own)))
            margin = alone[index][position][1] if position < len(row) else None
            differences.append({"job": index, "token": position, "margin": margin})
    return {
        "rows": len(jobs),
        "equal_alone": sum(a == b for a, b in zip(expected, ours, strict=True)),
        "equal_reversed": sum(a == b for a, b in zip(turned[::-1], ours, strict=True)),
        "differences_from_alone": differences,
    }


# Engines ------------------------------------------------------------------------------------


def make_engine(
    loaded: LoadedModel,
    max_rows: int,
    pace: PrefillPace,
    open_tier: Callable[[Runner], CheckpointTier | None] = lambda _: None,
    runner: Runner | None = None,
) -> BatchEngine:
    """Return an engine as the worker makes it.

    Args:
        open_tier: gives the checkpoints for the runner that was chosen.
        runner: instead of the one that the self-test chooses.
    """
    memory = plan_memory(model_bytes=loaded.num_bytes, kv_bytes=None)
    apply_limits(memory)
    if runner is None:
        _, runner = choose_runner(loaded.model, kv_bytes=memory.kv_bytes)
    if not isinstance(runner, PackedRunner):
        raise SystemExit("the self-test chose another runner than the packed one")
    return BatchEngine(
        runner,
        vocab_size=loaded.info.vocab_size,
        eos_token_ids=loaded.info.eos_token_ids,
        policy=Policy(kv_budget_bytes=memory.kv_bytes, max_rows=max_rows),
        pace=pace,
        memory=MemoryGuard(memory.limit_bytes),
        prefix_bytes=memory.prefix_bytes,
        tier=open_tier(runner),
    )


def add_jobs(
    engine: BatchEngine, jobs: Sequence[Job], stop_ids: frozenset[int], *, first: int = 0
) -> None:
    """Hand jobs over as greedy rows; a job's place is its id, counted from ``first``."""
    engine.add(
        RowRequest(
            row_id=str(index),
            prompt_ids=tuple(job.prompt_ids),
            token_limit=job.token_limit,
            sampling=GREEDY,
            stop_ids=stop_ids,
        )
        for index, job in enumerate(jobs, first)
    )


@dataclass(slots=True)
class Generated:
    """What an engine made of some jobs.

    Attributes:
        tokens: of each job, the end token too.
        cached_tokens: of each job's prompt, what others had computed when its row began.
        computed_tokens: of all prompts, the others; those of a row that began twice count twice.
        longest_pause_seconds: the longest time between two tokens of one row.
    """

    tokens: list[list[int]]
    cached_tokens: list[int]
    computed_tokens: int = 0
    longest_pause_seconds: float = 0.0


def generate(
    engine: BatchEngine,
    jobs: Sequence[Job],
    stop_ids: frozenset[int],
    *,
    most_rows: int | None = None,
) -> Generated:
    """Run jobs to their ends.

    Args:
        most_rows: the most that the engine is given at a time; None gives it all at once.
    """
    made = Generated([[] for _ in jobs], [0] * len(jobs))
    last_seen: dict[int, float] = {}
    num_added = 0
    while engine.has_work or num_added < len(jobs):
        room = len(jobs) if most_rows is None else most_rows - engine.num_rows
        coming = jobs[num_added : num_added + room]
        add_jobs(engine, coming, stop_ids, first=num_added)
        num_added += len(coming)
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            index = int(event.row_id)
            if isinstance(event, Begun):
                made.cached_tokens[index] = event.cached_tokens
                made.computed_tokens += len(jobs[index].prompt_ids) - event.cached_tokens
            if not isinstance(event, Token):
                continue
            made.tokens[index].append(event.token_id)
            pause = now - last_seen.get(index, now)
            made.longest_pause_seconds = max(made.longest_pause_seconds, pause)
            last_seen[index] = now
    return made


def warm_up(loaded: LoadedModel, max_rows: int) -> None:
    """Have mlx-lm do what it does once."""
    batch(loaded, [Job(prompt, 2) for prompt in _WARM_UP], max_rows)


def batch(
    loaded: LoadedModel, jobs: Sequence[Job], max_rows: int, **options: Any
) -> list[list[int]]:
    """Return the tokens of jobs that `mlx_lm.batch_generate` runs, end tokens left out."""
    response = batch_generate(
        loaded.model,
        loaded.tokenizer,
        [job.prompt_ids for job in jobs],
        max_tokens=[job.token_limit for job in jobs],
        completion_batch_size=max_rows,
        return_token_ids=True,
        **options,
    )
    return response.token_ids or []


def _alone(loaded: LoadedModel, job: Job) -> Iterator[tuple[int, mx.array]]:
    """Generate with mlx-lm for one prompt: tokens, the end token too, with log-probabilities."""
    steps = generate_step(mx.array(job.prompt_ids), loaded.model, max_tokens=job.token_limit)
    for token, logprobs in steps:
        yield int(token), logprobs
        if token in loaded.info.eos_token_ids:
            return


def answers(loaded: LoadedModel, tokens: Sequence[Sequence[int]], seconds: float) -> dict[str, Any]:
    """Return what a `Run` holds, of answers without their end tokens."""
    return {
        "seconds": seconds,
        "tokens": sum(map(len, tokens)),
        "texts": [loaded.tokenizer.decode(row) for row in tokens],
        "figures": {},
    }


def _margin(logprobs: mx.array) -> float:
    """Return by how much the likeliest token leads the second."""
    second, first = np.sort(np.array(mx.topk(logprobs, 2)))
    return float(first - second)


# The profile of a step ----------------------------------------------------------------------


class IdleRunner(Runner):
    """A runner that computes nothing, so that what a step takes is Python alone."""

    def __init__(self, num_rows: int) -> None:
        self._logits = mx.zeros((num_rows, 8))
        mx.eval(self._logits)

    def row_bytes(self, num_tokens: int) -> int:
        return num_tokens

    def add(self, rows: Mapping[str, int]) -> None: ...

    is_sliceable = False

    def is_finite(self, state: Any) -> bool:
        return True

    def load(self, row_id: str, state: Any, length: int) -> None: ...

    def extract(self, row_id: str, length: int | None = None) -> Any: ...

    def drop(self, row_id: str) -> None: ...

    def shrink(self) -> None: ...

    def clear(self) -> None: ...

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[mx.array]:
        return []

    def arrange(self, row_ids: Sequence[str]) -> list[str]:
        return list(row_ids)

    def decode(self, order: Sequence[str], tokens: mx.array) -> mx.array:
        return self._logits[: len(order)]

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def peak_bytes(self) -> int:
        return 0


class EngineSteps:
    """Times the steps of an engine whose rows all decode."""

    def __init__(self, engine: BatchEngine, jobs: Sequence[Job]) -> None:
        self._engine = engine
        add_jobs(engine, jobs, frozenset())
        while len(engine.step()) < len(jobs):
            pass
        mx.synchronize()

    def measure(self, num_steps: int = _PROFILE_STEPS) -> Iterator[tuple[str, float]]:
        self._engine.step()  # reads what is ready already, since the device was waited for
        for _ in range(num_steps):
            yield "step", _timed(self._engine.step)
        mx.synchronize()


class RunnerSteps:
    """Times the parts of a step on a runner that is driven by hand."""

    def __init__(self, runner: Runner, jobs: Sequence[Job]) -> None:
        self._runner = runner
        self._ids = [str(index) for index in range(len(jobs))]
        self._feed = mx.array([job.prompt_ids[-1] for job in jobs], dtype=mx.int32)
        chunks = []
        for row_id, job in zip(self._ids, jobs, strict=True):
            runner.add({row_id: len(job.prompt_ids)})
            chunks.append(PromptChunk(row_id, job.prompt_ids[:-1]))
        mx.eval(runner.prefill(chunks))
        self._plans = [GREEDY] * len(jobs)
        mx.eval(self._decode())

    def measure(self) -> Iterator[tuple[str, float]]:
        for step in range(_PROFILE_STEPS):
            started = time.perf_counter()
            logits = self._decode()
            yield "graph", time.perf_counter() - started
            yield "forward", _timed(lambda made=logits: mx.eval(made))
            positions = [step] * len(self._ids)
            yield "sampling", _timed(lambda made=logits, at=positions: self._draw(made, at))

    def _decode(self) -> mx.array:
        return self._runner.decode(self._runner.arrange(self._ids), self._feed)

    def _draw(self, logits: mx.array, positions: Sequence[int]) -> None:
        mx.eval(draw(logits, self._plans, positions))


class BareSteps:
    """Times mlx-lm's model on its own batch cache, left-padded, nothing around it."""

    def __init__(self, model: Any, jobs: Sequence[Job]) -> None:
        self._model = model
        longest = max(len(job.prompt_ids) for job in jobs) - 1
        padding = [longest - len(job.prompt_ids) + 1 for job in jobs]
        self._caches = [BatchKVCache(padding) for _ in make_prompt_cache(model)]
        rows = [[0] * pad + job.prompt_ids[:-1] for pad, job in zip(padding, jobs, strict=True)]
        model(mx.array(rows), cache=self._caches)
        mx.eval([cache.state for cache in self._caches])
        self._feed = mx.array([[job.prompt_ids[-1]] for job in jobs])
        self._forward()

    def measure(self) -> Iterator[tuple[str, float]]:
        for _ in range(_PROFILE_STEPS):
            yield "bare", _timed(self._forward)

    def _forward(self) -> None:
        mx.eval(self._model(self._feed, cache=self._caches))


class TextSteps:
    """Times the text of one token a row, as the worker makes it of a step's events."""

    def __init__(self, loaded: LoadedModel, num_rows: int) -> None:
        self._tokens = iter(loaded.tokenizer.encode(_PROFILE_TEXT * 8, add_special_tokens=False))
        self._rows = [
            TextPipeline(
                loaded.tokenizer,
                eos_token_ids=loaded.info.eos_token_ids,
                stop_strings=(),
                token_limit=_PROFILE_TOKEN_LIMIT,
            )
            for _ in range(num_rows)
        ]

    def measure(self) -> Iterator[tuple[str, float]]:
        for _ in range(_PROFILE_STEPS):
            yield "text", _timed(self._push)

    def _push(self) -> None:
        token = next(self._tokens)
        for row in self._rows:
            row.push(token)


def run_profile(loaded: LoadedModel, num_rows: int) -> dict[str, Any]:
    """Return the median milliseconds of a decode step and its parts, measured in turns."""
    lengths = [_PROFILE_LENGTHS[i % len(_PROFILE_LENGTHS)] for i in range(num_rows)]
    jobs = [
        Job([1000 + 7 * (row + column) for column in range(length)], _PROFILE_TOKEN_LIMIT)
        for row, length in enumerate(lengths)
    ]
    # Bare first, while mlx-lm's attention is its own. All prompts go in in one step, so that all
    # rows begin to decode together.
    everything = PrefillPace(most_tokens=1 << 20)
    bare = BareSteps(loaded.model, jobs)
    engine = make_engine(loaded, num_rows, everything)
    idle = BatchEngine(
        IdleRunner(num_rows),
        vocab_size=loaded.info.vocab_size,
        eos_token_ids=frozenset(),
        policy=Policy(kv_budget_bytes=1 << 40, max_rows=num_rows),
        pace=PrefillPace(most_tokens=1 << 20),
    )
    measured = (
        EngineSteps(engine, jobs),
        RunnerSteps(PackedRunner(loaded.model), jobs),
        bare,
        TextSteps(loaded, num_rows),
    )
    python = EngineSteps(idle, jobs)
    samples: list[tuple[str, float]] = []
    for _ in range(_PROFILE_REPEATS):
        for one in measured:
            samples.extend(one.measure())
        samples.extend(("python", seconds) for _, seconds in python.measure())
    by_part = groupby(sorted(samples), key=itemgetter(0))
    milliseconds = {part: 1e3 * median(s for _, s in group) for part, group in by_part}
    return {
        "rows": num_rows,
        "milliseconds": milliseconds,
        "step_per_bare_forward": milliseconds["step"] / milliseconds["bare"],
    }


def _timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# Files --------------------------------------------------------------------------------------


def read_jobs(loaded: LoadedModel, file: Path) -> list[Job]:
    """Return the jobs of a batch file, rendered and tokenised as the worker does it."""
    jobs = []
    for line in file.read_text().splitlines():
        request = parse_request(Endpoint.CHAT, json.loads(line)["body"])
        assert isinstance(request, ChatRequest)
        rendered = loaded.tokenizer.render_chat(request.template_messages())
        ids = loaded.tokenizer.encode_chat(rendered)
        room = loaded.info.context_length - len(ids)
        jobs.append(Job(ids, request.token_limit or room))
    return jobs


def export_folder(folder: Path) -> None:
    """Write the demo model as a folder for mlx-lm, in float32."""
    gguf = read_gguf(demo_file(), mx.float32)
    folder.mkdir(parents=True)
    gguf.tokenizer.save_pretrained(folder)
    parameters: Any = tree_flatten(gguf.model.parameters())
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(parameters), metadata={"format": "mlx"}
    )
    config = {**asdict(gguf.model.args), "eos_token_id": sorted(gguf.eos_token_ids)}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def export_gguf(file: Path) -> None:
    """Write the demo model's file again with all its weights in float32."""
    loaded: Any = mx.load(str(demo_file()), return_metadata=True)
    tensors, metadata = loaded
    weights = {name: a for name, a in tensors.items() if name.endswith(".weight")}
    for name, packed in weights.items():
        part = name.removesuffix(".weight")
        if f"{part}.scales" not in tensors:
            weights[name] = packed.astype(mx.float32)
            continue
        scales, biases = (tensors[f"{part}.{kind}"] for kind in ("scales", "biases"))
        weights[name] = mx.dequantize(
            packed,
            scales.astype(mx.float32),
            biases.astype(mx.float32),
            group_size=32,
            bits=packed.shape[-1] // scales.shape[-1],
        )
    metadata.pop("general.quantization_version", None)
    metadata["general.file_type"] = mx.array(0, dtype=mx.uint32)
    mx.save_gguf(str(file), weights, metadata)


_ON_A_FILE = {
    "ours": run_ours,
    "reference": run_reference,
    "script": run_script,
    "check": run_check,
}


def main(arguments: Sequence[str]) -> Any:
    match arguments:
        case [name, file, num_rows] if name in _ON_A_FILE:
            loaded = load_model(DEMO_MODEL, dtype="float32")
            return _ON_A_FILE[name](loaded, read_jobs(loaded, Path(file)), int(num_rows))
        case ["profile", num_rows]:
            return run_profile(load_model(DEMO_MODEL, dtype="float32"), int(num_rows))
        case ["export", folder]:
            return export_folder(Path(folder))
        case ["export-gguf", file]:
            return export_gguf(Path(file))
    raise SystemExit(__doc__)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
