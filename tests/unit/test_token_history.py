"""The history of token ids, with a codec of a few tokens and with a real tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_templates import SMOLLM2, chat_tokenizer
from workers.token_history import TokenHistory

# Tokens 1 and 2 spell what 3 does; 7 and 8 are the halves of one character; 9 has no text.
PIECES = {
    1: b"ab",
    2: b"cd",
    3: b"abcd",
    4: b"tail",
    5: b"<s>",
    6: b"x",
    7: b"\xc3",
    8: b"\xa9",
    9: b"",
}


class ToyCodec:
    """Encodes greedily, the longest piece first; counts its calls."""

    def __init__(self) -> None:
        self.num_decodes = 0
        self.num_encodes = 0

    def encode_chat(self, rendered: str) -> list[int]:
        self.num_encodes += 1
        rest = rendered.encode()
        ids = []
        while rest:
            best = max((i for i, p in PIECES.items() if p and rest.startswith(p)), key=_length)
            ids.append(best)
            rest = rest[_length(best) :]
        return ids

    def decode_chat(self, ids: Sequence[int]) -> str:
        self.num_decodes += 1
        return b"".join(PIECES[i] for i in ids).decode(errors="replace")

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(PIECES[i] for i in ids).decode()


def _length(token: int) -> int:
    return len(PIECES[token])


@pytest.fixture
def codec() -> ToyCodec:
    return ToyCodec()


@pytest.fixture
def history(codec: ToyCodec) -> TokenHistory:
    return TokenHistory(codec)


def resolves(history: TokenHistory, ids: Sequence[int]) -> bool:
    """Return whether ``ids`` are found again; looking changes nothing."""
    rendered = ToyCodec().text([*ids, 4])
    return list(history.resolve(rendered, [0])) == [*ids, 4]


def test_a_prompt_begins_with_the_ids_that_were_generated(history: TokenHistory) -> None:
    history.remember([5, 1, 2])
    assert history.resolve("<s>abcdtail", [5, 3, 4]) == [5, 1, 2, 4]


def test_the_oldest_entry_makes_room_for_the_newest(codec: ToyCodec) -> None:
    history = TokenHistory(codec, max_entries=1)
    history.remember([5, 1])
    history.remember([6, 1])
    assert not resolves(history, [5, 1])
    assert resolves(history, [6, 1])


def test_a_text_longer_than_the_limit_is_not_kept(codec: ToyCodec) -> None:
    history = TokenHistory(codec, max_characters=1)
    history.remember([5, 1])
    assert len(history) == 0
    history.remember([6])
    assert len(history) == 1


def test_resolving_does_not_make_an_entry_newer(codec: ToyCodec) -> None:
    history = TokenHistory(codec, max_entries=2)
    history.remember([5, 1])
    history.remember([6, 1])
    assert resolves(history, [5, 1])
    history.remember([6, 6])
    assert not resolves(history, [5, 1])
    assert resolves(history, [6, 1])


def test_the_standard_limits_are_sixteen_entries_and_two_million_characters(
    codec: ToyCodec,
) -> None:
    history = TokenHistory(codec)
    for length in range(1, 20):
        history.remember([6] * length)
    assert len(history) == 16
    history.remember([6] * 2**21)
    assert (len(history), history.num_characters) == (1, 2**21)
    history.remember([6] * (2**21 + 1))
    assert (len(history), history.num_characters) == (1, 2**21)


@pytest.mark.parametrize("limits", [(0, 16), (16, 0), (-1, 1)])
def test_a_history_without_room_is_refused(codec: ToyCodec, limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="room"):
        TokenHistory(codec, *limits)


def test_remembering_no_ids_does_nothing(history: TokenHistory, codec: ToyCodec) -> None:
    history.remember([])
    assert (len(history), codec.num_decodes) == (0, 0)


def test_the_same_ids_again_are_not_decoded_and_become_the_newest(codec: ToyCodec) -> None:
    history = TokenHistory(codec, max_entries=2)
    history.remember([5, 1])
    history.remember([6, 1])
    num_decodes = codec.num_decodes
    history.remember((5, 1))
    assert codec.num_decodes == num_decodes
    history.remember([6, 6])
    assert resolves(history, [5, 1])
    assert not resolves(history, [6, 1])


def test_ids_that_end_inside_a_character_wait_for_the_rest(history: TokenHistory) -> None:
    history.remember([5, 6, 7])
    assert len(history) == 0
    history.remember([5, 6, 7, 8])
    assert history.resolve("<s>xétail", [0]) == [5, 6, 7, 8, 4]


def test_ids_without_text_are_not_kept(history: TokenHistory) -> None:
    history.remember([9, 9])
    assert len(history) == 0


def test_of_two_spellings_the_newest_is_kept(history: TokenHistory) -> None:
    history.remember([5, 3])
    history.remember([5, 1, 2])
    assert history.resolve("<s>abcdtail", [0]) == [5, 1, 2, 4]
    assert (len(history), history.num_characters) == (1, len("<s>abcd"))


TOKENS = st.lists(st.sampled_from(sorted(PIECES)), max_size=6)


@given(st.lists(TOKENS, max_size=30), st.integers(1, 12), st.integers(1, 4))
def test_the_limits_hold_whatever_is_remembered(
    sequences: list[list[int]], max_characters: int, max_entries: int
) -> None:
    codec = ToyCodec()
    history = TokenHistory(codec, max_characters, max_entries)
    for ids in sequences:
        history.remember(ids)
        assert len(history) <= max_entries
        assert history.num_characters <= max_characters
        text = codec.decode_chat(ids)
        if text and not text.endswith("\ufffd") and len(text) <= max_characters:
            # The newest is never the one to go.
            assert history.resolve(text + "tail", [0]) == [*ids, 4]


@given(st.lists(TOKENS, max_size=10), st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1))
def test_whatever_is_remembered_a_prompt_keeps_its_text(
    sequences: list[list[int]], prompt: list[int]
) -> None:
    codec = ToyCodec()
    history = TokenHistory(codec)
    for ids in sequences:
        history.remember(ids)
    rendered = codec.text(prompt)
    canonical = codec.encode_chat(rendered)
    assert codec.text(history.resolve(rendered, canonical)) == rendered


def test_the_ids_are_a_copy(history: TokenHistory) -> None:
    ids = [5, 1, 2]
    history.remember(ids)
    ids[1:] = [6, 6]
    assert history.resolve("<s>abcdtail", [5, 3, 4]) == [5, 1, 2, 4]


def test_what_is_resolved_can_be_changed_without_harm(history: TokenHistory) -> None:
    history.remember([5, 1, 2])
    resolved = history.resolve("<s>abcdtail", [5, 3, 4])
    assert isinstance(resolved, list)
    resolved.clear()
    assert history.resolve("<s>abcdtail", [5, 3, 4]) == [5, 1, 2, 4]


@pytest.mark.parametrize("shorter_first", [True, False])
def test_the_longest_beginning_wins(history: TokenHistory, shorter_first: bool) -> None:
    entries = [[5, 1, 2], [5, 1, 2, 1, 2]]
    for ids in entries if shorter_first else reversed(entries):
        history.remember(ids)
    assert history.resolve("<s>abcdabcdtail", [5, 3, 3, 4]) == [5, 1, 2, 1, 2, 4]
    assert history.resolve("<s>abcdtail", [5, 3, 4]) == [5, 1, 2, 4]


def test_a_text_as_long_as_the_prompt_is_no_beginning_of_it(history: TokenHistory) -> None:
    canonical = [5, 3]
    history.remember([5, 1, 2])
    assert history.resolve("<s>abcd", canonical) is canonical


def test_a_prompt_that_begins_otherwise_is_canonical(history: TokenHistory) -> None:
    canonical = [6, 3, 4]
    history.remember([5, 1, 2])
    assert history.resolve("xabcdtail", canonical) is canonical


def test_ids_that_begin_the_canonical_ones_cost_nothing(
    history: TokenHistory, codec: ToyCodec
) -> None:
    canonical = [5, 3, 4]
    history.remember([5, 3])
    before = codec.num_decodes, codec.num_encodes
    assert history.resolve("<s>abcdtail", canonical) is canonical
    assert (codec.num_decodes, codec.num_encodes) == before


class SpaceEatingCodec(ToyCodec):
    """Loses the first character of every text that it encodes, as some normalisers do."""

    def encode_chat(self, rendered: str) -> list[int]:
        return super().encode_chat(rendered[1:])


def test_a_rest_that_encodes_to_another_text_makes_the_prompt_canonical() -> None:
    history = TokenHistory(SpaceEatingCodec())
    canonical = [5, 3, 6, 4]
    history.remember([5, 1, 2])
    assert history.resolve("<s>abcdxtail", canonical) is canonical


def test_many_threads_remember_and_resolve_at_once() -> None:
    codec = ToyCodec()
    history = TokenHistory(codec, max_characters=60, max_entries=4)

    def work(seed: int) -> None:
        random = Random(seed)
        for _ in range(200):
            ids = random.choices([1, 2, 3, 5, 6], k=random.randint(1, 8))
            history.remember(ids)
            assert len(history) <= 4
            assert history.num_characters <= 60
            rendered = codec.text([*ids, 4])
            canonical = codec.encode_chat(rendered)
            assert codec.text(history.resolve(rendered, canonical)) == rendered

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_the_second_turn_of_a_chat_keeps_the_ids_of_the_first() -> None:
    tokenizer = chat_tokenizer(SMOLLM2)
    history = TokenHistory(tokenizer)
    first = [{"role": "user", "content": "hello"}]
    prompt = tokenizer.encode_chat(tokenizer.render_chat(first))
    reply = "the fox :"
    generated = [i for c in reply for i in tokenizer.encode(c, add_special_tokens=False)]
    assert generated != tokenizer.encode(reply, add_special_tokens=False)
    history.remember([*prompt, *generated])

    second = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": "x"}]
    rendered = tokenizer.render_chat(second)
    canonical = tokenizer.encode_chat(rendered)
    resolved = history.resolve(rendered, canonical)
    assert list(resolved[: len(prompt) + len(generated)]) == [*prompt, *generated]
    assert resolved != canonical
    assert tokenizer.decode(resolved, skip_special_tokens=False) == rendered
