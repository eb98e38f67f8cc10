from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import tool_parsers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from queue_service.errors import RequestError
from workers.tool_calls import (
    Piece,
    Text,
    ToolCall,
    ToolCallSplitter,
    ToolFormat,
    ToolSet,
    find_tool_format,
    tool_grammar,
)

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = ToolSet([tool("get_weather", WEATHER), tool("now")])


def format_of(parser: str) -> ToolFormat:
    found = find_tool_format(None, {}, parser=parser)
    assert found is not None
    return found


HERMES = format_of("json_tools")


def hermes(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def splitter(format: ToolFormat = HERMES, tools: ToolSet = TOOLS) -> ToolCallSplitter:
    return ToolCallSplitter(format, tools, job_id="job-1")


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    result: list[Piece] = []
    for piece in pieces:
        match (result[-1] if result else None, piece):
            case (Text(before, flag), Text(text, same)) if flag is same:
                result[-1] = Text(before + text, flag)
            case _:
                result.append(piece)
    return result


def split(target: ToolCallSplitter, text: str, cuts: Sequence[int] = ()) -> list[Piece]:
    pieces: list[Piece] = []
    for start, end in pairwise([0, *cuts, len(text)]):
        pieces += target.push(text[start:end])
    return merged(pieces + target.finish())


def short(pieces: Sequence[Piece]) -> list[str | tuple[str, Any]]:
    return [
        piece.text if isinstance(piece, Text) else (piece.name, json.loads(piece.arguments_json))
        for piece in pieces
    ]


# --- formats ---

PARIS = {"city": "Zürich 🌧", "days": 3}

# What each model writes for get_weather(**PARIS) and, where its blocks hold several, now().
SAMPLES = {
    "function_gemma": (
        "<start_function_call>call:get_weather{city:<escape>Zürich 🌧<escape>,days:3}"
        "<end_function_call>",
        1,
    ),
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Zürich 🌧<|"|>,days:3}call:now{}<tool_call|>',
        2,
    ),
    "glm47": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich 🌧</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        1,
    ),
    "json_tools": (hermes("get_weather", PARIS), 1),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Zürich 🌧", "days": 3}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        2,
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Zürich 🌧<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        2,
    ),
    "laguna": (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich 🌧</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        1,
    ),
    "longcat": (
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Zürich 🌧</longcat_arg_value>\n"
        "<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
        1,
    ),
    "minicpm5": (
        '<function name="get_weather"><param name="city"><![CDATA[Zürich 🌧]]></param>'
        '<param name="days">3</param></function>',
        1,
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Zürich 🌧</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        2,
    ),
    "mistral": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich 🌧", "days": 3}[TOOL_CALLS]now[ARGS]{}',
        2,
    ),
    "muse_spark": (
        '<atem:function_calls><atem:invoke name="get_weather">'
        '<atem:parameter name="city">Zürich 🌧</atem:parameter>'
        '<atem:parameter name="days">3</atem:parameter></atem:invoke>'
        '<atem:invoke name="now"></atem:invoke></atem:function_calls>',
        2,
    ),
    "pythonic": (
        '<|tool_call_start|>[get_weather(city="Zürich 🌧", days=3), now()]<|tool_call_end|>',
        2,
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich 🌧\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        1,
    ),
}


def test_every_parser_of_mlx_lm_has_a_sample() -> None:
    assert {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)} == set(SAMPLES)


@pytest.mark.parametrize("parser", SAMPLES)
def test_what_each_model_writes_becomes_calls_wherever_it_is_cut(parser: str) -> None:
    sample, num_calls = SAMPLES[parser]
    text = f"Let me look.\n{sample}"
    expected = ["Let me look.", ("get_weather", PARIS), ("now", {})][: num_calls + 1]
    whole = split(splitter(format_of(parser)), text)
    assert short(whole) == expected
    assert [piece.misfit for piece in whole if isinstance(piece, ToolCall)] == [None] * num_calls
    for cut in range(len(text)):
        assert split(splitter(format_of(parser)), text, [cut]) == whole
    assert split(splitter(format_of(parser)), text, range(len(text))) == whole


