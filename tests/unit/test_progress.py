"""What a job has generated comes back from the server as it was sent, or not at all."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from queue_service.progress import (
    Progress,
    ProgressHeader,
    TokenScores,
    encode_scores,
    encode_tokens,
    join_elements,
)

HEADER = ProgressHeader("p" * 32, "m" * 32, seed=-5, cached_tokens=7)
ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5)
floats = st.floats(width=32, allow_nan=False)


def scored(num_top: int) -> st.SearchStrategy[TokenScores]:
    pair = st.tuples(st.integers(0, 2**32 - 1), floats)
    return st.tuples(floats, st.lists(pair, min_size=num_top, max_size=num_top).map(tuple))


@given(st.lists(st.tuples(st.integers(0, 127), ids), max_size=8))
def test_tokens_of_choices_come_back_in_their_order(writes: list[tuple[int, list[int]]]) -> None:
    elements = [HEADER.encode(), *(encode_tokens(choice, tokens) for choice, tokens in writes)]
    found = Progress.decode(join_elements(elements), num_top_logprobs=None)
    assert found is not None
    assert found.header == HEADER
    expected: dict[int, tuple[int, ...]] = {}
    for choice, tokens in writes:
        expected[choice] = (*expected.get(choice, ()), *tokens)
    assert found.tokens == expected


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(st.just(n), st.lists(scored(n), max_size=4))))
def test_log_probabilities_come_back_bit_for_bit(case: tuple[int, list[TokenScores]]) -> None:
    num_top, scores = case
    elements = [HEADER.encode(), encode_tokens(1, range(len(scores))), encode_scores(1, scores)]
    found = Progress.decode(join_elements(elements), num_top_logprobs=num_top)
    assert found is not None
    assert found.scores.get(1, ()) == tuple(scores)


def test_the_last_header_counts() -> None:
    later = ProgressHeader("p", "m", 1, cached_tokens=9)
    joined = join_elements([HEADER.encode(), encode_tokens(0, [1]), later.encode()])
    found = Progress.decode(joined, num_top_logprobs=None)
    assert found is not None
    assert found.header == later


def test_tokens_without_the_scores_that_were_asked_for_are_no_progress() -> None:
    joined = join_elements(
        [HEADER.encode(), encode_tokens(0, [1, 2]), encode_scores(0, [(0.0, ())])]
    )
    assert Progress.decode(joined, num_top_logprobs=0) is None
    assert Progress.decode(joined, num_top_logprobs=None) is not None


def test_progress_of_an_older_worker_is_none() -> None:
    old = [b'{"seed": 3, "v": 1}', array("I", [5, 6]).tobytes()]
    assert Progress.decode(join_elements(old), num_top_logprobs=None) is None


@given(st.binary(max_size=60))
def test_anything_else_is_no_progress_and_no_error(data: bytes) -> None:
    found = Progress.decode(data, num_top_logprobs=2)
    assert found is None or isinstance(found, Progress)


@given(st.integers(0, 200), st.integers(0, 255))
def test_damage_is_no_error(place: int, value: int) -> None:
    elements = [
        HEADER.encode(),
        encode_tokens(0, [1, 2, 3]),
        encode_scores(0, [(0.0, ((1, 2.0),))] * 3),
    ]
    joined = bytearray(join_elements(elements))
    joined[place % len(joined)] = value
    Progress.decode(bytes(joined), num_top_logprobs=1)
