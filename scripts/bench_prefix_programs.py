"""The programs that `bench_prefix` measures, each in a process of its own after its BLAS is loaded.

Each prints one line of JSON: ``prompts FILE``, ``ours FILE ROWS FOLDER``, ``by-hand FILE ROWS``,
``codec FILE TOKENS REPEATS FILES FOLDER``, ``writing ROWS ROUNDS CYCLES FOLDER``,
``shape MODEL DTYPE JOBS SHARED OWN ROWS FOLDER``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from queue_service.settings import CheckpointSettings
from scripts.bench_peers import (
    EngineSteps,
    Job,
    NotedPace,
    answers,
    batch,
    generate,
    make_engine,
    measure_engine,
    read_jobs,
    warm_up,
)
from scripts.bench_prompts import common_tokens, distinct_tokens
from workers.batch_engine import BatchEngine
from workers.checkpoint_setup import Checkpoints, open_checkpoints
from workers.checkpoint_tier import CheckpointTier
from workers.checkpoints.cutting import segments_of
from workers.checkpoints.directory import DirectoryStore
from workers.checkpoints.planes import PLANE_BYTES, Frame, decode, encode
from workers.checkpoints.records import Identity, Layer, Segment, Tensor
from workers.checkpoints.write_behind import WriteBehind
from workers.kv_records import max_difference, to_array, to_tensor
from workers.model_info import DEMO_MODEL, ModelInfo
from workers.models import LoadedModel, demo_file, load_model
from workers.pace import PrefillPace
from workers.packed import PackedRunner
from workers.prefixes import PrefixStore
from workers.runner import PromptChunk, Runner

_PLENTY = 1 << 40
# The engine may hold so many more rows than run, as in the worker.
_ROWS_AHEAD = 16
# As mlx-lm takes a prompt in.
_PREFILL_STEP = 2048

# Rows of about 130 tokens have slots of 256: so many steps until they outgrow them.
_WRITING_LENGTH = 130
_STEPS_A_WINDOW = 6
_WRITING_SEGMENT_TOKENS = 256
# More than the writer takes in a window.
_SEGMENTS_AHEAD = 64
_WRITE_RATE = 100_000_000

# Keys and values of the demo model's shape.
_TINY = llama.ModelArgs(
    model_type="llama",
    hidden_size=32,
    num_hidden_layers=30,
    intermediate_size=32,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    vocab_size=8192,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
_NOISE_TOKENS = 2048
_NOISE_SEED = 7


# Whole files --------------------------------------------------------------------------------


def run_prompts(file: Path) -> dict[str, Any]:
    """Return what there is to compute of a file's prompts."""
    prompts = [job.prompt_ids for job in read_jobs(_demo(), file)]
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "distinct_tokens": distinct_tokens(prompts),
        "common_tokens": common_tokens(prompts),
    }


def run_ours(file: Path, max_rows: int, folder: Path) -> dict[str, Any]:
    """Run a file on the engine with its checkpoints in a folder, all of them written at the end."""
    loaded = _demo()
    jobs = read_jobs(loaded, file)
    pace = NotedPace()
    opened = open_engine(loaded, demo_file(), max_rows, pace, folder)
    made = measure_engine(loaded, opened.engine, pace, jobs)
    began = time.perf_counter()
    opened.close()
    figures = {"flush_seconds": time.perf_counter() - began, **opened.counts(), **on_disk(folder)}
    return {**made, "figures": {**made["figures"], **figures}}


