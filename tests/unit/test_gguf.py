"""Reading GGUF files: tiny ones written here, good and of kinds that are not supported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from transformers import PreTrainedTokenizerFast

from queue_service.errors import ModelUnavailable
from workers.gguf import read_gguf

TOKENS = ["<|end|>", "<|call|>", "a", "b", "Ġ", "1", "2", "ab", "12", "Ġa"]
CONTROL, CALL, A, B, SPACE, ONE, TWO, AB, ONE_TWO, SPACE_A = range(10)
NORMAL_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN = 1, 3, 4
HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2


def fields() -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.block_count": mx.array(LAYERS, mx.uint32),
        "llama.context_length": mx.array(128, mx.uint32),
        "llama.embedding_length": mx.array(HIDDEN, mx.uint32),
        "llama.feed_forward_length": mx.array(FEED_FORWARD, mx.uint32),
        "llama.attention.head_count": mx.array(HEADS, mx.uint32),
        "llama.attention.head_count_kv": mx.array(KV_HEADS, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": ["a b", "1 2", "Ġ a"],
        "tokenizer.ggml.token_type": mx.array(
            [CONTROL_TOKEN, USER_DEFINED_TOKEN, *[NORMAL_TOKEN] * 8], mx.int32
        ),
        "tokenizer.ggml.bos_token_id": mx.array(CONTROL, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(CONTROL, mx.uint32),
    }


def tensors() -> dict[str, mx.array]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    kv_width = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (kv_width, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv_width, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    mx.random.seed(0)
    return {name: mx.random.normal(shape) for name, shape in shapes.items()}


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(
        *,
        without: str = "",
        extra_tensors: dict[str, mx.array] | None = None,
        **changed: Any,
    ) -> Path:
        metadata = {**fields(), **{key.replace("__", "."): v for key, v in changed.items()}}
        metadata.pop(without, None)
        path = tmp_path / "tiny.gguf"
        mx.save_gguf(str(path), {**tensors(), **(extra_tensors or {})}, metadata)
        return path

    return write


def encode(tokenizer: PreTrainedTokenizerFast, text: str, *, special: bool = False) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return ids


def test_a_file_gives_a_model_that_runs(write: Write) -> None:
    read = read_gguf(write(), mx.float32)
    assert read.model(mx.array([[A, B, AB]])).shape == (1, 3, len(TOKENS))
    assert read.context_length == 128
    assert read.eos_token_ids == {CONTROL}


def test_an_end_of_turn_token_ends_an_answer_too(write: Write) -> None:
    read = read_gguf(write(tokenizer__ggml__eot_token_id=mx.array(CALL, mx.uint32)), mx.float32)
    assert read.eos_token_ids == {CONTROL, CALL}


def test_the_embedding_is_the_output_projection_unless_the_file_has_one(write: Write) -> None:
    output = mx.random.normal((len(TOKENS), HIDDEN))
    untied = read_gguf(write(extra_tensors={"output.weight": output}), mx.float32).model
    assert mx.array_equal(untied.lm_head.weight, output)
    assert "lm_head" not in read_gguf(write(), mx.float32).model


def test_weights_get_the_dtype_asked_for(write: Write) -> None:
    model = read_gguf(write(), mx.bfloat16).model
    assert model.model.embed_tokens.weight.dtype == mx.bfloat16
    assert model.model.norm.weight.dtype == mx.bfloat16


def test_the_file_decides_the_rotary_base(write: Write) -> None:
    prompt = mx.array([[A, B, AB, ONE]])
    default = read_gguf(write(), mx.float32).model(prompt)
    same = read_gguf(write(llama__rope__freq_base=mx.array(10000.0)), mx.float32).model(prompt)
    other = read_gguf(write(llama__rope__freq_base=mx.array(50.0)), mx.float32).model(prompt)
    assert mx.array_equal(same, default)
    assert not mx.allclose(other, default)


def test_text_is_split_and_merged_as_the_file_says(write: Write) -> None:
    tokenizer = read_gguf(write(), mx.float32).tokenizer
    assert encode(tokenizer, "ab a") == [AB, SPACE_A]
    assert encode(tokenizer, "12") == [ONE, TWO]


def test_the_gpt_2_split_keeps_digits_together(write: Write) -> None:
    path = write(tokenizer__ggml__pre="gpt-2")
    assert encode(read_gguf(path, mx.float32).tokenizer, "12") == [ONE_TWO]


def test_control_tokens_are_special_and_user_defined_ones_are_text(write: Write) -> None:
    tokenizer = read_gguf(write(), mx.float32).tokenizer
    ids = encode(tokenizer, "a<|call|>b<|end|>")
    assert ids == [A, CALL, B, CONTROL]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|call|>b"


def test_bos_is_added_where_the_file_says_so(write: Write) -> None:
    plain = read_gguf(write(), mx.float32).tokenizer
    with_bos = read_gguf(write(tokenizer__ggml__add_bos_token=mx.array(True)), mx.float32).tokenizer
    assert encode(plain, "a", special=True) == [A]
    assert encode(with_bos, "a", special=True) == [CONTROL, A]
    assert encode(with_bos, "a") == [A]


def test_a_file_may_have_no_chat_template(write: Write) -> None:
    assert read_gguf(write(), mx.float32).tokenizer.chat_template is None
    path = write(tokenizer__chat_template="{{ messages }}")
    assert read_gguf(path, mx.float32).tokenizer.chat_template == "{{ messages }}"


def test_a_file_that_mlx_cannot_open_is_named_with_what_to_do(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    # Root may write whatever its mode is, so the mode alone would not do here.
    monkeypatch.setattr(os, "access", lambda asked, mode: (asked, mode) != (path, os.W_OK))
    with pytest.raises(ModelUnavailable, match="make it writable"):
        read_gguf(path, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general__architecture": "mamba"}, "architecture is 'mamba'"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer is of type 'llama'"),
        ({"tokenizer__ggml__pre": "tekken"}, "pre-tokenizer is 'tekken'"),
        ({"llama__rope__scaling__type": "yarn"}, "scales its rotary embedding"),
        ({"llama__rope__dimension_count": mx.array(4, mx.uint32)}, "a part of each head"),
        ({"without": "llama.block_count"}, "has no llama.block_count"),
        ({"extra_tensors": {"rope_freqs.weight": mx.ones(4)}}, "rope_freqs.weight"),
        ({"extra_tensors": {"blk.0.attn_q_norm.weight": mx.ones(8)}}, "blk.0.attn_q_norm.weight"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_its_reason(
    write: Write, change: dict[str, Any], reason: str
) -> None:
    path = write(**change)
    with pytest.raises(ModelUnavailable, match="supported are GGUF files of the llama") as refused:
        read_gguf(path, mx.float32)
    assert reason in str(refused.value)
    assert str(path) in str(refused.value)
