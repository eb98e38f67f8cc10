"""What crosses Redis in a job: plain data, JSON or pickle, read without looking up a class."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import pickletools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from pydantic_core import PydanticSerializationError, to_json

from queue_service.errors import RequestError

_HOW_TO_ENQUEUE = (
    "Enqueue with Queue(name, connection=connection, serializer='json') and pass only dict "
    "(with string keys), list, str, int, float, bool and None."
)


class Encoding(StrEnum):
    """How a job's data was serialized; its meta and its result are written the same way."""

    JSON = "json"
    PICKLE = "pickle"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a payload may cost to read.

    Attributes:
        num_bytes: after decompression; also the characters of all strings together.
        depth: containers inside containers.
        num_nodes: values, each counted every time that it is reached.
    """

    num_bytes: int = 8 * 2**20
    depth: int = 64
    num_nodes: int = 200_000


CALL_LIMITS = Limits()
# Log probabilities with twenty alternatives cost a hundred values and more for each token.
RESULT_LIMITS = Limits(num_bytes=128 * 2**20, num_nodes=5_000_000)


@dataclass(frozen=True, slots=True)
class Call:
    """One call as a job carries it: plain data, tuples inside as lists, strings valid Unicode."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    encoding: Encoding


def encode_call(function: str, body: Mapping[str, Any]) -> bytes:
    """Return the job hash's ``data`` for ``function(body)``: compact JSON, by zlib if it is long.

    RQ reads both: what zlib does not know, and JSON it never does, is uncompressed to it.

    Raises:
        RequestError: the body is not JSON data.
    """
    call: list[Any] = [function, None, [dict(body)], {}]
    return _deflate(json_bytes(call))


def decode_call(data: bytes, limits: Limits = CALL_LIMITS) -> Call:
    """Read the job hash's ``data``, compressed or not, JSON or a pickle of plain data.

    Raises:
        RequestError: ``invalid_payload``; the message names what is wrong.
    """
    serialized = inflate(data, limits.num_bytes)
    call = _decode(serialized, limits)
    if type(call) is list and len(call) == 4:
        function, instance, args, kwargs = call
        if (
            type(function) is str
            and instance is None
            and type(args) is list
            and type(kwargs) is dict
        ):
            return Call(function, tuple(args), kwargs, encoding_of(serialized))
    raise _refusal("it is not a function name, no instance, arguments and keyword arguments.")


def encode_value(value: Any, encoding: Encoding) -> bytes:
    """Serialize a result or meta of plain data.

    Raises:
        RequestError: the value is not plain data.
    """
    if encoding is Encoding.JSON:
        return _to_json(value)
    return pickle.dumps(_Copy(RESULT_LIMITS).of(value), protocol=pickle.HIGHEST_PROTOCOL)


def encode_answer(body: Mapping[str, Any], encoding: Encoding) -> bytes:
    """Serialize an answer of our own making."""
    return json_bytes(body) if encoding is Encoding.JSON else encode_value(body, encoding)


def json_bytes(value: Any) -> bytes:
    """Return compact JSON of a value that is known to be JSON data.

    Raises:
        RequestError: it is not after all; but what pydantic can serialize may pass.
    """
    return _fast_json(value) or _to_json(value)


def decode_value(data: bytes, limits: Limits = RESULT_LIMITS) -> Any:
    """Read a result or meta in either encoding.

    Raises:
        RequestError: ``invalid_payload``; the message names what is wrong.
    """
    if len(data) > limits.num_bytes:
        raise _too_large(limits.num_bytes)
    return _decode(data, limits)


def encoding_of(serialized: bytes) -> Encoding:
    """Tell the encoding of uncompressed data: a pickle of protocol 2 or later opens with 0x80."""
    return Encoding.PICKLE if serialized.startswith(b"\x80") else Encoding.JSON


def inflate(data: bytes, max_bytes: int) -> bytes:
    """Decompress a job's ``data`` without ever holding more than ``max_bytes`` of it.

    Raises:
        RequestError: it is larger, or its compressed data is cut off.
    """
    plain = data  # RQ takes what zlib does not know for uncompressed
    # The method is in the first byte; to ask zlib about what it does not know takes longer.
    if not data or data[0] & 0x0F == zlib.DEFLATED:
        inflater = zlib.decompressobj()
        with contextlib.suppress(zlib.error):
            plain = inflater.decompress(data, max_bytes + 1)
            if not inflater.eof and len(plain) <= max_bytes:
                raise _refusal("its compressed data is cut off.")
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    return plain


