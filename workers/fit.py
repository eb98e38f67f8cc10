"""What a model takes and this machine holds, told from files' headers: no weights are read."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map

from queue_service.errors import ModelUnavailable, QsvcError
from workers import gguf_header
from workers.gguf_header import read_header
from workers.kv_blocks import capacity_for
from workers.memory import MemoryPlan
from workers.models import (
    describe_dtype,
    device_kind,
    find_model,
    make_dense,
    stated_context,
    wanted_dtype,
)
from workers.padded import PaddedRunner

_CONFIG_DTYPES = ("float32", "float16", "bfloat16")
# As MLX keeps them: packed weights with a scale and a bias of 4 bytes for each 32.
_GGUF_BYTES = {gguf_header.Q4_0: 0.75, gguf_header.Q4_1: 0.75, gguf_header.Q8_0: 1.25}
_GGUF_PLAIN = {
    gguf_header.FLOAT32: mx.float32,
    gguf_header.FLOAT16: mx.float16,
    gguf_header.BFLOAT16: mx.bfloat16,
}

_TRIAL_SECONDS = 0.15
_TRIAL_SIDE = 1024
# Beyond the caches of processors, so that memory has to be read.
_TRIAL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model is and takes.

    Attributes:
        family: the architecture, as its configuration names it.
        weight_bytes: what the weights take here, as a worker would load them.
        file_bytes: what they take on disk, None where they are not there yet.
        dtype: of activations, with the bits of weights that stay quantised.
        context_length: tokens of prompt and answer together.
        kv_bytes_per_token: keys and values of one token, all layers together.
        fixed_bytes_per_row: what a row takes whatever its length: states of recurrent layers.
        is_mixture: of experts, of which each token reads some.
    """

    name: str
    family: str
    num_parameters: int
    weight_bytes: int
    file_bytes: int | None
    dtype: str
    device: str
    context_length: int
    kv_bytes_per_token: int
    fixed_bytes_per_row: int
    is_mixture: bool = False

    def row_bytes(self, num_tokens: int) -> int:
        """Return what a row of so many tokens takes: its slot has a size of a few."""
        return self.fixed_bytes_per_row + capacity_for(num_tokens) * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Fit:
    """How many rows of which length a machine holds.

    Attributes:
        memory: how a worker would divide it.
    """

    shape: ModelShape
    memory: MemoryPlan

    def num_rows(self, context: int) -> int:
        """Return how many rows of so many tokens fit; 0 when not even one does."""
        return self.memory.kv_bytes // max(1, self.shape.row_bytes(context))

    def context(self, num_rows: int) -> int:
        """Return the most tokens that each of so many rows may have; 0 when they do not fit."""
        fits, beyond = 0, self.shape.context_length + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            if num_rows * self.shape.row_bytes(middle) <= self.memory.kv_bytes:
                fits = middle
            else:
                beyond = middle
        return fits

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens of shared prefixes that are kept in memory for others, all together."""
        return self.memory.prefix_bytes // max(1, self.shape.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """How fast a device reads memory and multiplies."""

    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Tokens a second, roughly: what reading and multiplying alone allow."""

    alone: float
    batch: float
    prefill: float


def read_shape(name: str, *, dtype: str = "auto") -> ModelShape:
    """Return what a model takes here, from the headers of its files or its configuration alone.

    Args:
        name: as `workers.models.load_model` takes it; nothing is fetched.
        dtype: as there.

    Raises:
        ModelUnavailable: it is not on this machine, or of no kind that can be loaded.
        ConfigurationError: ``dtype`` is none that there is.
    """
    wanted = wanted_dtype(dtype)
    path = find_model(name, may_fetch=False)
    try:
        return (
            _folder_shape(name, path, wanted) if path.is_dir() else _gguf_shape(name, path, wanted)
        )
    except QsvcError:
        raise
    except Exception as exc:  # a library's, and a model's own code
        raise ModelUnavailable(
            f"cannot tell what {name} takes, from {path}: {str(exc) or type(exc).__name__}"
        ) from exc