@pytest.mark.parametrize("parser", SAMPLES)
def test_a_block_that_is_no_call_comes_out_as_the_text_it_was(parser: str) -> None:
    format = format_of(parser)
    block = f"{format.start} no call {format.end}"
    assert split(splitter(format), f"a {block}") == [Text("a "), Text(block, is_unparsable=True)]


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("<tool_call>{{ tool_call.name }}</tool_call>", "json_tools"),
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("plain", None),
        (None, None),
    ],
)
def test_the_template_tells_the_format(template: str | None, parser: str | None) -> None:
    found = find_tool_format(template, {})
    assert (found.name if found else None) == parser


def test_the_vocabulary_tells_the_format_where_the_template_does_not() -> None:
    found = find_tool_format("plain", {"<|tool_call_start|>": 1, "<|tool_call_end|>": 2})
    assert found is not None
    assert found.name == "pythonic"


def test_a_parser_that_mlx_lm_lacks_is_an_error() -> None:
    with pytest.raises(ImportError):
        find_tool_format("", {}, parser="nonesuch")


# --- text around calls ---


@pytest.mark.parametrize(
    "text",
    ["", "Hello", " \nHello\n ", "a < b", "<tool_cal", "\n", "</tool_call>", "<tool_calls> x"],
)
def test_an_answer_without_calls_stays_as_it_is(text: str) -> None:
    for cut in range(len(text) + 1):
        assert split(splitter(), text, [cut]) == ([Text(text)] if text else [])


def test_calls_and_text_keep_their_order_and_lose_the_spaces_between() -> None:
    text = f"One\n\n{hermes('now', {})}\n{hermes('get_weather', PARIS)}\n\nTwo \n"
    assert short(split(splitter(), text)) == ["One", ("now", {}), ("get_weather", PARIS), "Two \n"]
    assert short(split(splitter(), f"\n{hermes('now', {})}\n")) == [("now", {})]


def test_text_is_held_only_while_it_may_begin_a_marker() -> None:
    target = splitter()
    assert target.push("a <too") == [Text("a")]
    assert target.push("l") == []
    assert target.push("x ") == [Text(" <toolx")]
    assert target.push("y") == [Text(" y")]


def test_an_unparsable_block_keeps_the_spaces_around_it() -> None:
    bad = "<tool_call>{oops</tool_call>"
    assert split(splitter(), f"a\n{bad}\nb") == [
        Text("a\n"),
        Text(bad, is_unparsable=True),
        Text("\nb"),
    ]


def test_an_unknown_tool_is_text_and_its_neighbours_are_calls() -> None:
    unknown = hermes("rm_rf", {})
    assert short(split(splitter(), hermes("now", {}) + unknown + hermes("now", {}))) == [
        ("now", {}),
        unknown,
        ("now", {}),
    ]


# --- the end of the answer ---


def test_a_block_that_the_model_left_open_is_a_call_when_it_is_whole() -> None:
    target = splitter()
    target.push(hermes("now", {}).removesuffix("</tool_call>"))
    assert short(target.finish()) == [("now", {})]


@pytest.mark.parametrize("parser", [parser for parser in SAMPLES if parser != "mistral"])
def test_a_block_that_was_cut_is_text(parser: str) -> None:
    sample, _ = SAMPLES[parser]
    cut = sample.removesuffix(format_of(parser).end)
    target = splitter(format_of(parser))
    target.push(cut)
    assert target.finish(is_cut=True) == [Text(cut, is_unparsable=True)]


def test_a_format_that_closes_no_block_shows_itself_whether_it_is_whole() -> None:
    target = splitter(format_of("mistral"))
    target.push('[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{"a": ')
    assert merged(target.finish(is_cut=True)) == [
        Text('[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{"a": ', is_unparsable=True)
    ]
    target = splitter(format_of("mistral"))
    target.push('[TOOL_CALLS] [{"name": "now", "arguments": {}}]')
    assert short(target.finish(is_cut=True)) == [("now", {})]