def inflate_text(data: bytes, max_bytes: int) -> str:
    """Decompress a stored text such as a traceback; what is over ``max_bytes`` is cut off.

    Raises:
        RequestError: the data is not zlib's.
    """
    try:
        return zlib.decompressobj().decompress(data, max_bytes).decode("utf-8", "replace")
    except zlib.error as exc:
        raise _refusal("a stored text cannot be decompressed.") from exc


class PlainSerializer:
    """RQ's ``serializer=`` for our own readers: reads both encodings safely, writes JSON."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """Serialize plain data; raise RequestError for anything else."""
        return encode_value(value, Encoding.JSON)

    @staticmethod
    def loads(data: bytes) -> Any:
        """Read plain data within ``CALL_LIMITS``; raise RequestError for anything else."""
        return decode_value(data, CALL_LIMITS)


class PlainPickleSerializer(PlainSerializer):
    """The same for a job that came as a pickle, so that its sender can read what we write."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """Serialize plain data; raise RequestError for anything else."""
        return encode_value(value, Encoding.PICKLE)


# Compressing so little saves a few dozen bytes and takes a fifth of a submitter's time.
_SHORT_BYTES = 512


def _refusal(reason: str) -> RequestError:
    return RequestError(f"The job's payload is refused: {reason}", code="invalid_payload")


def _too_large(max_bytes: int) -> RequestError:
    return _refusal(f"it is too large (more than {max_bytes} bytes).")


def _not_plain(what: str) -> RequestError:
    return _refusal(f"it is not plain data: it holds {what}. {_HOW_TO_ENQUEUE}")


def _deflate(data: bytes) -> bytes:
    if len(data) <= _SHORT_BYTES:
        return data
    # zlib clears its tables for every stream: at full size that costs eight times what
    # compressing a short body does.
    window_bits, memory_level = (12, 5) if len(data) <= 4096 else (15, 8)
    deflater = zlib.compressobj(1, zlib.DEFLATED, window_bits, memory_level)
    return deflater.compress(data) + deflater.flush()


def _refuse_constant(name: str) -> NoReturn:
    raise _not_plain(f"the number {name}")


def _bounded_int(text: str) -> int:
    # Beyond this no float holds it, and printing it takes quadratic time.
    value = int(text) if len(text) <= 309 else 1 << 1023
    if value.bit_length() > 1023:
        raise _not_plain("an integer of more than 1023 bits")
    return value


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _not_plain(f"the number {value}")
    return value


def _fast_json(value: Any) -> bytes | None:
    """Return compact JSON in a quarter of the encoder's time; None leaves it to the encoder."""
    try:
        encoded: bytes = to_json(value)
    except PydanticSerializationError:
        return None
    # It would write these for numbers that JSON lacks; in a text they only cost the slow way.
    return None if b"NaN" in encoded or b"Infinity" in encoded else encoded


_JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_JSON_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_int=_bounded_int, parse_float=_finite_float
)


def _to_json(value: Any) -> bytes:
    try:
        text = _JSON_ENCODER.encode(value)
    except (TypeError, ValueError) as exc:
        raise _refusal(f"it is not plain data: {exc}.") from exc
    except RecursionError as exc:
        raise _refusal("it is nested too deeply.") from exc
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _without_lone_surrogates(text).encode()


