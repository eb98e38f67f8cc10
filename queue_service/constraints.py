"""What an answer's text must be: JSON, JSON of a schema, a regex, a choice or a grammar.

A constraint holds everything that a worker needs to enforce it, in one canonical spelling. What
is known to be unenforceable is refused here, before anything is queued; the worker's compiler
refuses the rest (``oneOf`` whose options overlap, schemas that no text satisfies, ...).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from queue_service.errors import RequestError
from queue_service.json_text import MAX_REASON_CHARS, shortened

MAX_SOURCE_BYTES = 64 * 1024
MAX_SUBSCHEMAS = 1000
MAX_CHOICES = 1000
MAX_SCHEMA_DEPTH = 100

SUPPORTED_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)

# Say something to a reader and nothing about which texts are valid; left out of the source.
ANNOTATION_KEYWORDS = frozenset(
    {
        "$anchor",
        "$comment",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "markdownDescription",
        "readOnly",
        "title",
        "writeOnly",
    }
)

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})

# Beyond this a number is not exact as a double, which is what the compiler computes with.
_MAX_EXACT_INTEGER = 2**53
_MAX_EXACT_DIGITS = 15

# JSON must write these as \u00XX, and no \u escape is ever generated: with them a model could
# spell the name of a property in a second way and dodge its schema.
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

_CHARACTER_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)"
_UNSUPPORTED_REGEX = re.compile(
    rf"{_CHARACTER_CLASS}"
    r"|(?P<look>\(\?<?[=!]|\\[bB<>])"
    r"|(?P<back>\\[1-9]|\\k<|\(\?P=)"
    r"|\\.",
    re.DOTALL,
)


class ConstraintKind(StrEnum):
    """What the source of a constraint is."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint; equal ones are enforced alike. Made by the functions of this module.

    Attributes:
        source: compact JSON of a schema that says no more than what is enforced, the regex, a
            compact JSON list of the choices, or Lark text.
    """

    kind: ConstraintKind
    source: str


def json_object() -> Constraint:
    """Any JSON object."""
    return Constraint(ConstraintKind.JSON_OBJECT, '{"type":"object"}')


def json_schema(schema: Mapping[str, Any]) -> Constraint:
    """JSON that is valid against ``schema``, read as Draft 2020-12.

    Properties come in the order in which the schema names them. Annotations and ``x-`` keywords
    are left out of the source, and so are ``$id`` and ``$schema``.

    Raises:
        RequestError: code ``invalid_schema``: a keyword or a value that cannot be enforced, with
            its place; a ``$ref`` that leads out of the document; too large or too deep.
    """
    try:
        _check_depth(schema)
        canonical = _SchemaReader().read(schema)
        source = _compact(canonical)
    except _Unenforceable as exc:
        # It may quote a name from the schema, which has no bounds.
        raise RequestError(shortened(exc, MAX_REASON_CHARS), code="invalid_schema") from exc
    _check_size(source, "the schema", code="invalid_schema")
    return Constraint(ConstraintKind.JSON_SCHEMA, source)


def regex(pattern: str) -> Constraint:
    """A text that ``pattern`` matches as a whole; the dialect is that of Rust's regex crate.

    Raises:
        RequestError: empty, too large, or it looks around or back.
    """
    if not isinstance(pattern, str) or not pattern:
        raise RequestError("the regex must be a string that is not empty")
    _check_size(pattern, "the regex")
    unsupported = _unsupported_in(pattern)
    if unsupported is not None:
        raise RequestError(f"the regex has {unsupported}, which cannot be enforced")
    return Constraint(ConstraintKind.REGEX, pattern)


def choice(options: Sequence[str]) -> Constraint:
    """Exactly one of ``options``.

    Raises:
        RequestError: no option, an empty one, more than MAX_CHOICES, or too large together.
    """
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise RequestError("choices must be a list of one string or more")
    if any(not isinstance(option, str) or not option for option in options):
        raise RequestError("every choice must be a string that is not empty")
    if len(options) > MAX_CHOICES:
        raise RequestError(f"{len(options)} choices are too many: at most {MAX_CHOICES}")
    source = _compact(list(dict.fromkeys(options)))
    _check_size(source, "the choices")
    return Constraint(ConstraintKind.CHOICE, source)


def grammar(lark: str) -> Constraint:
    """A text of the context-free grammar ``lark``, in llguidance's variant of Lark.

    Raises:
        RequestError: empty or too large.
    """
    if not isinstance(lark, str) or not lark.strip():
        raise RequestError("the grammar must be a string that is not empty")
    _check_size(lark, "the grammar")
    return Constraint(ConstraintKind.GRAMMAR, lark)


class _Unenforceable(Exception):
    """What is wrong with a schema and where."""


class _SchemaReader:
    """Reads one schema: checks every keyword, and gives the part of it that is enforced."""

    def __init__(self) -> None:
        self._places: dict[str, Any] = {}
        self._num_parts = 0
        self._references: list[tuple[str, str]] = []

    def read(self, schema: Mapping[str, Any]) -> Any:
        """Return the canonical schema; raises _Unenforceable."""
        canonical = self._schema(schema, "#")
        for place, target in self._references:
            if target not in self._places:
                raise _Unenforceable(
                    f"the $ref at {place} leads to {target}, where this document has no schema"
                )
        self._settle_one_of()
        return canonical

    def _schema(self, schema: Any, place: str) -> Any:
        self._count_one()
        if isinstance(schema, bool):
            self._places[place] = schema
            return schema
        if not isinstance(schema, Mapping):
            raise _Unenforceable(f"{place} must be a schema: an object, true or false")
        canonical: dict[str, Any] = {}
        self._places[place] = canonical
        for keyword, value in schema.items():
            at = f"{place}/{_escaped(keyword)}"
            if keyword == "$id" and place != "#":
                raise _Unenforceable(f"the $id at {at} cannot be enforced: only the root has one")
            if _says_nothing(schema, keyword, value):
                continue
            read = _KEYWORDS.get(keyword)
            if read is None:
                raise _Unenforceable(
                    f"the schema keyword {keyword!r} at {at} cannot be enforced; leave it out "
                    "and check the answer for it, or say it with other keywords"
                )
            canonical[keyword] = read(self, value, at)
        _check_min_properties(canonical, place)
        return canonical

    def _count_one(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_SUBSCHEMAS:
            raise _Unenforceable(
                f"the schema has more than {MAX_SUBSCHEMAS} subschemas, objects and lists"
            )

    def _schemas_by_name(self, value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _Unenforceable(f"{at} must be an object of schemas")
        return {name: self._schema(sub, f"{at}/{_escaped(name)}") for name, sub in value.items()}

    def _properties(self, value: Any, at: str) -> dict[str, Any]:
        for name in value if isinstance(value, Mapping) else ():
            _check_writable(name, at)
        return self._schemas_by_name(value, at)

    def _pattern_properties(self, value: Any, at: str) -> dict[str, Any]:
        for pattern in value if isinstance(value, Mapping) else ():
            self._pattern(pattern, f"{at}/{_escaped(pattern)}")
        return self._schemas_by_name(value, at)

    def _schema_list(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise _Unenforceable(f"{at} must be a list of one schema or more")
        return [self._schema(sub, f"{at}/{index}") for index, sub in enumerate(value)]

    def _items(self, value: Any, at: str) -> Any:
        if isinstance(value, list):
            raise _Unenforceable(f"{at} must be one schema; name a list of them prefixItems")
        return self._schema(value, at)

    def _ref(self, value: Any, at: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise _Unenforceable(f"{at} must lead to a place in this document: #, #/$defs/...")
        self._references.append((at, _target(value)))
        return value

    def _type(self, value: Any, at: str) -> Any:
        types = value if isinstance(value, list) else [value]
        if not types or any(not isinstance(name, str) or name not in _TYPES for name in types):
            raise _Unenforceable(f"{at} must be one of {', '.join(sorted(_TYPES))}, or a list")
        return value

    def _enum(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise _Unenforceable(f"{at} must be a list of one value or more")
        return [self._literal(item, at) for item in value]

    def _literal(self, value: Any, at: str) -> Any:
        """Return a value of ``enum`` or ``const`` in its canonical spelling."""
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, str):
            _check_writable(value, at)
            return value
        if isinstance(value, int | float):
            return _exact(value, at)
        self._count_one()
        if isinstance(value, list):
            return [self._literal(item, at) for item in value]
        for name in value:
            _check_writable(name, at)
        return {name: self._literal(item, at) for name, item in value.items()}

    def _required(self, value: Any, at: str) -> list[str]:
        if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
            raise _Unenforceable(f"{at} must be a list of strings")
        for name in value:
            _check_writable(name, at)
        return list(dict.fromkeys(value))

    def _count(self, value: Any, at: str) -> int:
        is_count = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not is_count or not 0 <= value <= _MAX_EXACT_INTEGER or value != int(value):
            raise _Unenforceable(f"{at} must be a whole number, 0 or more")
        return int(value)

    def _number(self, value: Any, at: str) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Unenforceable(f"{at} must be a number")
        return _exact(value, at)

    def _multiple_of(self, value: Any, at: str) -> int | float:
        number = self._number(value, at)
        if number <= 0:
            raise _Unenforceable(f"{at} must be a number above 0")
        return number

    def _pattern(self, value: Any, at: str) -> str:
        if not isinstance(value, str):
            raise _Unenforceable(f"{at} must be a string")
        unsupported = _unsupported_in(value)
        if unsupported is not None:
            raise _Unenforceable(f"the pattern at {at} has {unsupported}, which cannot be enforced")
        return value

    def _format(self, value: Any, at: str) -> str:
        if not isinstance(value, str) or value not in SUPPORTED_FORMATS:
            raise _Unenforceable(
                f"the format {value!r} at {at} cannot be enforced, only "
                f"{', '.join(sorted(SUPPORTED_FORMATS))}"
            )
        return value

    def _settle_one_of(self) -> None:
        """Write ``anyOf`` for every ``oneOf`` whose options plainly exclude each other.

        The compiler enforces ``oneOf`` only then, and it does not look behind references.
        """
        if any("/oneOf/" in target for _, target in self._references):
            return
        for schema in self._places.values():
            if not isinstance(schema, dict) or "oneOf" not in schema or "anyOf" in schema:
                continue
            if _exclude_each_other([self._resolved(option) for option in schema["oneOf"]]):
                renamed = {"anyOf" if key == "oneOf" else key: schema[key] for key in schema}
                schema.clear()
                schema.update(renamed)

    def _resolved(self, schema: Any) -> Any:
        """Return what a schema that is only a reference leads to, others as they are."""
        seen: set[str] = set()
        while isinstance(schema, dict) and schema.keys() == {"$ref"}:
            target = _target(schema["$ref"])
            if target in seen:
                break
            seen.add(target)
            schema = self._places[target]
        return schema


_KEYWORDS: Mapping[str, Callable[[_SchemaReader, Any, str], Any]] = {
    "$defs": _SchemaReader._schemas_by_name,
    "$ref": _SchemaReader._ref,
    "additionalProperties": _SchemaReader._schema,
    "allOf": _SchemaReader._schema_list,
    "anyOf": _SchemaReader._schema_list,
    "const": _SchemaReader._literal,
    "definitions": _SchemaReader._schemas_by_name,
    "enum": _SchemaReader._enum,
    "exclusiveMaximum": _SchemaReader._number,
    "exclusiveMinimum": _SchemaReader._number,
    "format": _SchemaReader._format,
    "items": _SchemaReader._items,
    "maxItems": _SchemaReader._count,
    "maxLength": _SchemaReader._count,
    "maxProperties": _SchemaReader._count,
    "maximum": _SchemaReader._number,
    "minItems": _SchemaReader._count,
    "minLength": _SchemaReader._count,
    "minProperties": _SchemaReader._count,
    "minimum": _SchemaReader._number,
    "multipleOf": _SchemaReader._multiple_of,
    "oneOf": _SchemaReader._schema_list,
    "pattern": _SchemaReader._pattern,
    "patternProperties": _SchemaReader._pattern_properties,
    "prefixItems": _SchemaReader._schema_list,
    "properties": _SchemaReader._properties,
    "required": _SchemaReader._required,
    "type": _SchemaReader._type,
}

SUPPORTED_KEYWORDS = frozenset(_KEYWORDS)


def _says_nothing(schema: Mapping[str, Any], keyword: str, value: Any) -> bool:
    """Whether this keyword, here, excludes no text."""
    if keyword in ANNOTATION_KEYWORDS:
        return True
    if keyword == "uniqueItems":
        return value is False
    if keyword == "format" and "type" in schema:
        # int32 and the like: a format speaks of strings only.
        types = schema["type"]
        return "string" not in (types if isinstance(types, list) else [types])
    return keyword.startswith("x-") and keyword != "x-guidance"


def _exclude_each_other(options: Sequence[Any]) -> bool:
    """Whether no value is valid for two of them, by its type or, for objects, by one tag."""
    seen: set[str] = set()
    objects: list[Mapping[str, Any]] = []
    for option in options:
        if not isinstance(option, dict) or "type" not in option:
            return False
        if option["type"] == "object":
            objects.append(option)
            continue
        named = option["type"] if isinstance(option["type"], list) else [option["type"]]
        types = {"number" if name == "integer" else name for name in named}
        if seen & types:
            return False
        seen |= types
    if "object" in seen and objects:
        return False
    tags = [_tags(option) for option in objects]
    return len(tags) < 2 or any(
        all(name in tag for tag in tags)
        and sum(len(tag[name]) for tag in tags) == len(frozenset().union(*(t[name] for t in tags)))
        for name in tags[0]
    )


def _tags(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the required properties of an object that are one of a few strings, and those."""
    tags: dict[str, frozenset[str]] = {}
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        value = properties.get(name)
        if isinstance(value, dict) and ("const" in value or "enum" in value):
            values = [value["const"]] if "const" in value else value["enum"]
            if all(isinstance(item, str) for item in values):
                tags[name] = frozenset(values)
    return tags


