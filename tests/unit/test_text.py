from __future__ import annotations

from collections.abc import Sequence

import pytest

from queue_service.responses import FinishReason
from workers.text import IncrementalDetokenizer, StopMatcher, TextPipeline

EOS = 300
SPECIAL = 301
UNFINISHED_SMILE = b"\xf0\x9f\x98"


class ByteDecoder:
    """Ids below 256 are bytes, others are special tokens. Remembers how much it had to decode."""

    def __init__(self) -> None:
        self.longest_call = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert skip_special_tokens
        self.longest_call = max(self.longest_call, len(ids))
        return bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")


def pipeline(*stop_strings: str, token_limit: int = 1000) -> TextPipeline:
    return TextPipeline(
        ByteDecoder(),
        eos_token_ids=frozenset({EOS}),
        stop_strings=stop_strings,
        token_limit=token_limit,
    )


def push_all(target: TextPipeline, text: str) -> list[str]:
    return [target.push(byte) for byte in text.encode()]


# --- detokenizer ---


def test_a_split_character_comes_out_whole_with_its_last_byte() -> None:
    detokenizer = IncrementalDetokenizer(ByteDecoder())
    assert [detokenizer.push(byte) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert detokenizer.finish() == ""


def test_text_before_an_unfinished_character_does_not_wait_for_it() -> None:
    class TwoByteTokens(ByteDecoder):
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            return super().decode([byte for pair in ids for byte in (pair >> 8, pair & 255)])

    detokenizer = IncrementalDetokenizer(TwoByteTokens())
    encoded = "aéé ".encode()
    pairs = [encoded[at] << 8 | encoded[at + 1] for at in range(0, len(encoded), 2)]
    assert [detokenizer.push(pair) for pair in pairs] == ["a", "é", "é "]


def test_an_unfinished_character_ends_as_one_replacement_character() -> None:
    detokenizer = IncrementalDetokenizer(ByteDecoder())
    assert [detokenizer.push(byte) for byte in UNFINISHED_SMILE] == ["", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_broken_character_is_replaced_once_the_next_one_shows_it_is_broken() -> None:
    detokenizer = IncrementalDetokenizer(ByteDecoder())
    assert [detokenizer.push(byte) for byte in UNFINISHED_SMILE + b"x"] == ["", "", "", "\ufffdx"]


@pytest.mark.parametrize("garbage", [b"\x80", b"\xf0", UNFINISHED_SMILE])
def test_endless_broken_bytes_cost_a_constant_window_and_a_constant_delay(garbage: bytes) -> None:
    decoder = ByteDecoder()
    detokenizer = IncrementalDetokenizer(decoder)
    text = ""
    for num_bytes, byte in enumerate(garbage * 500, start=1):
        text += detokenizer.push(byte)
        assert len(text) >= num_bytes // len(garbage) - 6
    assert decoder.longest_call < 40
    assert text + detokenizer.finish() == (garbage * 500).decode(errors="replace")


def test_a_character_right_after_endless_broken_bytes_is_whole() -> None:
    for num_broken in range(100):
        detokenizer = IncrementalDetokenizer(ByteDecoder())
        text = "".join([detokenizer.push(byte) for byte in b"\x80" * num_broken + "😀".encode()])
        assert text == "\ufffd" * num_broken + "😀"


def test_endless_special_tokens_cost_a_constant_window_and_split_no_character() -> None:
    decoder = ByteDecoder()
    detokenizer = IncrementalDetokenizer(decoder)
    first, *rest = "é".encode()
    ids = [SPECIAL] * 100 + [first] + [SPECIAL] * 100 + rest + [SPECIAL] * 100
    assert "".join([detokenizer.push(token_id) for token_id in ids]) == "é"
    assert decoder.longest_call < 40


# --- stop strings ---


def test_text_is_held_only_while_it_may_begin_a_stop_string() -> None:
    matcher = StopMatcher(("END",))
    assert [matcher.push(piece) for piece in ("a E", "N", "x", "E")] == ["a ", "", "ENx", ""]
    assert matcher.finish() == "E"
    assert matcher.matched is None


def test_nothing_of_a_stop_string_split_over_pieces_leaks() -> None:
    matcher = StopMatcher(("</answer>",))
    assert [matcher.push(piece) for piece in ("42</", "ans", "wer> more", "x")] == [
        "42",
        "",
        "",
        "",
    ]
    assert matcher.matched == "</answer>"
    assert matcher.finish() == ""


def test_a_stop_string_that_begins_inside_a_false_start_is_found() -> None:
    matcher = StopMatcher(("aab",))
    assert "".join([matcher.push(character) for character in "aaab"]) == "a"
    assert matcher.matched == "aab"


@pytest.mark.parametrize("pieces", [["abcd"], ["ab", "cd"], ["a", "b", "c", "d"], ["abc", "d"]])
def test_the_stop_string_that_ends_first_wins(pieces: list[str]) -> None:
    matcher = StopMatcher(("abcd", "bc"))
    assert "".join([matcher.push(piece) for piece in pieces]) == "a"
    assert matcher.matched == "bc"


@pytest.mark.parametrize("order", [("cd", "bcd"), ("bcd", "cd")])
def test_of_stop_strings_that_end_together_the_longest_wins(order: tuple[str, str]) -> None:
    matcher = StopMatcher(order)
    assert "".join([matcher.push(piece) for piece in ("ab", "cd")]) == "a"
    assert matcher.matched == "bcd"


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))


