"""The radix tree of stored segments."""

from __future__ import annotations

import random
import time

import pytest

from tests.checkpoints import IDENTITY
from workers.checkpoints.eviction import Worth, victims
from workers.checkpoints.index import Entry, Match, RadixIndex, as_bytes, blocks_in
from workers.checkpoints.records import BLOCK_TOKENS, prefix_digests

NAMESPACE = IDENTITY.namespace
PROMPT = [token * 7 % 5000 for token in range(1500)]


def entry(
    tokens: list[int], start: int = 0, *, is_sliceable: bool = True, cost_seconds: float = 1.0
) -> Entry:
    """An entry of a prompt's tokens from a place on."""
    ends = [start, *blocks_in(start, len(tokens)), len(tokens)]
    parent, *blocks, digest = prefix_digests(NAMESPACE, tokens, ends)
    return Entry(
        start=start,
        tokens=as_bytes(tokens[start:]),
        parent=parent,
        digest=digest,
        blocks=tuple(blocks),
        is_sliceable=is_sliceable,
        num_bytes=len(tokens) - start,
        cost_seconds=cost_seconds,
    )


def index_of(*entries: Entry) -> RadixIndex:
    index = RadixIndex(NAMESPACE)
    for one in entries:
        index.add(one)
    return index


def lengths(match: Match) -> list[int]:
    return [part.num_tokens for part in match.parts]


def test_a_match_is_a_chain_of_entries_each_with_what_is_used_of_it() -> None:
    first, second = entry(PROMPT[:600]), entry([*PROMPT[:512], *range(6000, 6300)], 512)
    match = index_of(first, second).match([*PROMPT[:512], *range(6000, 6100), 1])
    assert [part.entry for part in match.parts] == [first, second]
    assert lengths(match) == [512, 100]
    assert match.tokens == as_bytes([*PROMPT[:512], *range(6000, 6100)])


def test_of_two_ways_to_the_same_length_the_one_of_fewer_files_is_taken() -> None:
    whole = entry(PROMPT[:1000])
    index = index_of(entry(PROMPT[:512]), entry(PROMPT[:900], 512), whole)
    assert [part.entry for part in index.match(PROMPT[:800]).parts] == [whole]


def test_entries_of_an_end_that_is_no_block_can_be_followed() -> None:
    index = index_of(entry(PROMPT[:300]), entry(PROMPT[:310], 300), entry(PROMPT[:1000], 310))
    assert lengths(index.match(PROMPT)) == [300, 10, 690]


def test_what_follows_nothing_is_not_found_until_it_does() -> None:
    index = index_of(entry(PROMPT[:1000], 512))
    assert index.match(PROMPT).length == 0
    assert index.covers(PROMPT[:1000]) == 0
    assert index.tokens_to(entry(PROMPT[:1000]).digest) is None
    index.add(entry(PROMPT[:512]))
    assert index.match(PROMPT).length == 1000
    assert index.tokens_to(entry(PROMPT[:1000]).digest) == as_bytes(PROMPT[:1000])


def test_the_tokens_to_a_point_are_found_past_an_entry_that_leads_nowhere() -> None:
    index = index_of(entry(PROMPT[:600], 300), entry(PROMPT[:512]))
    [point] = prefix_digests(NAMESPACE, PROMPT, [512])
    assert index.tokens_to(point) == as_bytes(PROMPT[:512])


@pytest.mark.parametrize("length", [1, 2, 256, 257, 1500])
def test_one_token_is_always_left_to_feed(length: int) -> None:
    assert index_of(entry(PROMPT)).match(PROMPT[:length]).length == length - 1


def test_an_entry_that_was_removed_is_found_no_more() -> None:
    one = entry(PROMPT[:600])
    index = index_of(one, entry(PROMPT, 512))
    assert index.remove(one.digest) is one
    assert index.remove(one.digest) is None
    assert index.match(PROMPT).length == 0
    assert len(index) == 1
    assert index.num_bytes == 1500 - 512


def test_one_of_two_entries_that_claim_the_same_tokens_is_dropped() -> None:
    one = entry(PROMPT[:600])
    other = Entry(
        one.start, one.tokens, one.parent, b"x" * 16, one.blocks, True, one.num_bytes, 1.0
    )
    index = index_of(one, other)
    assert list(index) == [other]
    index.remove(other.digest)
    assert index.match(PROMPT).length == 0