def _check_min_properties(schema: Mapping[str, Any], place: str) -> None:
    """Refuse a minimum that a property written twice would reach."""
    minimum = schema.get("minProperties", 0)
    if minimum > len(schema.get("required", ())) + 1:
        raise _Unenforceable(
            f"the minProperties at {place} cannot be enforced: a name may come twice; name what "
            "must be there in required"
        )


def _check_writable(text: str, at: str) -> None:
    if _UNWRITABLE.search(text):
        raise _Unenforceable(f"{at} has a control character, which cannot be generated")


def _exact(value: int | float, at: str) -> int | float:
    """Return the number, whole ones as int; raises when the compiler would round it."""
    if abs(value) <= _MAX_EXACT_INTEGER:
        if value == int(value):
            return int(value)
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        if max(len(digits), -int(exponent)) <= _MAX_EXACT_DIGITS:
            return value
    raise _Unenforceable(f"a number at {at} has too many digits to be enforced")


def _unsupported_in(pattern: str) -> str | None:
    for found in _UNSUPPORTED_REGEX.finditer(pattern):
        if found.lastgroup == "look":
            return f"a look-around or word boundary ({found.group()})"
        if found.lastgroup == "back":
            return f"a back-reference ({found.group()})"
    return None


def _check_depth(document: Any) -> None:
    """Refuse what is no JSON or nested too deeply for the functions that call themselves."""
    level: list[Any] = [document]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise _Unenforceable(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if any(not isinstance(name, str) for name in value):
            raise _Unenforceable("the schema has a name that is not a string")
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    elif not (value is None or isinstance(value, str | int | float)):
        raise _Unenforceable(f"the schema has a {type(value).__name__}, which is not JSON")


def _check_size(source: str, what: str, *, code: str = "invalid_request") -> None:
    try:
        num_bytes = len(source.encode())
    except UnicodeEncodeError as exc:
        raise RequestError(f"{what} has a lone surrogate", code=code) from exc
    if num_bytes > MAX_SOURCE_BYTES:
        raise RequestError(
            f"{what} takes {num_bytes:,} bytes, more than the {MAX_SOURCE_BYTES:,} allowed",
            code=code,
        )


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _target(reference: str) -> str:
    """Return the place that a reference leads to, in the spelling of places here."""
    parts = unquote(reference).split("/")
    return "/".join(_escaped(part.replace("~1", "/").replace("~0", "~")) for part in parts)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
