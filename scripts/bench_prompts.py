"""What the prompts of a file have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from queue_service.beginnings import common_length


def distinct_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return the nodes of the trie of all prompts: the fewest tokens that must be computed."""
    ordered = sorted(map(tuple, prompts))
    # In this order each prompt has most in common with the one before.
    shared = sum(common_length(one, other) for one, other in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all prompts begin with; of each at least one is left."""
    if not prompts:
        return 0
    ordered = sorted(map(tuple, prompts))
    alike = common_length(ordered[0], ordered[-1])
    return max(0, min(alike, min(map(len, prompts)) - 1))
