"""How models of several families may be batched, from tiny random ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models import afm7, mamba, qwen3

from queue_service.errors import ModelUnavailable
from workers.self_test import Batching, choose_runner


def made(model: Module) -> Module:
    mx.random.seed(0)
    mx.eval(model)
    return model


def tiny_qwen3() -> Module:
    return made(
        qwen3.Model(
            qwen3.ModelArgs(
                model_type="qwen3",
                hidden_size=32,
                num_hidden_layers=2,
                intermediate_size=64,
                num_attention_heads=4,
                rms_norm_eps=1e-5,
                vocab_size=128,
                num_key_value_heads=2,
                max_position_embeddings=256,
                head_dim=8,
                tie_word_embeddings=True,
                rope_theta=10000.0,
            )
        )
    )


def tiny_mamba() -> Module:
    return made(
        mamba.Model(
            mamba.ModelArgs(
                model_type="mamba",
                vocab_size=128,
                hidden_size=32,
                intermediate_size=64,
                state_size=8,
                num_hidden_layers=2,
                conv_kernel=4,
                use_bias=False,
                use_conv_bias=True,
                time_step_rank=4,
            )
        )
    )


def tiny_afm7() -> Module:
    return made(
        afm7.Model(
            afm7.ModelArgs(
                model_type="afm7",
                vocab_size=128,
                hidden_dim=32,
                num_layers=4,
                num_kv_reuse_layers=2,
                num_heads=4,
                num_kv_heads=2,
            )
        )
    )


def test_a_family_that_batches_well_is_batched() -> None:
    assert choose_runner(tiny_qwen3())[0] is Batching.PACKED


def test_a_family_that_is_wrong_with_ragged_rows_is_prefilled_one_at_a_time() -> None:
    assert choose_runner(tiny_mamba())[0] is Batching.ONE_ROW_PREFILL


def test_a_family_that_is_wrong_in_any_batch_runs_alone() -> None:
    assert choose_runner(tiny_afm7())[0] is Batching.ALONE


def test_a_model_that_does_not_run_at_all_is_refused() -> None:
    class Broken(Module):
        layers: Any = ()

        def __call__(self, *_: Any, **__: Any) -> mx.array:
            raise ValueError("no batching with history")

    with pytest.raises(ModelUnavailable, match="no batching with history"):
        choose_runner(Broken())