# --- ids ---


def test_ids_are_the_same_whenever_the_job_runs_and_differ_between_calls() -> None:
    text = hermes("now", {}) * 2
    first, second = split(splitter(), text)
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert [first, second] == split(splitter(), text)
    assert (first.index, second.index) == (0, 1)
    assert re.fullmatch(r"call_[0-9a-f]{24}", first.id)
    other = ToolCallSplitter(HERMES, TOOLS, job_id="job-1", choice=1).push(text)
    assert len({call.id for call in (first, second, *other) if isinstance(call, ToolCall)}) == 4


def test_mistral_gets_ids_that_its_templates_take() -> None:
    (call,) = split(splitter(format_of("mistral")), "[TOOL_CALLS]now[ARGS]{}")
    assert isinstance(call, ToolCall)
    assert re.fullmatch(r"[0-9a-z]{9}", call.id)


def test_an_id_that_the_model_wrote_is_kept_unless_it_comes_twice() -> None:
    entry = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{entry * 2}<|tool_calls_section_end|>"
    first, second = split(splitter(format_of("kimi_k2")), text)
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert first.id == "functions.now:0"
    assert second.id.startswith("call_")


# --- arguments ---


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"city": "Rome"}, {"city": "Rome"}),
        ({"city": 12345}, {"city": "12345"}),
        ({"city": "1", "days": "3"}, {"city": "1", "days": 3}),
        ({"city": "a", "tags": '["x", "y"]'}, {"city": "a", "tags": ["x", "y"]}),
        ({"city": "a", "extra": 1}, {"city": "a", "extra": 1}),
        ('{"city": "a"}', {"city": "a"}),
        ({"city": "\ud83d"}, {"city": "\ufffd"}),
    ],
)
def test_arguments_become_what_the_schema_declares_where_they_fit(written: Any, read: Any) -> None:
    (call,) = HERMES.parse(json.dumps({"name": "get_weather", "arguments": written}), TOOLS)
    assert call.arguments == read
    assert call.misfit is None


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_missing_arguments_are_an_empty_object(arguments: Any) -> None:
    (call,) = HERMES.parse(json.dumps({"name": "now", "arguments": arguments}), TOOLS)
    assert call.arguments == {}


@pytest.mark.parametrize(
    ("schema", "arguments", "misfit"),
    [
        (WEATHER, {}, "arguments.city is missing"),
        (WEATHER, {"city": "a", "days": "soon"}, "arguments.days is not of type integer"),
        (WEATHER, {"city": "a", "days": True}, "arguments.days is not of type integer"),
        (WEATHER, {"city": "a", "tags": ["x", 1]}, "arguments.tags[1] is not of type string"),
        ({"properties": {"u": {"enum": ["C", "F"]}}}, {"u": "K"}, "none of the values"),
        ({"properties": {"u": {"const": 1}}}, {"u": 2}, "not the value"),
        (
            {"properties": {"u": {"anyOf": [{"type": "null"}, {"type": "object"}]}}},
            {"u": 2},
            "arguments.u is not of type null",
        ),
        ({"properties": {"u": {"type": ["integer", "null"]}}}, {"u": None}, None),
        ({"properties": {"u": {"type": "whatever"}, "v": True}}, {"u": 1, "v": 2}, None),
        ({"properties": 5, "required": 7, "type": {}}, {"u": 1}, None),
    ],
)
def test_arguments_of_a_wrong_type_are_told_and_the_call_stands(
    schema: dict[str, Any], arguments: dict[str, Any], misfit: str | None
) -> None:
    tools = ToolSet([tool("f", schema)])
    (call,) = HERMES.parse(json.dumps({"name": "f", "arguments": arguments}), tools)
    assert call.arguments == arguments
    assert (call.misfit is None) is (misfit is None)
    assert (misfit or "") in (call.misfit or "")


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "null",
        "[]",
        "[1]",
        '{"arguments": {}}',
        '{"name": ["now"], "arguments": {}}',
        '{"name": "now", "arguments": [1]}',
        '{"name": "now", "arguments": "text"}',
        '{"name": "now", "arguments": {"a": NaN}}',
        '{"name": "now", "arguments": {"a": 1e999}}',
        '{"name": "now", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}",
        "[" * 200_000,
    ],
)
def test_what_is_no_call_of_a_tool_is_a_value_error(payload: str) -> None:
    with pytest.raises(ValueError, match="not a tool call"):
        HERMES.parse(payload, TOOLS)