# --- pipeline ---


def test_an_end_of_sequence_token_stops_and_releases_what_was_held() -> None:
    choice = pipeline("END")
    assert push_all(choice, "ok E") == ["o", "k", " ", ""]
    assert choice.push(EOS) == "E"
    assert (choice.text, choice.finish_reason, choice.num_tokens) == ("ok E", FinishReason.STOP, 4)
    assert choice.finish() == ""


def test_a_choice_that_goes_on_has_no_finish_reason() -> None:
    choice = pipeline("END")
    push_all(choice, "ok EN")
    assert choice.finish_reason is None


def test_a_stop_string_stops_and_its_tokens_count() -> None:
    choice = pipeline("END")
    push_all(choice, "ok END")
    assert (choice.text, choice.finish_reason, choice.num_tokens) == ("ok ", FinishReason.STOP, 6)
    assert choice.finish() == ""


def test_the_token_limit_releases_what_was_held() -> None:
    choice = pipeline("END", token_limit=2)
    assert push_all(choice, "EN") == ["", "EN"]
    assert (choice.text, choice.finish_reason, choice.num_tokens) == ("EN", FinishReason.LENGTH, 2)


def test_a_stop_string_at_the_token_limit_is_a_stop() -> None:
    choice = pipeline("END", token_limit=3)
    push_all(choice, "END")
    assert (choice.text, choice.finish_reason) == ("", FinishReason.STOP)


def test_a_stop_string_that_only_the_last_flush_completes_is_a_stop() -> None:
    choice = pipeline("\ufffd", token_limit=2)
    assert [choice.push(ord("a")), choice.push(0x80)] == ["a", ""]
    assert (choice.text, choice.finish_reason) == ("a", FinishReason.STOP)


def test_an_end_of_sequence_token_before_the_limit_is_a_stop_with_no_text() -> None:
    choice = pipeline(token_limit=1)
    assert choice.push(EOS) == ""
    assert (choice.text, choice.finish_reason, choice.num_tokens) == ("", FinishReason.STOP, 0)


def test_a_special_token_counts_and_has_no_text() -> None:
    choice = pipeline()
    assert [choice.push(ord("a")), choice.push(SPECIAL), choice.push(ord("b"))] == ["a", "", "b"]
    assert choice.num_tokens == 3


def test_finish_ends_a_choice_that_did_not_end_by_itself() -> None:
    choice = pipeline("END")
    push_all(choice, "ok EN")
    assert choice.finish() == "EN"
    assert (choice.text, choice.finish_reason) == ("ok EN", None)
    with pytest.raises(RuntimeError, match="ended"):
        choice.push(ord("a"))


@pytest.mark.parametrize(
    ("stop_strings", "token_limit", "last"),
    [((), 10, EOS), ((), 1, ord("a")), (("a",), 10, ord("a"))],
)
def test_a_token_after_the_end_is_an_error(
    stop_strings: tuple[str, ...], token_limit: int, last: int
) -> None:
    choice = pipeline(*stop_strings, token_limit=token_limit)
    choice.push(last)
    with pytest.raises(RuntimeError, match="ended"):
        choice.push(ord("b"))
    assert choice.num_tokens <= 1


def test_a_token_limit_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="token_limit"):
        pipeline(token_limit=0)
