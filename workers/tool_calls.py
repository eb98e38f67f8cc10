"""Tool calls in a model's answer: found, read, and demanded by a grammar.

The one module that knows mlx-lm's tool parsers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from queue_service import constraints
from queue_service.errors import RequestError
from queue_service.json_text import load_json, replace_surrogates
from workers.markers import SPACES, num_certain

# A parser is a program run on whatever the model wrote: the ways in which one fails.
_PARSER_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)

_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class ToolSet:
    """The tools of one request.

    Args:
        tools: in OpenAI's form, as a checked request has them: each with a name of its own.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._schemas: dict[str, Mapping[str, Any]] = {
            function["name"]: function.get("parameters") or _NO_ARGUMENTS for function in functions
        }
        self.for_parser = [
            {"type": "function", "function": {"name": name, "parameters": _plain_schema(schema)}}
            for name, schema in self._schemas.items()
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the tools' names in the request's order."""
        return tuple(self._schemas)

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of a tool's arguments; LookupError for an unknown name."""
        return self._schemas[name]


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the model wrote it.

    Attributes:
        arguments: a JSON object.
        own_id: the id that the model gave it, None in most formats.
        misfit: what of the arguments is not of the type the tool declares, None when all is.
    """

    name: str
    arguments: Mapping[str, Any]
    own_id: str | None = None
    misfit: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        name: of mlx-lm's parser.
        start: the marker that opens a block of calls, not empty.
        end: the marker that closes it; "" when a block goes on to the end of the answer.
    """

    name: str
    start: str
    end: str
    _parse: Callable[[str, Any], Any] = field(repr=False)
    _shape: _Shape | None = field(default=None, repr=False)

    @property
    def is_enforceable(self) -> bool:
        """Return whether `tool_grammar` can demand a call."""
        return self._shape is not None

    def parse(self, text: str, tools: ToolSet) -> list[Call]:
        """Return the calls in the text between the markers, at least one.

        Arguments that a parser left as text, or turned into a number, become what the tool's
        schema declares when they fit it then.

        Raises:
            ValueError: the text is no call, or any call in it names an unknown tool.
        """
        try:
            parsed = self._parse(text, tools.for_parser)
            calls = [_call(item, tools) for item in _as_list(parsed)]
        except _PARSER_FAILURES as exc:
            raise ValueError(f"not a tool call: {str(exc) or type(exc).__name__}") from exc
        if not calls:
            raise ValueError("not a tool call: the block is empty")
        return calls

    def call_id(self, job_id: str, choice: int, index: int) -> str:
        """Return the id of a call, the same whenever the job runs."""
        key = f"{job_id}\0{choice}\0{index}".encode()
        digits = hashlib.blake2b(key, digest_size=12).hexdigest()
        # Mistral's templates refuse a history with any other id than 9 letters and digits.
        return digits[:9] if self.name == "mistral" else f"call_{digits}"


def find_tool_format(
    chat_template: str | None,
    vocabulary: Mapping[str, int],
    *,
    parser: str | None = None,
) -> ToolFormat | None:
    """Return the format that mlx-lm infers, None for a model that calls no tools it knows of.

    Args:
        vocabulary: every token with its id.
        parser: ``tool_parser_type`` of the model's tokenizer_config; it decides when given.

    Raises:
        ImportError: mlx-lm has no such parser.
    """
    # Not at the top: it imports MLX, which must find the BLAS that the worker chooses first.
    from mlx_lm import tokenizer_utils

    # mlx-lm exports no function for this.
    infer: Callable[[Any], str | None] = tokenizer_utils._infer_tool_parser
    name = parser or infer(_Inferred(chat_template, vocabulary))
    if name is None:
        return None
    module = import_module(f"mlx_lm.tool_parsers.{name}")
    shape = _SHAPES.get(name)
    if name == "mistral" and ("[ARGS]" in (chat_template or "") or "[ARGS]" in vocabulary):
        shape = _MISTRAL_HEADER
    return ToolFormat(
        name, module.tool_call_start, module.tool_call_end, module.parse_tool_call, shape
    )


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer that became certain, never empty.

    Attributes:
        is_unparsable: it is a whole block, markers included, that is no call of a known tool.
    """

    text: str
    is_unparsable: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made.

    Attributes:
        index: counts the calls of one answer from 0.
        arguments_json: a JSON object; valid UTF-8 and no NaN.
        misfit: see `Call`. A client checks arguments anyway, so the call stands.
    """

    index: int
    id: str
    name: str
    arguments_json: str
    misfit: str | None = None


Piece = Text | ToolCall


class ToolCallSplitter:
    """Splits one answer into text and tool calls, however it comes in pieces.

    A call comes out whole when its block closes. A block in which anything is no call of a known
    tool comes out as text, so that nothing is lost. Spaces and line breaks around blocks of calls
    are dropped; an answer without calls stays as it is.

    Args:
        choice: the index of the answer among the request's choices.

    Attributes:
        num_calls: calls returned so far.
    """

    def __init__(self, format: ToolFormat, tools: ToolSet, *, job_id: str, choice: int = 0) -> None:
        self.num_calls = 0
        self._format = format
        self._tools = tools
        self._job_id = job_id
        self._choice = choice
        self._ids: set[str] = set()
        self._held = ""
        self._spaces = ""  # before what comes next: dropped when that is a call
        self._is_after_call = False
        self._block: list[str] | None = None  # None outside a block

    def push(self, text: str) -> list[Piece]:
        """Take more text and return what became certain, nothing inside a block."""
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """End the answer and return what was held back.

        Args:
            is_cut: the answer was ended from outside, at its limit or a stop string: a block that
                is still open may lack a part, and is text unless the format never closes one.
        """
        held, self._held = self._held, ""
        pieces: list[Piece] = []
        if self._block is None:
            self._add_text(self._take_spaces() + held, pieces)
        else:
            self._block.append(held)
            self._close("", pieces, is_call=not is_cut or not self._format.end)
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take what can be taken inside or outside of a block; return whether that changed."""
        is_inside = self._block is not None
        marker = self._format.end if is_inside else self._format.start
        start = self._held.find(marker) if marker else -1
        end = start if start >= 0 else num_certain(self._held, (marker,))
        certain = self._held[:end]
        self._held = self._held[end + (len(marker) if start >= 0 else 0) :]
        if self._block is not None:
            self._block.append(certain)
            if start >= 0:
                self._close(marker, pieces)
        else:
            self._take_text(certain, pieces)
            if start >= 0:
                self._block = []
        return start >= 0

    def _take_text(self, text: str, pieces: list[Piece]) -> None:
        text = self._take_spaces() + text
        body = text.rstrip(SPACES)
        self._spaces = text[len(body) :]
        self._add_text(body, pieces)

    def _take_spaces(self) -> str:
        spaces, self._spaces = self._spaces, ""
        return spaces

    def _close(self, end: str, pieces: list[Piece], *, is_call: bool = True) -> None:
        block = "".join(self._block or ())
        self._block = None
        try:
            calls = self._format.parse(block, self._tools) if is_call else []
        except ValueError:
            calls = []
        if calls:
            self._spaces = ""
            self._is_after_call = True
            pieces.extend(self._numbered(call) for call in calls)
        else:
            self._add_text(self._take_spaces(), pieces)
            self._is_after_call = False
            pieces.append(Text(self._format.start + block + end, is_unparsable=True))

    def _numbered(self, call: Call) -> ToolCall:
        index = self.num_calls
        self.num_calls += 1
        call_id = call.own_id
        if call_id is None or call_id in self._ids:
            call_id = self._format.call_id(self._job_id, self._choice, index)
        self._ids.add(call_id)
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        return ToolCall(index, call_id, call.name, arguments, call.misfit)

    def _add_text(self, text: str, pieces: list[Piece]) -> None:
        if self._is_after_call:
            text = text.lstrip(SPACES)
        if text:
            self._is_after_call = False
            pieces.append(Text(text))


# Reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Inferred:
    """What mlx-lm's inference reads of a tokenizer."""

    chat_template: str | None
    vocabulary: Mapping[str, int]

    def get_vocab(self) -> Mapping[str, int]:
        return self.vocabulary


def _plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with nothing where the parsers do not look for surprises."""
    properties = _mapping(schema, "properties")
    return {**schema, "properties": {k: v for k, v in properties.items() if isinstance(v, Mapping)}}


def _as_list(parsed: Any) -> list[Any]:
    return parsed if isinstance(parsed, list) else [parsed]


def _call(item: Any, tools: ToolSet) -> Call:
    name, arguments, own_id = item["name"], item.get("arguments"), item.get("id")
    if isinstance(arguments, str) and arguments:
        arguments = load_json(arguments)
    if arguments in (None, ""):
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    schema = tools.schema(name)
    arguments = _fitted(arguments, _mapping(schema, "properties"))
    # Once through JSON: what is no JSON is refused, and the same text is always the same value.
    text = json.dumps(replace_surrogates(arguments), ensure_ascii=False, allow_nan=False)
    arguments = json.loads(text)
    own_id = own_id if isinstance(own_id, str) and own_id else None
    return Call(name, arguments, own_id, _misfit(arguments, schema, "arguments"))


def _fitted(arguments: Mapping[Any, Any], properties: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the arguments, with values of a wrong type as the right one where that fits."""
    fitted = dict(arguments)
    for key, value in arguments.items():
        schema = properties.get(key)
        if _misfit(value, schema, key) is None:
            continue
        try:
            other = load_json(value) if isinstance(value, str) else json.dumps(value)
        except (TypeError, ValueError):
            continue
        if _misfit(other, schema, key) is None:
            fitted[key] = other
    return fitted


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "array": lambda value: isinstance(value, list | tuple),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == value // 1,
    "null": lambda value: value is None,
    "number": _is_number,
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}


