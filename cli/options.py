"""Options and small helpers that several commands share."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import click
from redis import Redis, RedisError

from cli.printable import printable
from queue_service.connection import connect, unavailable
from queue_service.errors import ServerUnavailable
from queue_service.settings import RedisSettings

# json.dumps escapes only the control characters of ASCII, and DEL is none to it.
_OBEYED = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_Command = TypeVar("_Command", bound=Callable[..., Any])


def redis_option(command: _Command) -> _Command:
    """Add ``--redis URL``."""
    return click.option(
        "--redis",
        "redis_url",
        metavar="URL",
        help="The Redis server (else $QSVC_REDIS_URL, the config file, localhost).",
    )(command)


def json_option(command: _Command) -> _Command:
    """Add ``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON on standard output, and nothing else."
    )(command)


def seconds_of(text: str) -> int | None:
    """Return a length of time such as 90s, 12h, 30d or 4w in seconds; None for anything else."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNIT_SECONDS or not number.isdecimal():
        return None
    return int(number) * _UNIT_SECONDS[unit]


def on_stop(stop: Callable[[], None]) -> None:
    """Let Ctrl-C, SIGTERM and SIGHUP call something from here on, instead of ending the process."""

    def handle(signum: int, frame: FrameType | None) -> None:
        stop()

    for wanted in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, handle)


@contextlib.contextmanager
def server(redis_url: str | None, *, instead: str | None = None) -> Iterator[Redis]:
    """Open a connection; a server that goes away meanwhile is reported as one error.

    Args:
        instead: what somebody may do who has no server.
    """
    settings = RedisSettings.load(url=redis_url)
    try:
        connection = connect(settings)
    except ServerUnavailable as error:
        if instead is None:
            raise
        raise ServerUnavailable(f"{error}; {instead}") from error
    try:
        yield connection
    except RedisError as error:
        raise unavailable(settings, error) from error
    finally:
        connection.close()


def has_worker_packages() -> bool:
    """Whether this machine has what running a model needs; nothing is imported to tell."""
    return importlib.util.find_spec("mlx_lm") is not None


def say(text: str) -> None:
    """Tell a person something; standard output stays for results."""
    click.echo(printable(text, keep="\n\t"), err=True)


def tell(text: str) -> None:
    """Print a line that is the command's result for a person."""
    click.echo(printable(text))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a result as JSON, with nothing in it that a terminal would obey."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_json(value: Any) -> None:
    """Print a result as JSON, see ``json_text``."""
    click.echo(json_text(value))
