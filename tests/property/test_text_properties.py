from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from queue_service.responses import FinishReason
from workers.models import DEMO_MODEL, load_model
from workers.text import Decoder, IncrementalDetokenizer, StopMatcher, TextPipeline
from workers.tokenizer import Tokenizer as DemoTokenizer

CORPUS = [
    "The café owner said 你好世界 and 你们好吗 to the crowd.",
    "Crème brûlée, naïve façade, größer, Ελλάδα, Россия, 日本語のテキスト。",
    "😀😃😄 🎉🎉 👩‍👩‍👧 text 😀 more 🏳️‍🌈",
    "def main():\n    return 1234567890\n",
]
EOS = 0


@cache
def byte_level_tokenizer() -> Tokenizer:
    """Return a small byte-level BPE tokenizer; no word splitting, so tokens straddle characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=[AddedToken("<|end|>", special=True), AddedToken("<|turn|>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


@cache
def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer of the SentencePiece kind: a few letters, and bytes for all others."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "你", "▁a"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@cache
def demo_tokenizer() -> DemoTokenizer:
    return load_model(DEMO_MODEL, dtype="stored").tokenizer


# Ids past the end have no token: models with padded vocabularies can draw them.
ids = st.lists(st.integers(0, 610), max_size=150)
byte_ids = st.lists(
    st.sampled_from(
        [byte_level_tokenizer().token_to_id(symbol) for symbol in "aðŁĺĢä½łÃ©ÿ"]
        + [byte_level_tokenizer().token_to_id("<|turn|>"), 605]
    ),
    max_size=150,
)
texts = st.text(st.sampled_from("ab é你好😀🎉\n\u200d"), max_size=60) | st.text(max_size=30)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


def bytes_as_tokens(text: str) -> list[int]:
    """Return one byte-level token for each byte of the text."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = byte_level_tokenizer().get_vocab()
    return [vocabulary[symbol] for word, _ in splitter.pre_tokenize_str(text) for symbol in word]


def detokenize(tokenizer: Decoder, token_ids: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


@settings(deadline=None)
@given(ids | byte_ids)
def test_byte_level_chunks_joined_are_the_whole_text_decoded_at_once(token_ids: list[int]) -> None:
    tokenizer = byte_level_tokenizer()
    assert "".join(detokenize(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.model
@settings(deadline=None)
@given(st.lists(st.integers(0, 49_151) | st.integers(17, 260), max_size=60), texts)
def test_the_demo_models_chunks_joined_are_the_whole_text(ids: list[int], text: str) -> None:
    tokenizer = demo_tokenizer()
    token_ids = ids + tokenizer.encode(text, add_special_tokens=False)
    assert "".join(detokenize(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(texts, st.data())
def test_no_way_to_cut_a_text_into_byte_level_tokens_shows_a_broken_character(
    text: str, data: st.DataObject
) -> None:
    tokenizer = byte_level_tokenizer()
    one_per_byte = data.draw(st.booleans(), label="one token per byte")
    token_ids = bytes_as_tokens(text) if one_per_byte else tokenizer.encode(text).ids
    chunks = detokenize(tokenizer, token_ids)
    assert "".join(chunks) == text
    assert all("\ufffd" not in chunk for chunk in chunks) or "\ufffd" in text


@settings(deadline=None)
@given(texts)
def test_byte_fallback_characters_are_never_broken(text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    token_ids = tokenizer.encode(text).ids
    assert "".join(detokenize(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(st.text("ab", max_size=40), st.lists(st.integers(0, 40)), stop_strings)
def test_the_stop_and_the_text_do_not_depend_on_how_the_text_is_cut(
    text: str, cuts: list[int], stops: tuple[str, ...]
) -> None:
    expected = text
    for end in range(len(text) + 1):
        ending_here = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            expected = text[: end - max(ending_here)]
            break
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    matcher = StopMatcher(stops)
    emitted = ""
    for start, end in pairwise(borders):
        emitted += matcher.push(text[start:end])
        assert expected.startswith(emitted)
        held = text[len(emitted) : end]
        assert matcher.matched is not None or not held or any(s.startswith(held) for s in stops)
    assert emitted + matcher.finish() == expected
    assert (matcher.matched is None) == (expected == text)


def make_pipeline(stops: tuple[str, ...], token_limit: int) -> TextPipeline:
    return TextPipeline(
        byte_level_tokenizer(),
        eos_token_ids=frozenset({EOS}),
        stop_strings=stops,
        token_limit=token_limit,
    )


def push_until_the_end(pipeline: TextPipeline, token_ids: Sequence[int]) -> list[str]:
    chunks = []
    for token_id in token_ids:
        if pipeline.finish_reason is not None:
            break
        chunks.append(pipeline.push(token_id))
    return [*chunks, pipeline.finish()]


@settings(deadline=None)
@given(ids | byte_ids, stop_strings, st.integers(1, 100))
def test_chunks_joined_are_the_text_and_hold_no_stop_string(
    token_ids: list[int], stops: tuple[str, ...], token_limit: int
) -> None:
    pipeline = make_pipeline(stops, token_limit)
    chunks = push_until_the_end(pipeline, token_ids)
    assert "".join(chunks) == pipeline.text
    assert not any(stop in pipeline.text for stop in stops)
    text_ids = token_ids[: pipeline.num_tokens]
    if pipeline.finish_reason is FinishReason.LENGTH:
        assert pipeline.num_tokens == token_limit
    if not stops:
        assert pipeline.text == byte_level_tokenizer().decode(text_ids)
        ended = EOS in token_ids[:token_limit]
        assert (pipeline.finish_reason is FinishReason.STOP) == ended


@settings(deadline=None)
@given(ids | byte_ids, stop_strings, st.integers(0, 150))
def test_a_replayed_pipeline_goes_on_as_if_never_interrupted(
    token_ids: list[int], stops: tuple[str, ...], num_replayed: int
) -> None:
    uninterrupted = make_pipeline(stops, token_limit=140)
    chunks = push_until_the_end(uninterrupted, token_ids)[:-1]
    num_replayed = min(num_replayed, len(chunks))

    resumed = make_pipeline(stops, token_limit=140)
    assert resumed.replay(token_ids[:num_replayed]) == "".join(chunks[:num_replayed])
    rest = push_until_the_end(resumed, token_ids[num_replayed:])[:-1]
    assert rest == chunks[num_replayed:]
    assert resumed.text == uninterrupted.text
    assert resumed.num_tokens == uninterrupted.num_tokens
    assert resumed.finish_reason == uninterrupted.finish_reason