def run_by_hand(file: Path, max_rows: int) -> dict[str, Any]:
    """Compute what all prompts begin with once and hand it to `mlx_lm.batch_generate`."""
    loaded = _demo()
    model: Any = loaded.model
    jobs = read_jobs(loaded, file)
    warm_up(loaded, max_rows)
    started = time.perf_counter()
    prefix = jobs[0].prompt_ids[: common_tokens([job.prompt_ids for job in jobs])]
    cache = make_prompt_cache(model)
    for start in range(0, len(prefix), _PREFILL_STEP):
        model(mx.array([prefix[start : start + _PREFILL_STEP]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    rest = [Job(job.prompt_ids[len(prefix) :], job.token_limit) for job in jobs]
    # Merged into the caches of its batches, not changed.
    tokens = batch(loaded, rest, max_rows, prompt_caches=[cache] * len(rest))
    made = answers(loaded, tokens, time.perf_counter() - started)
    computed = len(prefix) + sum(len(job.prompt_ids) for job in rest)
    figures = {"computed_tokens": computed, "cached_tokens": (len(jobs) - 1) * len(prefix)}
    return {**made, "figures": figures}


@dataclass(slots=True)
class OpenEngine:
    """An engine with checkpoints, as the worker wires it."""

    engine: BatchEngine
    checkpoints: Checkpoints

    def close(self) -> None:
        """Write what waits."""
        self.checkpoints.tier.close()

    def counts(self) -> dict[str, int]:
        return self.checkpoints.tier.counts()


def open_engine(
    loaded: LoadedModel,
    weights: Path,
    max_rows: int,
    pace: PrefillPace,
    folder: Path,
    runner: Runner | None = None,
) -> OpenEngine:
    """Return an engine whose checkpoints are in a folder; raises SystemExit without them."""
    engines: list[BatchEngine] = []
    opened: list[Checkpoints] = []

    def open_tier(runner: Runner) -> CheckpointTier:
        checkpoints = open_checkpoints(
            CheckpointSettings.load(enabled=True, folder=folder),
            path=weights,
            info=loaded.info,
            tokenizer=loaded.tokenizer,
            runner=runner,
            is_busy=lambda: any(engine.num_rows for engine in engines),
        )
        if checkpoints is None:
            raise SystemExit(f"no checkpoints can be kept in {folder}")
        opened.append(checkpoints)
        return checkpoints.tier

    engines.append(make_engine(loaded, max_rows, pace, open_tier, runner))
    return OpenEngine(engines[0], opened[0])


def on_disk(folder: Path) -> dict[str, int]:
    """Return how many segments a folder has, and their bytes."""
    sizes = [file.stat().st_size for file in folder.rglob("*.qkv")]
    return {"files": len(sizes), "disk_bytes": sum(sizes)}


# The codec ----------------------------------------------------------------------------------


def run_codec(
    file: Path, num_tokens: int, repeats: int, num_files: int, folder: Path
) -> dict[str, Any]:
    """Time what checkpoints of one prompt's beginning cost, in both types."""
    loaded = _demo()
    tokens = read_jobs(loaded, file)[0].prompt_ids[:num_tokens]
    runner = PackedRunner(loaded.model)
    prefill_seconds = min(_timed(lambda: prefill(runner, tokens)) for _ in range(min(2, repeats)))
    state = runner.extract("row", len(tokens))
    runner.clear()
    layers = runner.to_layers(state, 0, len(tokens))
    narrow = PackedRunner(load_model(DEMO_MODEL, dtype="bfloat16").model)
    kinds = {
        "float32": (runner, layers),
        "bfloat16": (narrow, tuple(cast(layer, mx.bfloat16) for layer in layers)),
    }
    rows = [
        {
            "dtype": dtype,
            "tokens": len(tokens),
            "prefill_float32_seconds": prefill_seconds,
            **measure_codec(runner, tokens, layers, repeats, folder / dtype),
        }
        for dtype, (runner, layers) in kinds.items()
    ]
    for row in rows:
        row["prefill_per_restore"] = 1e3 * prefill_seconds / row["restore_warm_ms"]
    return {"rows": rows, "opening": measure_opening(layers, num_files, folder / "many")}


def prefill(runner: PackedRunner, tokens: Sequence[int]) -> None:
    """Take a prompt in as the engine does while nobody decodes."""
    runner.clear()
    runner.add({"row": len(tokens)})
    step = PrefillPace().most_tokens
    for start in range(0, len(tokens), step):
        mx.eval(runner.prefill([PromptChunk("row", tokens[start : start + step])]))


def cast(layer: Layer, dtype: mx.Dtype) -> Layer:
    arrays = [to_array(tensor).astype(dtype) for tensor in layer.tensors]
    mx.eval(arrays)
    return replace(layer, tensors=tuple(map(to_tensor, arrays)))


def measure_codec(
    runner: PackedRunner,
    tokens: Sequence[int],
    layers: Sequence[Layer],
    repeats: int,
    folder: Path,
) -> dict[str, Any]:
    """Write and read a prompt's segments again and again; rates are of the arrays' bytes."""
    watch = Stopwatch()
    planes = _planes_of(layers)
    raw_mb = sum(t.data.nbytes for layer in layers for t in layer.tensors) / 1e6
    longer = [*tokens, tokens[0]]  # a match leaves a token to feed
    disk: dict[str, int] = {}
    exact = True
    for repeat in range(repeats):
        store = DirectoryStore(folder / str(repeat), Identity({"bench": "codec"}), _PLENTY)
        with watch.of("hand over"):
            segments = segments_of(store.namespace, tokens, 0, layers)
        with watch.of("write"):
            written = [store.put(segment) for segment in segments]
        if not all(written):
            raise SystemExit(f"not written: {store.counts()}")
        match = store.match(longer)
        with watch.of("read"):
            restored = store.read(match)
        if restored.length != len(tokens):
            raise SystemExit(f"not read: {store.counts()}")
        exact = exact and _is_same(restored.segments, segments)
        with watch.of("decode"):
            for frames, numbers in planes:
                decode(frames, numbers)
        tier = CheckpointTier(store, Discards(), runner)
        restore(tier, longer)  # its threads begin
        with watch.of("restore"):
            restore(tier, longer)
        if drop_from_page_cache(folder / str(repeat)):
            with watch.of("restore cold"):
                restore(tier, longer)
        tier.close()
        disk = on_disk(folder / str(repeat))
    has_cold = watch.has("restore cold")
    cold_ms = 1e3 * watch.seconds("restore cold") if has_cold else None
    return {
        "raw_mb": raw_mb,
        "files": disk["files"],
        "ratio": 1e6 * raw_mb / disk["disk_bytes"],
        "write_mb_per_cpu_second": raw_mb / watch.cpu_seconds("write"),
        "write_mb_per_second": raw_mb / watch.seconds("write"),
        "read_mb_per_cpu_second": raw_mb / watch.cpu_seconds("read"),
        "read_mb_per_second": raw_mb / watch.seconds("read"),
        "decode_mb_per_cpu_second": raw_mb / watch.cpu_seconds("decode"),
        "hand_over_ms": 1e3 * watch.seconds("hand over"),
        "restore_warm_ms": 1e3 * watch.seconds("restore"),
        "restore_cold_ms": cold_ms,
        "exact": exact,
    }


def _planes_of(layers: Sequence[Layer]) -> list[tuple[list[Frame], NDArray[Any]]]:
    """Return frames of all numbers, as files have them, and memory for what each decodes to."""
    planes = []
    for tensor in (tensor for layer in layers for tensor in layer.tensors):
        numbers = np.ascontiguousarray(tensor.data).reshape(-1)
        numbers = numbers.view(f"u{numbers.itemsize}")
        for start in range(0, len(numbers), PLANE_BYTES):
            piece = numbers[start : start + PLANE_BYTES]
            planes.append((encode([piece], piece.itemsize), np.zeros_like(piece)))
    return planes


class Stopwatch:
    """Notes the wall time of parts of a program, and this thread's processor time."""

    def __init__(self) -> None:
        self._noted: dict[str, list[tuple[float, float]]] = {}
        self._name = ""
        self._began = (0.0, 0.0)

    def of(self, name: str) -> Stopwatch:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._began = (time.perf_counter(), time.thread_time())

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._began
        noted = (time.perf_counter() - wall, time.thread_time() - cpu)
        self._noted.setdefault(self._name, []).append(noted)

    def has(self, name: str) -> bool:
        return name in self._noted

    def seconds(self, name: str) -> float:
        """Return the median wall time."""
        return median(wall for wall, _ in self._noted[name])

    def cpu_seconds(self, name: str) -> float:
        """Return the median processor time."""
        return median(cpu for _, cpu in self._noted[name])


class Discards:
    """A writer that takes nothing."""

    def put(self, segments: Sequence[Segment]) -> int:
        return 0

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def restore(tier: CheckpointTier, tokens: Sequence[int]) -> None:
    """Read a prompt's beginning into arrays with which a row could begin, as the engine does."""
    match = tier.match(tokens)
    if match is None:
        raise SystemExit("nothing is stored of the prompt")
    prefix = tier.restore(match, tokens).prefix(PrefixStore(0, is_sliceable=True))
    if prefix is None:
        raise SystemExit("what was read cannot be used")
    mx.eval(prefix.state.keys, prefix.state.values)


def drop_from_page_cache(folder: Path) -> bool:
    """Have files read from the device next time; tell whether the system can."""
    if sys.platform != "linux":
        return False
    for file in folder.rglob("*.qkv"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not written yet stays
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def measure_opening(layers: Sequence[Layer], num_files: int, folder: Path) -> dict[str, Any]:
    """Time how a store learns what a folder has: so many segments of a block each, all zeros."""
    identity = Identity({"bench": "opening"})
    store = DirectoryStore(folder, identity, _PLENTY)
    shapes = [[tensor.data for tensor in layer.tensors] for layer in layers]
    zeros = tuple(
        replace(layer, tensors=tuple(map(_no_numbers, arrays)))
        for layer, arrays in zip(layers, shapes, strict=True)
    )
    for number in range(num_files):
        tokens = [number, *range(1, _WRITING_SEGMENT_TOKENS)]
        for segment in segments_of(store.namespace, tokens, 0, zeros):
            store.put(segment)
    watch = Stopwatch()
    for _ in range(3):
        with watch.of("open"):
            DirectoryStore(folder, identity, _PLENTY)
    return {
        "files": on_disk(folder)["files"],
        "milliseconds": 1e3 * watch.seconds("open"),
        "microseconds_per_file": 1e6 * watch.seconds("open") / max(1, num_files),
        "cpu_microseconds_per_file": 1e6 * watch.cpu_seconds("open") / max(1, num_files),
    }


def _no_numbers(data: Any) -> Tensor:
    shape = (*data.shape[:-2], _WRITING_SEGMENT_TOKENS, data.shape[-1])
    return Tensor(str(data.dtype), np.zeros(shape, data.dtype))


def _is_same(some: Sequence[Segment], others: Sequence[Segment]) -> bool:
    return all(
        one.tokens == other.tokens and max_difference(one.layers, other.layers) == 0
        for one, other in zip(some, others, strict=True)
    )


# Writing while rows are decoded ---------------------------------------------------------------


def run_writing(num_rows: int, rounds: int, cycles: int, folder: Path) -> dict[str, Any]:
    """Time decode steps in turns without and with checkpoints being written beside them."""
    loaded = _demo()
    runner = PackedRunner(loaded.model)
    prompt = list(range(1000, 1000 + _WRITING_SEGMENT_TOKENS))
    prefill(runner, prompt)
    state = runner.extract("row", len(prompt))
    runner.clear()
    store = DirectoryStore(folder, Identity({"bench": "writing"}), _PLENTY)
    blocks = Blocks(store.namespace, runner.to_layers(state, 0, len(prompt)))
    without: list[float] = []
    beside: list[float] = []
    rates: list[float] = []
    differences: list[float] = []
    for _ in range(rounds):
        engine = make_engine(loaded, num_rows, PrefillPace(most_tokens=1 << 20))
        steps = EngineSteps(engine, _rows_of_one_slot(num_rows))
        quiet = []
        for _ in range(cycles):
            quiet.append(_window(steps))
            step_seconds, rate = _window_beside_writes(steps, store, blocks)
            beside.append(step_seconds)
            rates.append(rate)
        without += quiet
        differences += [abs(b / a - 1) for a, b in pairwise(quiet)]
    ratios = [b / a for a, b in zip(without, beside, strict=True)]
    return {
        "rows": num_rows,
        "windows": len(ratios),
        "step_ms": 1e3 * median(without),
        "step_while_writing_ms": 1e3 * median(beside),
        "slowdown": median(ratios),
        "quiet_windows_differ": median(differences) if differences else None,
        "written_mb_per_second": median(rates) / 1e6,
    }


class Blocks:
    """Makes segments that all hold the same and that no store has yet.

    Args:
        layers: of so many tokens as a segment has.
    """

    def __init__(self, namespace: str, layers: Sequence[Layer]) -> None:
        self._namespace = namespace
        self._layers = layers
        self._numbers = count()

    def make(self, number: int) -> list[Segment]:
        rest = range(1, _WRITING_SEGMENT_TOKENS)
        return [
            segment
            for first in islice(self._numbers, number)
            for segment in segments_of(self._namespace, [first, *rest], 0, self._layers)
        ]


def _window_beside_writes(
    steps: EngineSteps, store: DirectoryStore, blocks: Blocks
) -> tuple[float, float]:
    """Return the median seconds of some steps, and the bytes a second written beside them."""
    segments = blocks.make(_SEGMENTS_AHEAD)
    writer = WriteBehind(
        store, _PLENTY, is_busy=lambda: True, bytes_per_second=_WRITE_RATE, bytes_per_day=_PLENTY
    )
    writer.put(segments)
    began = time.perf_counter()
    step_seconds = _window(steps)
    seconds = time.perf_counter() - began
    written = sum(segment.nbytes for segment in segments if not writer.has(segment.digest))
    writer.close(0.0)  # the others are dropped
    return step_seconds, written / seconds


def _window(steps: EngineSteps) -> float:
    """Return the median seconds of some steps."""
    return median(seconds for _, seconds in steps.measure(_STEPS_A_WINDOW))


def _rows_of_one_slot(num_rows: int) -> list[Job]:
    return [
        Job([1000 + 7 * (row + column) for column in range(_WRITING_LENGTH)], _WRITING_LENGTH)
        for row in range(num_rows)
    ]


# What many jobs leave on disk -----------------------------------------------------------------


@dataclass(slots=True)
class FirstTokens:
    """Makes prompts that begin alike and then differ from their first own token on."""

    num_shared: int
    num_own: int
    vocab_size: int
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def prompts(self, num_jobs: int) -> list[list[int]]:
        shared = self._draw(self.num_shared)
        firsts = self._random.sample(range(1, self.vocab_size), num_jobs)
        return [[*shared, first, *self._draw(self.num_own - 1)] for first in firsts]

    def _draw(self, number: int) -> list[int]:
        return [self._random.randrange(1, self.vocab_size) for _ in range(number)]


class NoiseRunner(PackedRunner):
    """Keeps random numbers for keys and values, the same at each place, instead of computing."""

    def __init__(self, model: Module) -> None:
        super().__init__(model)
        mx.random.seed(_NOISE_SEED)
        self._keys = [self._noise(s.num_heads, s.key_width, s.dtype) for s in self.store.layers]
        self._values = [self._noise(s.num_heads, s.value_width, s.dtype) for s in self.store.layers]

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[mx.array]:
        written = []
        for chunk in chunks:
            block, slot = self.store.slots[chunk.row_id]
            own = block.lengths[slot]
            begin = block.base_tokens + own
            end = begin + len(chunk.tokens)
            for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
                block.write(layer, slot, own, keys[:, :, begin:end], values[:, :, begin:end])
            block.lengths[slot] = own + len(chunk.tokens)
            written += [*block.keys, *block.values]
        return written

    def decode(self, order: Sequence[str], tokens: mx.array) -> mx.array:
        for row_id in order:
            block, slot = self.store.slots[row_id]
            block.lengths[slot] += 1
        return mx.zeros((len(order), _TINY.vocab_size))

    def _noise(self, num_heads: int, width: int, dtype: mx.Dtype) -> mx.array:
        noise = mx.random.normal((1, num_heads, _NOISE_TOKENS, width)).astype(dtype)
        mx.eval(noise)
        return noise


def run_shape(
    model: str,
    dtype: str,
    num_jobs: int,
    num_shared: int,
    num_own: int,
    max_rows: int,
    folder: Path,
) -> dict[str, Any]:
    """Run jobs of one long beginning and return what is on disk afterwards."""
    loaded, weights, runner = _demo(), demo_file(), None
    if model == "none":
        loaded, weights = tiny_model(loaded, dtype, folder / "tiny.safetensors")
        runner = NoiseRunner(loaded.model)
    prompts = FirstTokens(num_shared, num_own, loaded.info.vocab_size).prompts(num_jobs)
    checkpoints = folder / "checkpoints"
    opened = open_engine(loaded, weights, max_rows, PrefillPace(), checkpoints, runner)
    started = time.perf_counter()
    made = generate(
        opened.engine,
        [Job(prompt, 1) for prompt in prompts],
        frozenset(),
        most_rows=max_rows + _ROWS_AHEAD,
    )
    seconds = time.perf_counter() - started
    opened.close()
    return {
        "model": model,
        "dtype": loaded.info.dtype,
        "jobs": num_jobs,
        "shared_tokens": num_shared,
        "own_tokens": num_own,
        "seconds": seconds,
        **on_disk(checkpoints),
        "prefix_prefills": sum(cached < num_shared for cached in made.cached_tokens),
        "computed_tokens": made.computed_tokens,
        "distinct_tokens": distinct_tokens(prompts),
        "counts": opened.counts(),
    }


def tiny_model(demo: LoadedModel, dtype: str, weights: Path) -> tuple[LoadedModel, Path]:
    """Return a model whose keys and values have the demo model's shape, and its weights' file.

    Args:
        demo: lends its tokenizer.
        weights: where to write the model's, for its identity.
    """
    model = llama.Model(_TINY)
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    weights.parent.mkdir(parents=True, exist_ok=True)
    parameters: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(weights), dict(parameters))
    info = ModelInfo(
        name="tiny",
        vocab_size=_TINY.vocab_size,
        context_length=_TINY.max_position_embeddings or 0,
        eos_token_ids=frozenset(),
        dtype=dtype,
        device=demo.info.device,
        digest="",
    )
    return replace(demo, model=model, info=info), weights


def _demo() -> LoadedModel:
    return load_model(DEMO_MODEL, dtype="float32")


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main(arguments: Sequence[str]) -> Any:
    match arguments:
        case ["prompts", file]:
            return run_prompts(Path(file))
        case ["ours", file, max_rows, folder]:
            return run_ours(Path(file), int(max_rows), Path(folder))
        case ["by-hand", file, max_rows]:
            return run_by_hand(Path(file), int(max_rows))
        case ["codec", file, num_tokens, repeats, num_files, folder]:
            return run_codec(
                Path(file), int(num_tokens), int(repeats), int(num_files), Path(folder)
            )
        case ["writing", num_rows, rounds, cycles, folder]:
            return run_writing(int(num_rows), int(rounds), int(cycles), Path(folder))
        case ["shape", model, dtype, num_jobs, num_shared, num_own, max_rows, folder]:
            jobs, shared, own, rows = map(int, (num_jobs, num_shared, num_own, max_rows))
            return run_shape(model, dtype, jobs, shared, own, rows, Path(folder))
    raise SystemExit(__doc__)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