def _without_lone_surrogates(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _decode(serialized: bytes, limits: Limits) -> Any:
    if encoding_of(serialized) is Encoding.PICKLE:
        value = _PickleReader().read(serialized, max_operations=4 * limits.num_nodes)
    else:
        value = _from_json(serialized)
        if _is_small_and_flat(serialized, limits):
            return value
    return _Copy(limits).of(value)


def _is_small_and_flat(serialized: bytes, limits: Limits) -> bool:
    """Whether JSON is within every limit by its length, its brackets and its lack of escapes.

    It is plain data of its own then: a copy, which takes longer than the parsing, changes nothing.
    """
    return (
        len(serialized) <= min(limits.num_nodes, limits.num_bytes)
        and serialized.count(b"[") + serialized.count(b"{") <= limits.depth
        and b"\\u" not in serialized
    )


def _from_json(serialized: bytes) -> Any:
    try:
        return _JSON_DECODER.decode(serialized.decode())
    except UnicodeDecodeError as exc:
        raise _refusal("it is neither JSON nor a pickle of protocol 2 or later.") from exc
    except ValueError as exc:
        raise _refusal(f"it is not valid JSON: {exc}.") from exc
    except RecursionError as exc:
        raise _refusal("it is nested too deeply.") from exc


class _Copy:
    """Copies plain data into a tree of its own and refuses everything else.

    A value that is shared counts each time, so neither a cycle nor a small pickle that unfolds
    into a huge one gets through.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_nodes = 0
        self._num_characters = 0

    def of(self, value: Any, depth: int = 1) -> Any:
        self._num_nodes += 1
        if self._num_nodes > self._limits.num_nodes:
            raise _refusal(f"it is too large (more than {self._limits.num_nodes} values).")
        kind = type(value)
        if kind is str:
            return self._text(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            # Beyond this no float holds it, and printing it takes quadratic time.
            if value.bit_length() > 1023:
                raise _not_plain("an integer of more than 1023 bits")
            return value
        if kind is float:
            if not math.isfinite(value):
                raise _not_plain(f"the number {value}")
            return value
        if depth > self._limits.depth:
            raise _refusal(f"it is nested too deeply (more than {self._limits.depth} levels).")
        if kind is list or kind is tuple:
            return [self.of(item, depth + 1) for item in value]
        if kind is dict:
            return {self._text(key): self.of(item, depth + 1) for key, item in value.items()}
        raise _not_plain(f"a {kind.__name__}")

    def _text(self, text: Any) -> str:
        if type(text) is not str:
            raise _not_plain(f"a key of type {type(text).__name__}")
        self._num_characters += len(text)
        if self._num_characters > self._limits.num_bytes:
            raise _too_large(self._limits.num_bytes)
        if text.isascii():
            return text
        try:
            text.encode()
        except UnicodeEncodeError:
            return _without_lone_surrogates(text)
        return text


_PICKLED_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"})
_PICKLED_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_PICKLED_CONSTANTS: Mapping[str, bool | None] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_PICKLED_EMPTY: Mapping[str, type] = {"EMPTY_LIST": list, "EMPTY_TUPLE": list, "EMPTY_DICT": dict}
_PICKLED_BYTES = frozenset({"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"})


class _PickleReader:
    """Runs the pickle operations that build plain data; every other one is refused by name.

    pickle.Unpickler is not used: its ``find_class`` can refuse classes, but ten bytes that name
    a high memo slot make it allocate gigabytes.
    """

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def read(self, data: bytes, max_operations: int) -> Any:
        try:
            for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
                if count > max_operations:
                    raise _refusal(f"it is too large (more than {max_operations} operations).")
                if operation.name == "STOP":
                    break
                self._apply(operation.name, argument)
            return self._stack.pop()
        except (ValueError, LookupError, TypeError) as exc:
            raise _refusal("it is a broken pickle.") from exc

    def _apply(self, name: str, argument: Any) -> None:
        if name in _PICKLED_NUMBERS or name in _PICKLED_TEXTS:
            self._stack.append(argument)
        elif name in _PICKLED_CONSTANTS:
            self._stack.append(_PICKLED_CONSTANTS[name])
        elif name in _PICKLED_EMPTY:
            self._stack.append(_PICKLED_EMPTY[name]())
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in {"BINPUT", "LONG_BINPUT"}:
            self._memo[argument] = self._stack[-1]
        elif name in {"BINGET", "LONG_BINGET"}:
            self._stack.append(self._memo[argument])
        elif name == "MARK":
            self._outer.append(self._stack)
            self._stack = []
        elif name not in {"PROTO", "FRAME"}:
            self._build(name)

    def _build(self, name: str) -> None:
        match name:
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._stack.append(self._pop(int(name[-1])))
            case "TUPLE":
                items = self._pop_to_mark()  # before the append: it changes what the stack is
                self._stack.append(items)
            case "APPEND":
                self._extend(self._pop(1))
            case "APPENDS":
                self._extend(self._pop_to_mark())
            case "SETITEM":
                self._update(self._pop(2))
            case "SETITEMS":
                self._update(self._pop_to_mark())
            case _ if name in _PICKLED_BYTES:
                raise _not_plain("bytes")
            case _:
                raise _not_plain(f"a Python object (pickle operation {name})")

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count:
            raise LookupError("the stack is empty")
        del self._stack[-count:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._outer.pop()
        return items

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("only a list is appended to")
        target.extend(items)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise TypeError("only a dict has items")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise _not_plain(f"a key of type {type(key).__name__}")
            target[key] = value