TEXTS = st.lists(
    st.sampled_from(
        [
            hermes("now", {}),
            hermes("nope", {}),
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "_call>",
            '{"name": "now"}',
            " ",
            "\n",
            "a<",
            "é😀",
        ]
    ),
    max_size=10,
).map("".join)


@settings(max_examples=200)
@given(text=TEXTS, data=st.data())
def test_pieces_joined_are_the_split_of_the_whole_text(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    assert split(splitter(), text, cuts) == split(splitter(), text)


# --- grammars ---

ENFORCEABLE = sorted(parser for parser in SAMPLES if format_of(parser).is_enforceable)
MARKERS = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
MISTRAL_TEMPLATE = "[TOOL_CALLS]{{ name }}[ARGS]"


def tokenizer(added: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of bytes and the tokens named, some of them special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    result = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken("<|eos|>", special=True)])
    result.add_tokens(
        [AddedToken(text, special=i % 2 == 0, normalized=False) for i, text in enumerate(added)]
    )
    return result


class Acceptor:
    """Tells which texts a grammar takes, with markers as tokens or as text."""

    def __init__(self, grammar: str, added: Sequence[str]) -> None:
        llguidance = pytest.importorskip("llguidance")
        self._tokenizer = tokenizer(added)
        eos = self._tokenizer.token_to_id("<|eos|>")
        self._matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer(self._tokenizer.to_str(), eos_token=eos),
            llguidance.grammar_from("lark", grammar),
        )
        assert not self._matcher.is_error(), self._matcher.get_error()

    def takes(self, text: str) -> bool:
        ids = self._tokenizer.encode(text).ids
        self._matcher.reset()
        is_prefix = self._matcher.try_consume_tokens(ids) == len(ids)
        return is_prefix and bool(self._matcher.is_accepting())


def grammar_for(
    format: ToolFormat,
    added: Sequence[str] = (),
    *,
    tools: ToolSet = TOOLS,
    name: str | None = None,
    parallel: bool = False,
) -> Acceptor:
    vocabulary = tokenizer(added).get_vocab()
    tokens = {text: vocabulary[text] for text in added}
    grammar = tool_grammar(format, tools, name, parallel=parallel, tokens=tokens)
    assert grammar is not None
    return Acceptor(grammar, added)


def written(parser: str) -> str:
    """Return the sample in the one way that the grammar allows."""
    if parser == "kimi_k3":
        return (
            '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
            '<|open|>json type="object"<|sep|>{"city": "Zürich 🌧", "days": 3}'
            "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
        )
    text, _ = SAMPLES[parser]
    if parser == "laguna":
        return SAMPLES["glm47"][0]
    if parser == "mistral":
        return text.removesuffix("[TOOL_CALLS]now[ARGS]{}")
    text = text.replace(
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>", ""
    )
    return text.replace('<invoke name="now">\n</invoke>\n', "")


def formats() -> Iterator[tuple[ToolFormat, str]]:
    for parser in ENFORCEABLE:
        template = MISTRAL_TEMPLATE if parser == "mistral" else None
        found = find_tool_format(template, {}, parser=parser)
        assert found is not None
        yield found, written(parser)


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize(("format", "text"), list(formats()), ids=ENFORCEABLE)
def test_a_grammar_takes_a_right_call_and_no_other_tool(
    format: ToolFormat, text: str, as_tokens: bool
) -> None:
    assert short(split(splitter(format), text)) == [("get_weather", PARIS)]
    added = sorted(set(MARKERS.findall(text))) if as_tokens else []
    added = [marker for marker in added if "function=" not in marker and "param" not in marker]
    acceptor = grammar_for(format, added)
    assert acceptor.takes(text)
    assert acceptor.takes(f"\n\n{text}")
    assert not acceptor.takes(text.replace("get_weather", "get_whether"))
    assert not acceptor.takes("Hello")
    assert not acceptor.takes("")
    assert not acceptor.takes(text[:-1])
    assert not grammar_for(format, added, name="now").takes(text)
    assert grammar_for(format, added, name="get_weather").takes(text)