def measure_device(dtype: mx.Dtype = mx.float32) -> DeviceSpeed:
    """Return how fast this device works, from half a second of trying.

    Decoding a row reads every weight once, as a vector times a matrix does; prefill multiplies
    matrices.
    """
    side = int((_TRIAL_BYTES / dtype.size) ** 0.5)
    large, vector = mx.zeros((side, side), dtype), mx.zeros((1, side), dtype)
    left = mx.zeros((_TRIAL_SIDE, _TRIAL_SIDE), dtype)
    mx.eval(large, vector, left)
    return DeviceSpeed(
        bytes_per_second=large.nbytes / _seconds_of(vector, large),
        operations_per_second=2 * _TRIAL_SIDE**3 / _seconds_of(left, left),
    )


def estimate_speed(
    shape: ModelShape, speed: DeviceSpeed, *, num_rows: int, context: int
) -> SpeedEstimate | None:
    """Return what a device's speed allows; None for a mixture of experts, which reads a part.

    Args:
        num_rows: of the batch.
        context: tokens that each row has.
    """
    if shape.is_mixture:
        return None
    operations = 2 * shape.num_parameters

    def step_seconds(rows: int) -> float:
        read = shape.weight_bytes + rows * shape.row_bytes(context)
        return max(read / speed.bytes_per_second, rows * operations / speed.operations_per_second)

    return SpeedEstimate(
        alone=1 / step_seconds(1),
        batch=num_rows / step_seconds(num_rows),
        prefill=speed.operations_per_second / operations,
    )


def _folder_shape(name: str, folder: Path, wanted: mx.Dtype | None) -> ModelShape:
    files = list(folder.glob("model*.safetensors"))
    model, config = _open_folder(folder, has_weights=bool(files))
    num_parameters: int = mlx_lm.utils.get_total_parameters(model)  # type: ignore[no-untyped-call]
    quantization = None if files else _quantization(config)
    if wanted is not None:
        make_dense(model, wanted)
    elif not files:
        model.set_dtype(getattr(mx, _config_dtype(config)))
    weight_bytes = _num_bytes(model)
    described = describe_dtype(model)
    if wanted is None and quantization is not None:
        bits, group_size = quantization
        # A scale and a bias of two bytes for each group.
        weight_bytes = int(num_parameters * (bits / 8 + 4 / group_size))
        described += f" {bits}-bit"
    fixed_bytes, bytes_per_token = _kv_bytes(model)
    return ModelShape(
        name=name,
        family=str(config["model_type"]),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        file_bytes=sum(file.stat().st_size for file in files) or None,
        dtype=described,
        device=device_kind(),
        context_length=stated_context(config, _tokenizer_limit(folder)),
        kv_bytes_per_token=bytes_per_token,
        fixed_bytes_per_row=fixed_bytes,
        is_mixture=any("experts" in key for key in {**config, **config.get("text_config", {})}),
    )


def _open_folder(folder: Path, *, has_weights: bool) -> tuple[Module, dict[str, Any]]:
    """Return a model none of whose weights is evaluated, from files or random, and its config."""
    try:
        loaded: Any = mlx_lm.utils.load_model(folder, lazy=True, strict=False)
    except Exception:
        if has_weights:
            raise
        # Some models change the names of weights in a way that needs them to be there.
        loaded = mlx_lm.utils.load_model(
            folder, lazy=True, strict=False, get_model_classes=_classes_without_names
        )
    model, config = loaded
    return model, config


def _classes_without_names(config: dict[str, Any]) -> tuple[type[Module], Any]:
    # mlx-lm exports no function for this.
    find: Any = mlx_lm.utils._get_classes
    model_class, args_class = find(config)
    return type("Model", (model_class,), {"sanitize": lambda _, weights: weights}), args_class


