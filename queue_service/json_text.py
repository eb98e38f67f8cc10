"""JSON that others wrote: read strictly, rid of lone surrogates, shortened in messages."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_NESTING = 64
# What a message may quote of a library's or of a checker's, which may quote the request.
MAX_REASON_CHARS = 500

_CONTAINERS = (dict, list, tuple)
_TOO_DEEP = f"nested deeper than {MAX_NESTING} levels"


def load_json(text: str) -> Any:
    """Return the value of a JSON text, with lone surrogates replaced by U+FFFD.

    Raises:
        ValueError: not JSON (NaN, Infinity and numbers beyond a float are not), or nested
            deeper than MAX_NESTING; the message says which.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as exc:
        raise ValueError(f"not valid JSON: {exc.msg} at character {exc.pos + 1}") from None
    except _NumberError:
        raise
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:
        raise ValueError("not valid JSON: an integer has too many digits") from None
    # Only an escape can make a lone surrogate, and only that many brackets can nest too deep.
    if "\\u" in text or text.count("{") + text.count("[") > MAX_NESTING:
        return replace_surrogates(value)
    return value


def replace_surrogates(value: Any) -> Any:
    """Return the value itself, or a copy in which U+FFFD stands for each lone surrogate.

    Raises:
        ValueError: nested deeper than MAX_NESTING.
    """
    return value if _encodes(value, MAX_NESTING) else _replaced(value, MAX_NESTING)


def quoted(value: Any) -> str:
    """Return a string in quotes, cut to 80 characters; the type's name for anything else."""
    return repr(shortened(value) if isinstance(value, str) else type(value).__name__)


def shortened(value: Any, max_chars: int = 80) -> str:
    """Return the value as text of at most ``max_chars``, so that no message carries a prompt."""
    text = str(value)
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def _encodes(value: Any, levels: int) -> bool:
    if isinstance(value, str):
        if value.isascii():
            return True
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    if not isinstance(value, _CONTAINERS):
        return True
    if not levels:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, dict):
        for key in value:
            if not _encodes(key, levels):
                return False
        value = value.values()
    for item in value:  # noqa: SIM110 (a loop takes half the time of all())
        if not _encodes(item, levels - 1):
            return False
    return True


def _replaced(value: Any, levels: int) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(value, _CONTAINERS):
        return value
    if not levels:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, dict):
        return {_replaced(k, levels): _replaced(v, levels - 1) for k, v in value.items()}
    return [_replaced(item, levels - 1) for item in value]


class _NumberError(ValueError):
    """A number that Python's decoder would take and JSON does not."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NumberError(f"not valid JSON: {name} is no JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _NumberError(f"not valid JSON: the number {shortened(text)} is out of range")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)