def test_a_grammar_takes_several_calls_only_where_they_may_be_parallel() -> None:
    text = hermes("now", {}) + "\n" + hermes("get_weather", PARIS)
    assert grammar_for(HERMES, parallel=True).takes(text)
    assert not grammar_for(HERMES, parallel=False).takes(text)
    mistral = format_of("mistral")
    calls = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    assert len(split(splitter(mistral), calls)) == 2
    assert grammar_for(mistral, ["[TOOL_CALLS]"], parallel=True).takes(calls)


@pytest.mark.parametrize(
    ("arguments", "is_taken"),
    [
        ({"city": "a", "days": 1, "tags": ["x"]}, True),
        ({"days": 1}, False),
        ({"city": 1}, False),
        ({"city": "a", "days": "1"}, False),
    ],
)
def test_a_grammar_takes_only_arguments_of_the_schema(arguments: Any, is_taken: bool) -> None:
    assert grammar_for(HERMES).takes(hermes("get_weather", arguments)) is is_taken


TAGGED = {
    "type": "object",
    "properties": {
        "unit": {"$ref": "#/$defs/Unit"},
        "flag": {"type": "boolean"},
        "where": {"$ref": "#/$defs/Place"},
        "note": {},
    },
    "required": ["unit", "note"],
    "$defs": {
        "Unit": {"enum": ["C", "F"]},
        "Place": {"type": "object", "properties": {"lat": {"type": "number"}}},
    },
}


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ([("unit", "C"), ("note", "a\n</x> b")], {"unit": "C", "note": "a\n</x> b"}),
        (
            [("unit", "F"), ("flag", "true"), ("where", '{"lat": 1.5}'), ("note", "n")],
            {"unit": "F", "flag": True, "where": {"lat": 1.5}, "note": "n"},
        ),
        ([("unit", "K"), ("note", "n")], None),
        ([("note", "n")], None),
        ([("unit", "C"), ("flag", "maybe"), ("note", "n")], None),
    ],
)
def test_arguments_written_one_by_one_have_their_types(
    parameters: list[tuple[str, str]], arguments: dict[str, Any] | None
) -> None:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    tools, format = ToolSet([tool("f", TAGGED)]), format_of("qwen3_coder")
    assert grammar_for(format, tools=tools).takes(text) is (arguments is not None)
    if arguments is not None:
        assert short(split(splitter(format, tools), text)) == [("f", arguments)]


def test_a_format_that_cannot_be_demanded_has_no_grammar() -> None:
    others = set(SAMPLES) - set(ENFORCEABLE)
    assert others == {"function_gemma", "gemma4", "muse_spark", "pythonic"}
    for parser in others:
        assert tool_grammar(format_of(parser), TOOLS, None, parallel=True, tokens={}) is None


def test_a_schema_that_cannot_be_enforced_is_refused_by_the_tools_name() -> None:
    tools = ToolSet([tool("f", {"type": "object", "not": {}})])
    with pytest.raises(RequestError, match=r"parameters of f: .*'not'"):
        tool_grammar(HERMES, tools, None, parallel=True, tokens={})


def test_a_grammar_without_its_tool_is_an_error() -> None:
    with pytest.raises(LookupError):
        tool_grammar(HERMES, TOOLS, "nope", parallel=True, tokens={})
    with pytest.raises(ValueError, match="no tool"):
        tool_grammar(HERMES, ToolSet([]), None, parallel=True, tokens={})
