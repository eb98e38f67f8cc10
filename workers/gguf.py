"""Read a GGUF file of the llama architecture as an mlx-lm model and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from queue_service.errors import ModelUnavailable

_SUPPORTED = "supported are GGUF files of the llama architecture with a gpt2-type tokenizer"

# Every quantised type that MLX keeps quantised (Q4_0, Q4_1, Q8_0) has groups of this many weights.
_GROUP_SIZE = 32

_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_PRE_TOKENIZERS: Mapping[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTE_LEVEL]),
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a GGUF file holds; the weights are not evaluated yet."""

    model: Model
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: frozenset[int]
    context_length: int


def read_gguf(path: Path, dtype: mx.Dtype | None) -> GgufModel:
    """Read ``path``.

    Args:
        path: a ``.gguf`` file.
        dtype: what the weights become, dequantised. None keeps quantised ones packed with all
            else in float32, and gives a file without any the dtype of its embedding.

    Raises:
        ModelUnavailable: the file is of a kind that is not supported.
        RuntimeError: the file cannot be read as GGUF.
        ValueError: its tensors do not fit its metadata.
    """
    tensors, metadata = _load(path)
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise metadata.refuse(f"its architecture is {architecture!r}")
    weights = {_weight_name(metadata, name): tensor for name, tensor in tensors.items()}
    return GgufModel(
        model=_build_model(_model_args(metadata, weights), weights, dtype),
        tokenizer=_build_tokenizer(metadata),
        eos_token_ids=frozenset(
            metadata.integer(key)
            for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if key in metadata
        ),
        context_length=metadata.integer("llama.context_length"),
    )


def _load(path: Path) -> tuple[dict[str, mx.array], _Metadata]:
    if path.exists() and not os.access(path, os.W_OK):
        # Else it would say only that gguf_init failed.
        raise ModelUnavailable(
            f"MLX opens GGUF files for writing, though it only reads them, and this user may not "
            f"write {path}: make it writable, or copy it"
        )
    # The stub of mx.load gives one type for every format.
    loaded: Any = mx.load(str(path), return_metadata=True)
    tensors, fields = loaded
    return tensors, _Metadata(path, fields)


class _Metadata:
    """The fields of one file, with errors that name the file."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def refuse(self, reason: str) -> ModelUnavailable:
        return ModelUnavailable(f"cannot use {self._path}: {reason}; {_SUPPORTED}")

    def value(self, key: str) -> Any:
        if key not in self._fields:
            raise self.refuse(f"it has no {key}")
        return self._fields[key]

    def text(self, key: str) -> str:
        return str(self.value(key))

    def integer(self, key: str) -> int:
        return int(self.value(key).item())

    def number(self, key: str) -> float:
        return float(self.value(key).item())


def _weight_name(metadata: _Metadata, tensor: str) -> str:
    part, _, kind = tensor.rpartition(".")
    if part in _TENSORS:
        return f"{_TENSORS[part]}.{kind}"
    match part.split("."):
        case ["blk", layer, name] if name in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[name]}.{kind}"
    raise metadata.refuse(f"its tensor {tensor} is no part of a plain llama model")


def _model_args(metadata: _Metadata, weights: Mapping[str, mx.array]) -> ModelArgs:
    hidden_size = metadata.integer("llama.embedding_length")
    num_heads = metadata.integer("llama.attention.head_count")
    key = "llama.attention.key_length"
    head_dim = metadata.integer(key) if key in metadata else hidden_size // num_heads
    key = "llama.rope.dimension_count"
    if key in metadata and metadata.integer(key) != head_dim:
        raise metadata.refuse("it rotates only a part of each head")
    key = "llama.rope.scaling.type"
    if key in metadata and metadata.text(key) != "none":
        raise metadata.refuse("it scales its rotary embedding")
    key = "llama.attention.head_count_kv"
    num_kv_heads = metadata.integer(key) if key in metadata else num_heads
    key = "llama.rope.freq_base"
    return ModelArgs(
        model_type="llama",
        hidden_size=hidden_size,
        num_hidden_layers=metadata.integer("llama.block_count"),
        intermediate_size=metadata.integer("llama.feed_forward_length"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=metadata.number("llama.attention.layer_norm_rms_epsilon"),
        vocab_size=len(metadata.value("tokenizer.ggml.tokens")),
        max_position_embeddings=metadata.integer("llama.context_length"),
        rope_theta=metadata.number(key) if key in metadata else 10000.0,
        # The file's query and key rows are ordered for interleaved pairs.
        rope_traditional=True,
        tie_word_embeddings="lm_head.weight" not in weights,
    )


def _build_model(args: ModelArgs, weights: Mapping[str, mx.array], dtype: mx.Dtype | None) -> Model:
    model = Model(args)
    bits = {
        name.removesuffix(".scales"): weights[name.replace(".scales", ".weight")].shape[-1]
        // scales.shape[-1]
        for name, scales in weights.items()
        if name.endswith(".scales")
    }
    if dtype is not None:
        weights = _dequantized(weights, bits)
    elif bits:
        quantize(model, class_predicate=_quantized_layers(bits))
        # MLX's loader makes the scales float16: too narrow for some models' activations, and
        # hopelessly slow on a CPU.
        dtype = mx.float32
    else:
        dtype = weights["model.embed_tokens.weight"].dtype
    model.load_weights(list(weights.items()))
    model.set_dtype(dtype)
    model.eval()
    return model


def _quantized_layers(
    bits: Mapping[str, int],
) -> Callable[[str, Module], bool | dict[str, int]]:
    def predicate(name: str, _: Module) -> bool | dict[str, int]:
        return {"group_size": _GROUP_SIZE, "bits": bits[name]} if name in bits else False

    return predicate


def _dequantized(
    weights: Mapping[str, mx.array], bits: Mapping[str, int]
) -> Mapping[str, mx.array]:
    """Return the weights as floating point; scales are widened first, which loses nothing."""
    dense = dict(weights)
    for name, width in bits.items():
        scales = dense.pop(f"{name}.scales").astype(mx.float32)
        biases = dense.pop(f"{name}.biases").astype(mx.float32)
        packed = dense[f"{name}.weight"]
        dense[f"{name}.weight"] = mx.dequantize(packed, scales, biases, _GROUP_SIZE, width)
    return dense


def _build_tokenizer(metadata: _Metadata) -> PreTrainedTokenizerFast:
    kind = metadata.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise metadata.refuse(f"its tokenizer is of type {kind!r}")
    split = metadata.text("tokenizer.ggml.pre")
    if split not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise metadata.refuse(f"its pre-tokenizer is {split!r}, known are {known}")
    tokens: list[str] = metadata.value("tokenizer.ggml.tokens")
    merges: list[str] = metadata.value("tokenizer.ggml.merges")
    fast = FastTokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
        )
    )
    fast.pre_tokenizer = _PRE_TOKENIZERS[split]
    fast.decoder = decoders.ByteLevel()
    types: list[int] = metadata.value("tokenizer.ggml.token_type").tolist()
    fast.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN)
        ]
    )
    named = {
        role: tokens[metadata.integer(f"tokenizer.ggml.{field}_token_id")]
        for role, field in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"))
        if f"tokenizer.ggml.{field}_token_id" in metadata
    }
    key = "tokenizer.ggml.add_bos_token"
    if key in metadata and metadata.integer(key) and "bos_token" in named:
        bos = named["bos_token"]
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, fast.token_to_id(bos))]
        )
    key = "tokenizer.chat_template"
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=fast,
        clean_up_tokenization_spaces=False,
        chat_template=metadata.text(key) if key in metadata else None,
        **named,
    )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
