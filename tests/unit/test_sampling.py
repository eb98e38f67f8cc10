from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference_engine import make_row_sampler
from workers.mlx_sampling import draw as draw_rows
from workers.mlx_sampling import greedy
from workers.sampling import SamplingPlan, default_seed, sampling_key, sampling_keys

# Fixed for ever: a change here changes the answers of every seeded job.
KEY_VECTORS = [
    (0, 0, (0xA706DD2F, 0x4D197E6F)),
    (0, 1, (0x2A98F501, 0xAF37E97F)),
    (1, 0, (0x5E41AB08, 0x7439611E)),
    (42, 0, (0x57E1FABA, 0x65107204)),
    (42, 7, (0xFE2F1081, 0x89F83DF6)),
    (-1, 0, (0x5DC20AA7, 0xB2A27137)),
    (2**64 - 1, 0, (0x5DC20AA7, 0xB2A27137)),
    (2**63 - 1, 1000, (0x4E0DE1F5, 0xF32ACE2B)),
    (1234567890123456789, 4095, (0xF503576C, 0x5D43CD0A)),
]
# Vocabularies above 1024 find the nucleus in another way: one inside the 1024 likeliest tokens, one
# beyond. No token here wins by less than 0.01, far above what float32 may differ by.
TOKEN_VECTORS = [
    (1000, SamplingPlan(0.0, 1.0, 42), [393] * 10),
    (1000, SamplingPlan(1.0, 1.0, 42), [892, 997, 580, 303, 6, 523, 585, 187, 609, 748]),
    (1000, SamplingPlan(0.7, 0.9, -5), [997, 178, 532, 446, 700, 844, 786, 168, 355, 144]),
    (1000, SamplingPlan(1.0, 0.5, 2**70 + 3), [743, 532, 676, 887, 283, 278, 671, 144, 494, 810]),
    (
        4096,
        SamplingPlan(0.5, 0.9, 42),
        [3168, 2545, 1256, 1366, 1577, 3034, 2823, 3120, 2900, 2080],
    ),
    (
        4096,
        SamplingPlan(4.0, 0.9, 42),
        [3168, 1441, 763, 1366, 165, 3034, 4071, 1724, 2900, 979],
    ),
]

integers = st.integers() | st.integers(-(2**64), 2**64) | st.integers(0, 50)


def formula_logits(vocab_size: int) -> mx.array:
    """Return logits of shape (1, vocab_size), spread over 0-8, that no library chose."""
    ranks = np.arange(vocab_size, dtype=np.int64) * 7919 % 10007
    return mx.array((ranks / 10007 * 8).astype(np.float32))[None]


def draw(plan: SamplingPlan, logits: mx.array, num_tokens: int, start: int = 0) -> list[int]:
    sampler = make_row_sampler(plan, start)
    tokens = np.concatenate([np.array(sampler(logits)) for _ in range(num_tokens)])
    return [int(token) for token in tokens]