def _misfit(value: Any, schema: Any, path: str) -> str | None:
    """Return what is not of the declared type, None when all is; the first thing only.

    Types alone, in a time bounded by the sizes of value and schema: no pattern, which could take
    for ever, and no reference, which could multiply. What is not understood fits.
    """
    if not isinstance(schema, Mapping):
        return None
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if isinstance(types, list) and not any(_is_of(value, name) for name in types):
        return f"{path} is not of type {' or '.join(map(str, types))}"
    if isinstance(choices := schema.get("enum"), list) and value not in choices:
        return f"{path} is none of the values allowed"
    if "const" in schema and value != schema["const"]:
        return f"{path} is not the value allowed"
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            misfits = [_misfit(value, branch, path) for branch in branches]
            if None not in misfits:
                return misfits[0]
    return _misfit_inside(value, schema, path)


def _misfit_inside(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    if isinstance(value, dict):
        required = schema.get("required")
        for key in required if isinstance(required, list) else ():
            if key not in value:
                return f"{path}.{key} is missing"
        properties = _mapping(schema, "properties")
        items = [(f"{path}.{key}", item, properties.get(key)) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{i}]", item, schema.get("items")) for i, item in enumerate(value)]
    else:
        return None
    for inner_path, item, inner in items:
        misfit = _misfit(item, inner, inner_path)
        if misfit is not None:
            return misfit
    return None


def _is_of(value: Any, type_name: Any) -> bool:
    check = _TYPES.get(type_name) if isinstance(type_name, str) else None
    return check is None or check(value)


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


# Demanding -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One argument in a format that writes each by itself; string values as they are."""

    before: str
    gap: str  # between the value and the closing tag
    end: str
    after: str


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a format writes calls. ``@name``, ``@key``, ``@index`` stand for what differs.

    Attributes:
        opening: before the first call.
        between: before every other call.
        head: of a call; its arguments follow, as a JSON object or one `_Parameter` each.
        tail: of a call, after its arguments.
        closing: after the last call.
    """

    head: str
    tail: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    parameter: _Parameter | None = None


_MISTRAL_LIST = _Shape(
    opening="[TOOL_CALLS][",
    head='{"name": "@name", "arguments": ',
    tail="}",
    between=", ",
    closing="]",
)
_MISTRAL_HEADER = _Shape(head="[TOOL_CALLS]@name[ARGS]", tail="")

_GLM = _Shape(
    head="<tool_call>@name\n",
    parameter=_Parameter(
        "<arg_key>@key</arg_key>\n<arg_value>", gap="", end="</arg_value>", after="\n"
    ),
    tail="</tool_call>",
    between="\n",
)

_SHAPES: Mapping[str, _Shape] = {
    "glm47": _GLM,
    "json_tools": _Shape(
        head='<tool_call>\n{"name": "@name", "arguments": ',
        tail="}\n</tool_call>",
        between="\n",
    ),
    "kimi_k2": _Shape(
        opening="<|tool_calls_section_begin|>",
        head="<|tool_call_begin|>functions.@name:@index<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
    "kimi_k3": _Shape(
        opening="<|open|>tools<|sep|>",
        head='<|open|>call tool="@name" index="@index"<|sep|><|open|>json type="object"<|sep|>',
        tail="<|close|>json<|sep|><|close|>call<|sep|>",
        closing="<|close|>tools<|sep|>",
    ),
    "laguna": _GLM,
    "longcat": _Shape(
        head="<longcat_tool_call>@name\n",
        parameter=_Parameter(
            "<longcat_arg_key>@key</longcat_arg_key>\n<longcat_arg_value>",
            gap="",
            end="</longcat_arg_value>",
            after="\n",
        ),
        tail="</longcat_tool_call>",
        between="\n",
    ),
    "minicpm5": _Shape(
        head='<function name="@name">',
        parameter=_Parameter('<param name="@key">', gap="", end="</param>", after=""),
        tail="</function>",
        between="\n",
    ),
    "minimax_m2": _Shape(
        opening="<minimax:tool_call>\n",
        head='<invoke name="@name">\n',
        parameter=_Parameter('<parameter name="@key">', gap="", end="</parameter>", after="\n"),
        tail="</invoke>\n",
        closing="</minimax:tool_call>",
    ),
    "mistral": _MISTRAL_LIST,
    "qwen3_coder": _Shape(
        head="<tool_call>\n<function=@name>\n",
        parameter=_Parameter("<parameter=@key>\n", gap="\n", end="</parameter>", after="\n"),
        tail="</function>\n</tool_call>",
        between="\n",
    ),
}

# Models write line breaks after their reasoning.
_LEAD = '("\\n" | "\\n\\n")?'
# One way to write a value: loose JSON lets a model write spaces without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_JSON_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object"})
_ANY_TEXT = "/(.|\\n)*/"
_PARTS = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\]|@index)")


def tool_grammar(
    format: ToolFormat,
    tools: ToolSet,
    choice_name: str | None,
    *,
    parallel: bool,
    tokens: Mapping[str, int],
) -> str | None:
    """Return a grammar whose every text is one call, or more where ``parallel``.

    The text is Lark as llguidance reads it. It describes the answer after any reasoning. Where a
    format writes each argument by itself, they come in the order of the schema.

    Args:
        choice_name: the one tool to call, None for any.
        tokens: the model's added tokens with their ids: a marker that is one of them can be
            written in no other way.

    Returns:
        None when the format cannot be demanded.

    Raises:
        RequestError: the arguments of a tool have a schema that cannot be enforced.
        LookupError: ``choice_name`` is none of the tools.
        ValueError: there are no tools.
    """
    names = tools.names if choice_name is None else (choice_name,)
    if not names:
        raise ValueError("there is no tool to call")
    if format._shape is None:
        return None
    schemas = {name: _enforceable(name, tools.schema(name)) for name in names}
    return _GrammarWriter(format._shape, tokens).write(schemas, parallel=parallel)


class _GrammarWriter:
    def __init__(self, shape: _Shape, tokens: Mapping[str, int]) -> None:
        self._shape = shape
        self._tokens = tokens
        self._rules: list[str] = []

    def write(self, schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> str:
        """Return the grammar of calls of the tools named, with arguments of these schemas."""
        shape = self._shape
        calls = [self._rule("call", self._call(name, schemas[name])) for name in schemas]
        call = self._rule("any", " | ".join(calls))
        more = f"({self._terms(shape.between)} {call})*" if parallel else ""
        start = (_LEAD, self._terms(shape.opening), call, more, self._terms(shape.closing))
        return "\n".join([f"start: {_sequence(*start)}", *self._rules, ""])

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        shape = self._shape
        if shape.parameter is None:
            arguments = _json_rule(schema)
        else:
            arguments = self._parameters(shape.parameter, schema)
        return _sequence(
            self._terms(shape.head, name=name),
            arguments and self._rule("arguments", arguments),
            self._terms(shape.tail),
        )

    def _parameters(self, parameter: _Parameter, schema: Mapping[str, Any]) -> str:
        required = schema.get("required")
        terms = []
        for key, inner in _mapping(schema, "properties").items():
            term = self._rule("parameter", self._parameter(parameter, key, inner, schema))
            is_required = isinstance(required, list) and key in required
            terms.append(term if is_required else f"{term}?")
        return _sequence(*terms)

    def _parameter(
        self, parameter: _Parameter, key: str, schema: Any, root: Mapping[str, Any]
    ) -> str:
        schema = _resolved(schema, root)
        closed = self._terms(parameter.gap + parameter.end + parameter.after)
        choices = schema.get("enum")
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            value = f"({' | '.join(_literal(choice) for choice in choices)})"
        elif schema.get("type") in _JSON_TYPES:
            value = self._rule("value", _json_rule({**_definitions(root), **schema}))
        elif parameter.end in self._tokens:
            value = self._rule("text", _ANY_TEXT)
        else:  # its end is text too: the first one ends it, as it does for the parser
            value = self._rule("text", _ANY_TEXT, f"[suffix={_literal(parameter.end)}]")
            closed = self._terms(parameter.after)
        return _sequence(self._terms(parameter.before, key=key), value, closed)

    def _rule(self, kind: str, body: str, options: str = "") -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _terms(self, text: str, *, name: str = "", key: str = "") -> str:
        terms = []
        for part in _PARTS.split(text):
            if part in self._tokens:
                terms.append(f"<[{self._tokens[part]}]>")
            elif part == "@index":
                terms.append("/[0-9]{1,3}/")
            elif part:
                terms.append(_literal(part.replace("@name", name).replace("@key", key)))
        return " ".join(terms)


def _enforceable(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema as it is enforced; RequestError when it cannot be."""
    try:
        source = constraints.json_schema({"type": "object", **schema}).source
    except RequestError as exc:
        raise RequestError(
            f"'tool_choice' cannot be enforced: the parameters of {name}: {exc}",
            code=exc.code,
            param="tools",
        ) from exc
    enforced: Mapping[str, Any] = json.loads(source)
    return enforced


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a schema that refers to a definition leads to, others as they are."""
    if isinstance(schema, Mapping) and isinstance(target := schema.get("$ref"), str):
        _, _, path = target.partition("#/")
        keyword, _, name = path.partition("/")
        schema = _mapping(_definitions(root), keyword).get(name, schema)
    return schema if isinstance(schema, Mapping) else {}


def _sequence(*terms: str) -> str:
    return " ".join(term for term in terms if term)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_STYLE}, ensure_ascii=False)
