"""Every family of mlx-lm that can be built small runs as `tests/families.py` says, and rightly."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx_lm.models
import pytest

from tests.families import FAMILIES, HELPERS, NOT_BUILT, Family
from tests.family_check import Outcome, examine

# One of each kind; the others belong to the full tier.
FAST = frozenset(
    {
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v41",
        "falcon_h1",
        "gpt_oss",
        "internlm2",
        "llama",
        "llama-sliding",
        "mamba",
        "plamo3",
        "qwen3_next",
        "recurrent_gemma",
    }
)
# Rounding differs between batch sizes; a family that is wrong is off by 0.1 and more.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Examined:
    family: Family
    outcome: Outcome


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(f, id=f.name, marks=() if f.name in FAST else pytest.mark.slow)
        for f in FAMILIES
    ],
)
def examined(request: pytest.FixtureRequest) -> Iterator[Examined]:
    yield Examined(request.param, examine(request.param))
    mx.clear_cache()


def test_a_family_runs_in_the_way_that_is_recorded(examined: Examined) -> None:
    assert examined.outcome.batching is examined.family.batching


def test_rows_that_come_and_go_get_what_each_gets_alone(examined: Examined) -> None:
    assert examined.outcome.difference < TOLERANCE


def test_a_row_put_into_another_runner_goes_on_as_if_nothing_had_happened(
    examined: Examined,
) -> None:
    difference, refusal = examined.outcome.moved_difference, examined.outcome.refusal
    if examined.family.extractable:
        assert difference is not None, refusal
        assert difference < TOLERANCE
    else:
        assert difference is None
        assert "cannot be saved" in refusal


def test_every_model_module_of_mlx_lm_is_a_family_or_known_not_to_be() -> None:
    modules = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    built = {family.module or family.name for family in FAMILIES}
    assert modules == built | set(NOT_BUILT) | HELPERS