def nucleus(logits: npt.NDArray[np.float32], temperature: float, top_p: float) -> set[int]:
    """Return the ids of the nucleus in float64, with what float32 sums may add at its border."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    mass_before = np.cumsum(probabilities[order]) - probabilities[order]
    num_kept = max(1, int((mass_before < top_p + 1e-5).sum()))
    return set(np.flatnonzero(probabilities >= probabilities[order[num_kept - 1]]).tolist())


# --- keys and seeds ---


@pytest.mark.parametrize(("seed", "position", "key"), KEY_VECTORS)
def test_keys_are_what_they_always_were(seed: int, position: int, key: tuple[int, int]) -> None:
    assert sampling_key(seed, position) == key


@settings(deadline=None)
@given(st.lists(st.tuples(integers, integers), max_size=20))
def test_keys_of_many_rows_equal_the_keys_of_each(pairs: list[tuple[int, int]]) -> None:
    keys = sampling_keys([seed for seed, _ in pairs], [position for _, position in pairs])
    assert keys.dtype == np.uint32
    assert keys.shape == (len(pairs), 2)
    assert keys.tolist() == [list(sampling_key(seed, position)) for seed, position in pairs]


def test_rows_without_a_position_each_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 seeds but 1 positions"):
        sampling_keys([1, 2], [0])


def test_neighbouring_seeds_and_positions_share_no_key() -> None:
    keys = {sampling_key(seed, position) for seed in range(100) for position in range(100)}
    assert len(keys) == 10_000


def test_a_key_is_the_one_mlx_makes_of_the_64_bit_word() -> None:
    high, low = sampling_key(42, 7)
    assert mx.random.key(high << 32 | low).tolist() == [high, low]


def test_default_seeds_are_what_they_always_were() -> None:
    assert default_seed("batch-1", 0, 0) == 5447130879169683693
    assert default_seed("batch-1", 0, 1) == 7681062535276498691
    assert default_seed("batch-1", 1, 0) == 3977821851764937921


@settings(deadline=None)
@given(st.text(), st.integers(0), st.integers(0))
def test_a_default_seed_has_63_bits(job_id: str, generation: int, choice: int) -> None:
    assert 0 <= default_seed(job_id, generation, choice) < 2**63


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_an_impossible_temperature_is_an_error(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingPlan(temperature, 1.0, 0)


@pytest.mark.parametrize("top_p", [-0.1, 1.1, float("nan")])
def test_an_impossible_top_p_is_an_error(top_p: float) -> None:
    with pytest.raises(ValueError, match="top_p"):
        SamplingPlan(1.0, top_p, 0)


# --- tokens ---


@pytest.mark.parametrize(("vocab_size", "plan", "tokens"), TOKEN_VECTORS)
def test_tokens_are_what_they_always_were(
    vocab_size: int, plan: SamplingPlan, tokens: list[int]
) -> None:
    assert draw(plan, formula_logits(vocab_size), 10) == tokens


def test_a_row_taken_up_again_draws_the_tokens_it_would_have_drawn() -> None:
    plan, logits = SamplingPlan(1.0, 0.9, 7), formula_logits(500)
    assert draw(plan, logits, 6, start=4) == draw(plan, logits, 10)[4:]


def test_a_token_does_not_depend_on_the_global_random_state() -> None:
    plan, logits = SamplingPlan(1.0, 1.0, 7), formula_logits(500)
    mx.random.seed(1)
    before = draw(plan, logits, 10)
    mx.random.seed(2)
    assert draw(plan, logits, 10) == before


def test_noise_drawn_for_many_rows_at_once_gives_the_tokens_of_each_row() -> None:
    seeds, vocab_size = [3, 1, 4, 15], 501
    keys = mx.array(sampling_keys(seeds, [5] * len(seeds)))
    noise = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
    together = mx.argmax(formula_logits(vocab_size) + noise, axis=-1)
    alone = [draw(SamplingPlan(1.0, 1.0, s), formula_logits(vocab_size), 1, start=5) for s in seeds]
    assert together[:, None].tolist() == alone


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 4.0]),
            st.sampled_from([1.0, 0.9, 0.2]),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([50, 1500]),
    st.integers(0, 2**32 - 1),
)
def test_rows_drawn_together_are_as_they_are_alone(
    rows: list[tuple[float, float, int]], vocab_size: int, seed: int
) -> None:
    normal = np.random.default_rng(seed).normal(scale=3, size=(len(rows), vocab_size))
    logits = mx.array(normal.astype(np.float32))
    plans = [SamplingPlan(temperature, top_p, seed) for temperature, top_p, seed in rows]
    positions = list(range(len(rows)))
    together = draw_rows(logits, plans, positions)
    alone = [draw(plan, logits[i : i + 1], 1, start=i)[0] for i, plan in enumerate(plans)]
    assert together.tolist() == alone


def test_all_greedy_rows_share_one_sampler_that_takes_a_whole_batch() -> None:
    assert make_row_sampler(SamplingPlan(0.0, 0.5, 1)) is make_row_sampler(SamplingPlan(0, 1, 2), 9)
    rows = mx.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert greedy(rows).tolist() == [1, 0]


def test_a_sampled_token_has_the_shape_and_type_of_a_batch_of_one() -> None:
    token = make_row_sampler(SamplingPlan(1.0, 0.9, 1))(formula_logits(50))
    assert (token.shape, token.dtype) == ((1,), mx.uint32)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-30, 1e-4])
def test_a_tiny_temperature_draws_among_the_likeliest_tokens_only(
    temperature: float, top_p: float
) -> None:
    logits = mx.array([[-9.0, -1.0, -5.0, -1.5, -1.0]])
    assert set(draw(SamplingPlan(temperature, top_p, 3), logits, 20)) == {1, 4}


def test_logits_far_from_zero_draw_like_their_log_probabilities() -> None:
    plan = SamplingPlan(0.001, 0.95, 3)
    logits = mx.arange(64)[None] % 7 / 1024
    assert draw(plan, logits + 4096, 20) == draw(plan, logits, 20)


def test_the_sampler_follows_the_distribution() -> None:
    logits = np.array([0.0, -0.5, 1.0, -2.0, 0.3, 0.9, -1.0, -0.2], dtype=np.float32)
    probabilities = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    num_draws = 4000
    row = mx.array(logits)[None]
    tokens = [token for seed in range(40) for token in draw(SamplingPlan(0.8, 1.0, seed), row, 100)]
    counts = np.bincount(tokens, minlength=len(logits))
    chi_square = ((counts - num_draws * probabilities) ** 2 / (num_draws * probabilities)).sum()
    assert chi_square < 24.3  # 7 degrees of freedom, 1 in 1000


def test_top_p_keeps_the_proportions_of_the_tokens_it_keeps() -> None:
    row = mx.log(mx.array([[0.4, 0.05, 0.3, 0.05, 0.2]]))
    tokens = [token for seed in range(30) for token in draw(SamplingPlan(1.0, 0.6, seed), row, 100)]
    counts = np.bincount(tokens, minlength=5)
    assert counts[[1, 3, 4]].tolist() == [0, 0, 0]
    assert counts[0] / 3000 == pytest.approx(4 / 7, abs=0.03)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.0, {0}), (0.3, {0}), (0.45, {0, 2}), (0.75, {0, 2, 4}), (1.0, {*range(5)})],
)
def test_top_p_keeps_the_smallest_set_that_holds_its_share(top_p: float, kept: set[int]) -> None:
    row = mx.log(mx.array([[0.4, 0.05, 0.3, 0.05, 0.2]]))
    tokens = [
        token for seed in range(3) for token in draw(SamplingPlan(1.0, top_p, seed), row, 100)
    ]
    assert set(tokens) == kept


def test_top_p_keeps_all_tokens_as_likely_as_the_last_it_keeps() -> None:
    assert set(draw(SamplingPlan(1.0, 0.1, 5), mx.zeros((1, 4)), 100)) == {0, 1, 2, 3}


@pytest.mark.parametrize("cut", [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_exclusion_at_threshold_zero_leaves_what_was_cut_out(cut: dict[str, Any]) -> None:
    row = formula_logits(500)
    options = {"top_p": 1.0, **cut, "xtc_probability": 1.0, "xtc_threshold": 0.0}
    kept = np.argsort(-np.array(row[0]))[:200]
    drawn = draw(SamplingPlan(1.0, seed=3, **options), row, 20)
    assert len(set(drawn)) == 1  # all top choices but the least likely are out
    assert set(drawn) <= set(kept.tolist())


def test_a_masked_token_is_never_drawn() -> None:
    row = mx.array([[0.0, -np.inf, 0.0, -np.inf]])
    for top_p in (1.0, 0.99):
        assert set(draw(SamplingPlan(2.0, top_p, 8), row, 100)) == {0, 2}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3000),
    st.floats(0.1, 30),
    st.floats(0.1, 2),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_a_token_is_always_in_the_nucleus(
    vocab_size: int, spread: float, temperature: float, top_p: float, seed: int
) -> None:
    normal = np.random.default_rng(seed).normal(scale=spread, size=vocab_size)
    logits = normal.astype(np.float32)
    plan = SamplingPlan(temperature, top_p, seed)
    assert set(draw(plan, mx.array(logits)[None], 5)) <= nucleus(logits, temperature, top_p)
