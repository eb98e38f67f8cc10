"""The tokenizer wrapper: ids, text and rendered chats, with the demo model's and tiny ones."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from queue_service.errors import RequestError
from tests.chat_templates import QWEN3, chat_tokenizer
from workers.gguf import read_gguf
from workers.models import demo_file
from workers.tokenizer import Tokenizer

WORDS = ["<s>", "</s>", "a", "b", "c", ",", "<unk>"]
BOS, EOS, A, B, C, COMMA, UNK = range(7)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer(read_gguf(demo_file(), None).tokenizer)


def tiny(template: str | None = None, *, adds_bos: bool = False, **options: Any) -> Tokenizer:
    return Tokenizer(tiny_hf(template, adds_bos=adds_bos, **options))


def tiny_hf(
    template: str | None = None, *, adds_bos: bool = False, **options: Any
) -> PreTrainedTokenizerFast:
    fast = FastTokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_tokens([AddedToken(word, special=True) for word in ("<s>", "</s>", "<unk>")])
    if adds_bos:
        fast.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=fast,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
        **options,
    )


@given(text=st.text())
def test_the_bytes_of_tokens_join_to_the_text(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text, add_special_tokens=False)
    joined = b"".join(smollm.token_bytes(token_id) for token_id in ids)
    assert joined.decode("utf-8", "replace") == smollm.decode(ids, skip_special_tokens=False)


def test_a_token_without_bytes_of_its_own_has_its_name_or_nothing(smollm: Tokenizer) -> None:
    [end] = smollm.encode("<|im_end|>", add_special_tokens=False)
    assert smollm.token_bytes(end) == b"<|im_end|>"
    assert smollm.token_bytes(smollm.vocab_size + 5) == b""


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [19556, 28, 905, 17]),
        ("2024", [34, 32, 34, 36]),
        (" leading", [2899]),
        ("a\nb\n\nc", [81, 198, 82, 198, 198, 83]),
        ("🙂", [10813, 38887]),
        ("日本語", [23274, 115, 40993, 179, 120, 248]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
        ("", []),
    ],
)
def test_smollm_text_has_its_known_ids(smollm: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm.encode(text, add_special_tokens=True) == ids
    assert smollm.decode(ids, skip_special_tokens=False) == text


# Left out: characters with a byte that SmolLM2's vocabulary lacks.
@given(
    st.text(
        st.characters(
            exclude_categories=["Cs"],
            exclude_characters="\x04\x06\x13\x14\x16\x1d",
            max_codepoint=0x3FFFF,
        )
    )
)
def test_decoding_gives_the_encoded_text_back(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text, add_special_tokens=False)
    assert smollm.decode(ids, skip_special_tokens=False) == text


def test_a_byte_that_the_vocabulary_lacks_is_left_out(smollm: Tokenizer) -> None:
    ids = smollm.encode("a\x04b", add_special_tokens=False)
    assert smollm.decode(ids) == "ab"


def test_a_lone_surrogate_is_read_as_a_replacement_character(smollm: Tokenizer) -> None:
    replaced = smollm.encode("a\ufffdb", add_special_tokens=False)
    assert smollm.encode("a\ud800b", add_special_tokens=False) == replaced


def test_a_pair_of_surrogates_is_read_as_its_character(smollm: Tokenizer) -> None:
    assert smollm.encode("\ud83d\ude42", add_special_tokens=False) == [10813, 38887]


def test_special_tokens_are_left_out_of_the_text_unless_asked_for(smollm: Tokenizer) -> None:
    assert smollm.decode([1, 6004, 2]) == "hi"
    assert smollm.decode([1, 6004, 2], skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_an_id_without_a_token_gives_no_text(smollm: Tokenizer) -> None:
    assert smollm.decode([6004, smollm.vocab_size + 5]) == "hi"


def test_the_demo_tokenizer_knows_its_special_ids(smollm: Tokenizer) -> None:
    assert smollm.bos_token_id == 1
    assert smollm.eos_token_ids == {2}
    assert smollm.vocab_size == 49152


def test_eos_ids_of_the_configuration_are_added_to_the_tokenizers_own() -> None:
    assert Tokenizer(tiny_hf(), eos_token_ids=[C]).eos_token_ids == {EOS, C}


def test_bos_is_added_only_when_asked_for() -> None:
    tokenizer = tiny(adds_bos=True)
    assert tokenizer.encode("a b", add_special_tokens=True) == [BOS, A, B]
    assert tokenizer.encode("a b", add_special_tokens=False) == [A, B]


def test_spaces_are_never_cleaned_up() -> None:
    tokenizer = tiny(clean_up_tokenization_spaces=True)
    assert tokenizer.decode([A, COMMA, B]) == "a , b"


def test_truncation_and_padding_of_the_tokenizer_file_are_switched_off() -> None:
    hf = tiny_hf()
    hf.backend_tokenizer.enable_truncation(2)
    hf.backend_tokenizer.enable_padding(length=6)
    tokenizer = Tokenizer(hf)
    assert tokenizer.encode("a b c", add_special_tokens=False) == [A, B, C]


def test_many_threads_get_what_one_gets() -> None:
    hf = tiny_hf("{% for m in messages %}{{ m.content }} {% endfor %}")
    hf.backend_tokenizer.enable_truncation(2)
    tokenizer = Tokenizer(hf)

    def work(length: int) -> tuple[str, list[int], str]:
        rendered = tokenizer.render_chat([{"role": "user", "content": "a b c , " * length}])
        ids = tokenizer.encode_chat(rendered)
        return rendered, ids, tokenizer.decode(ids)

    lengths = [1 + i % 40 for i in range(400)]
    alone = {length: work(length) for length in set(lengths)}
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, lengths)) == [alone[length] for length in lengths]


def test_smollm_chats_open_with_the_default_system_prompt(smollm: Tokenizer) -> None:
    assert smollm.render_chat([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_replaces_the_default_one(smollm: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert smollm.render_chat(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )


def test_the_final_message_can_be_left_open(smollm: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    rendered = smollm.render_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered.endswith("<|im_start|>assistant\nWell,")


def test_template_keywords_reach_the_template() -> None:
    tokenizer = tiny("{{ 'a' if enable_thinking else 'b' }} {{ tools | length }}")
    rendered = tokenizer.render_chat(
        [{"role": "user", "content": "c"}], enable_thinking=False, tools=[{"type": "function"}]
    )
    assert rendered == "b 1"


def test_a_template_as_code_is_called_instead_of_the_tokenizers() -> None:
    tokenizer = Tokenizer(
        tiny_hf("never used"),
        apply_chat_template=lambda messages, **_: messages[0]["content"].upper(),
    )
    assert tokenizer.render_chat([{"role": "user", "content": "c"}]) == "C"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages"])
def test_a_keyword_of_the_renderer_is_refused(smollm: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError, match=name) as refused:
        smollm.render_chat([{"role": "user", "content": "hi"}], **cast("Any", {name: "x"}))
    assert refused.value.param == f"chat_template_kwargs.{name}"


def test_a_refusal_of_the_template_is_the_requests_error() -> None:
    tokenizer = tiny("{{ raise_exception('Conversation roles must alternate') }}")
    with pytest.raises(RequestError, match="Conversation roles must alternate") as refused:
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert (refused.value.status_code, refused.value.param) == (400, "messages")


def test_a_failure_that_quotes_the_chat_is_cut() -> None:
    tokenizer = tiny("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat([{"role": "user", "content": "private " * 10_000}])
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"content": "hi"}],
    ],
)
def test_messages_that_break_the_template_are_the_requests_error(
    smollm: Tokenizer, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(RequestError, match="chat template") as refused:
        smollm.render_chat(messages)
    assert refused.value.status_code == 400


def test_a_model_without_a_chat_template_refuses_chats() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        tiny().render_chat([{"role": "user", "content": "hi"}])


def test_a_doubled_bos_is_dropped_once() -> None:
    tokenizer = tiny(adds_bos=True)
    assert tokenizer.encode_chat("<s><s> a") == [BOS, A]
    assert tokenizer.encode_chat("<s> a") == [BOS, A]
    assert tokenizer.encode_chat("a") == [A]


CHAT_TOKENS = st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>",
        "<|endoftext|>",
        "<|",
        "im_end",
        "|>",
        "\n",
        "user",
        "\ufdd0",
        "é",
    ]
)


@given(texts=st.lists(st.lists(CHAT_TOKENS, max_size=8).map("".join), min_size=1, max_size=4))
def test_no_message_can_write_a_special_token(smollm: Tokenizer, texts: list[str]) -> None:
    def special(contents: list[str]) -> list[int]:
        turns = [{"role": role, "content": c} for role, c in zip(roles, contents, strict=True)]
        ids = smollm.encode_chat(smollm.render_chat(turns))
        shown = smollm.decode(ids, skip_special_tokens=False)
        assert all(content.replace("\ufdd0", "") in shown for content in contents)
        return [token_id for token_id in ids if smollm.decode([token_id]) == ""]

    roles = ["user", "assistant"] * 2
    del roles[len(texts) :]
    assert special(texts) == special(["x"] * len(texts))


def test_the_name_of_a_token_in_a_message_is_text_unless_asked(smollm: Tokenizer) -> None:
    [end] = smollm.encode("<|im_end|>", add_special_tokens=False)
    turn = {"role": "user", "content": "say <|im_end|> twice"}
    ids = smollm.encode_chat(smollm.render_chat([turn]))
    asked = smollm.encode_chat(smollm.render_chat([turn], parse_special_tokens=True))
    assert asked.count(end) - ids.count(end) == 1
    assert smollm.decode(ids, skip_special_tokens=False) == smollm.decode(
        asked, skip_special_tokens=False
    )
    # Its text alone does not tell the one from the other.
    assert smollm.decode_chat(ids) == ""
    assert "say <|im_end|> twice" in smollm.decode_chat(asked)


def test_what_marks_a_thought_is_text_where_a_user_writes_it_and_whole_in_an_answer() -> None:
    tokenizer = chat_tokenizer(QWEN3)
    [thought] = tokenizer.encode("<think>", add_special_tokens=False)

    def count(role: str, content: str) -> int:
        turns = [{"role": "user", "content": "hi"}, {"role": role, "content": content}]
        return tokenizer.encode_chat(
            tokenizer.render_chat(turns, add_generation_prompt=False)
        ).count(thought)

    assert count("user", "<think>") == 0
    assert count("assistant", "<think>\nwell\n</think>\n\nyes") == 1


def test_tools_and_template_arguments_write_no_tokens_either(smollm: Tokenizer) -> None:
    tokenizer = chat_tokenizer(QWEN3)
    [end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    turn = [{"role": "user", "content": "hi"}]

    def count(description: str) -> int:
        function = {"name": "f", "description": description, "parameters": {}}
        rendered = tokenizer.render_chat(turn, tools=[{"type": "function", "function": function}])
        return tokenizer.encode_chat(rendered).count(end)

    assert count("<|im_end|>") == count("none")


def test_a_template_that_escapes_what_is_not_ascii_shows_no_mark() -> None:
    def rendering(messages: list[dict[str, Any]], **_: Any) -> str:
        return json.dumps(messages)

    tokenizer = Tokenizer(tiny_hf(), apply_chat_template=rendering)
    rendered = tokenizer.render_chat([{"role": "user", "content": "a <s> b"}])
    assert "fdd0" not in rendered
    assert BOS not in tokenizer.encode_chat(rendered)


def test_the_rest_of_a_broken_name_gets_no_space_of_sentencepiece() -> None:
    # As in Llama 2's tokenizer.json: a text begins with the mark of a space, and bytes stand in
    # for what is no word.
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    fast = FastTokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    fast.add_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=fast, chat_template="{{ messages[0].content }}"
    )
    tokenizer = Tokenizer(hf)
    ids = tokenizer.encode_chat(tokenizer.render_chat([{"role": "user", "content": "</s>"}]))
    assert ids == [3, *(4 + byte for byte in b"</s>")]