def test_an_entry_without_tokens_or_with_too_few_digests_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Entry(0, b"", b"", b"", (), True, 0, 0.0)
    with pytest.raises(ValueError, match="every block"):
        Entry(0, as_bytes(PROMPT), b"", b"", (), True, 0, 0.0)


def test_what_a_state_covers_ends_before_the_place_where_the_state_is_missing() -> None:
    index = index_of(entry(PROMPT, is_sliceable=False))
    assert index.covers(PROMPT) == len(PROMPT)
    assert index.covers(PROMPT[:1280]) == 1024
    assert index.covers(PROMPT[:1000]) == 768
    assert index.covers([*PROMPT, 1]) == len(PROMPT)


def test_leaves_go_first_and_then_what_they_followed() -> None:
    first, second = entry(PROMPT[:512]), entry(PROMPT[:1000], 512, cost_seconds=9.0)
    aside = entry([9, *PROMPT[:300]], cost_seconds=5.0)
    index = index_of(first, second, aside)
    worth = Worth()
    for one in index:
        worth.add(one, 0.0)
    gone = []
    for _, victim in victims([index], worth):
        index.remove(victim.digest)
        worth.evict(victim)
        gone.append(victim)
    assert gone == [aside, second, first]


def test_what_no_prompt_reaches_goes_first() -> None:
    lost = entry(PROMPT[:1000], 512, cost_seconds=100.0)
    index = index_of(entry([9, *PROMPT[:300]]), lost)
    worth = Worth()
    for one in index:
        worth.add(one, 0.0)
    assert next(victims([index], worth)) == (index, lost)


def test_of_what_is_worth_the_same_the_longest_unused_goes_first() -> None:
    worth = Worth()
    entries = [entry([number, *PROMPT[:300]], cost_seconds=0.0) for number in range(3)]
    for one, used_at in zip(entries, (3.0, 1.0, 2.0), strict=True):
        worth.add(one, used_at)
    assert sorted(entries, key=worth.rank) == [entries[1], entries[2], entries[0]]


def test_what_an_earlier_process_used_last_is_worth_most_but_less_than_what_is_new() -> None:
    worth = Worth()
    entries = [entry([number, *PROMPT[:300]]) for number in range(4)]
    worth.seed(dict(zip(entries[:3], (3.0, 1.0, 2.0), strict=True)))
    worth.add(entries[3], 4.0)
    assert sorted(entries, key=worth.rank) == [entries[1], entries[2], entries[0], entries[3]]


def test_hits_age_with_the_clock() -> None:
    worth = Worth()
    often, once = entry([1, *PROMPT[:300]]), entry([2, *PROMPT[:300]])
    worth.add(often, 0.0)
    for _ in range(3):
        worth.note_use(often, 1.0)
    for number in range(5):
        passing = entry([3 + number, *PROMPT[:300]])
        worth.add(passing, 2.0)
        worth.evict(passing)
    worth.add(once, 3.0)
    assert worth.rank(once) > worth.rank(often)


def test_a_lookup_among_a_thousand_prompts_takes_a_tenth_of_a_millisecond() -> None:
    source = random.Random(0)
    base = [source.randrange(50_000) for _ in range(1500)]
    prompts = [[*base, *(source.randrange(50_000) for _ in range(200))] for _ in range(1000)]
    index = RadixIndex(NAMESPACE)
    for prompt in prompts:
        index.add(entry(prompt, index.covers(prompt)))
    assert len(index) == 1000

    def seconds() -> float:
        began = time.thread_time()
        for prompt in prompts[::10]:
            index.match(prompt)
        return (time.thread_time() - began) / 100

    # The processor is shared: the best of a few is the work itself.
    assert min(seconds() for _ in range(10)) < 0.0001
    assert all(index.match(prompt).length == 1699 for prompt in prompts)


def test_blocks_are_the_multiples_inside() -> None:
    assert list(blocks_in(0, BLOCK_TOKENS)) == []
    assert list(blocks_in(0, BLOCK_TOKENS + 1)) == [BLOCK_TOKENS]
    assert list(blocks_in(300, 1024)) == [512, 768]
