"""What the benchmarks count of prompts."""

from __future__ import annotations

from scripts.bench_prompts import common_tokens, distinct_tokens


def test_distinct_tokens_are_those_of_the_trie() -> None:
    assert distinct_tokens([]) == 0
    assert distinct_tokens([[1, 2, 3]]) == 3
    # 1 2, then 3 or 4, and 9 alone.
    assert distinct_tokens([[1, 2, 3], [9], [1, 2, 4], [1, 2]]) == 5


def test_a_prompt_that_comes_again_adds_nothing() -> None:
    assert distinct_tokens([[1, 2], [1, 2], [1, 2]]) == 2


def test_the_same_token_elsewhere_counts_again() -> None:
    assert distinct_tokens([[1, 2], [2, 1]]) == 4


def test_prompts_have_their_beginning_in_common_but_for_a_last_token() -> None:
    assert common_tokens([]) == 0
    assert common_tokens([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 3]]) == 2
    assert common_tokens([[1, 2], [3, 4]]) == 0
    assert common_tokens([[1, 2], [1, 2, 3]]) == 1
    assert common_tokens([[1, 2, 3]]) == 2