def _quantization(config: Mapping[str, Any]) -> tuple[int, int] | None:
    found = config.get("quantization")
    return None if not found else (int(found["bits"]), int(found["group_size"]))


def _config_dtype(config: Mapping[str, Any]) -> str:
    text = config.get("text_config", {})
    stated = [where.get(key) for where in (config, text) for key in ("torch_dtype", "dtype")]
    return next((dtype for dtype in stated if dtype in _CONFIG_DTYPES), "bfloat16")


def _tokenizer_limit(folder: Path) -> float | None:
    try:
        limit = json.loads((folder / "tokenizer_config.json").read_text()).get("model_max_length")
    except FileNotFoundError:
        return None
    return limit if isinstance(limit, int | float) else None


def _num_bytes(model: Module) -> int:
    flat: Any = tree_flatten(model.parameters())  # type: ignore[no-untyped-call]
    return sum(array.nbytes for _, array in flat)


def _kv_bytes(model: Module) -> tuple[int, int]:
    """Return the bytes that a row takes whatever its length, and those of each token.

    A forward pass says, which nobody evaluates but models that look at a number of it: those
    compute on a single zero in the place of each weight.
    """
    weights: Any = model.parameters()  # type: ignore[no-untyped-call]
    model.update(tree_map(lambda w: mx.broadcast_to(mx.zeros((), w.dtype), w.shape), weights))
    runner = PaddedRunner(model)
    short = capacity_for(1)
    long = capacity_for(short + 1)
    bytes_per_token = (runner.row_bytes(long) - runner.row_bytes(short)) // (long - short)
    return runner.row_bytes(short) - short * bytes_per_token, bytes_per_token


def _gguf_shape(name: str, path: Path, wanted: mx.Dtype | None) -> ModelShape:
    header = read_header(path)
    fields, tensors = header.fields, header.tensors.values()
    family = str(fields["general.architecture"])
    if family != "llama":
        raise ModelUnavailable(f"cannot use {path}: its architecture is {family!r}, not 'llama'")
    num_heads = fields["llama.attention.head_count"]
    head_dim = fields.get(
        "llama.attention.key_length", fields["llama.embedding_length"] // num_heads
    )
    num_kv_heads = fields.get("llama.attention.head_count_kv", num_heads)
    kind, _ = header.tensors["token_embd.weight"]
    is_packed = any(kind in _GGUF_BYTES for kind, _ in tensors)
    # What is packed stays so, with all else in float32 (see workers/gguf.py).
    dtype = wanted or (mx.float32 if is_packed else _GGUF_PLAIN.get(kind, mx.float16))
    width = {kind: float(dtype.size) for kind, _ in tensors}
    if wanted is None:
        width |= _GGUF_BYTES
    bits = {gguf_header.Q4_0: 4, gguf_header.Q4_1: 4, gguf_header.Q8_0: 8}
    packed = min((bits[kind] for kind, _ in tensors if kind in bits), default=None)
    described = str(dtype).removeprefix("mlx.core.")
    return ModelShape(
        name=name,
        family=family,
        num_parameters=sum(size for _, size in tensors),
        weight_bytes=int(sum(size * width[kind] for kind, size in tensors)),
        file_bytes=path.stat().st_size,
        dtype=described if wanted or packed is None else f"{described} {packed}-bit",
        device=device_kind(),
        context_length=fields["llama.context_length"],
        kv_bytes_per_token=fields["llama.block_count"] * 2 * num_kv_heads * head_dim * dtype.size,
        fixed_bytes_per_row=0,
    )


def _seconds_of(left: mx.array, right: mx.array) -> float:
    """Return how long one product takes, by the best of some tries."""
    mx.eval(left @ right.T)  # the first one sets up what others reuse
    best, until = float("inf"), time.perf_counter() + _TRIAL_SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        mx.eval(left @ right.T)
        best = min(best, time.perf_counter() - began)
    return best
