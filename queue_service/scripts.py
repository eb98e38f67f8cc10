"""Loads the Lua scripts and calls them, alone or many in a pipeline."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError

from queue_service import keys

Arg = str | bytes | int | float


class ServerCannotWrite(ReadOnlyError):
    """The server's disk is full or broken; redis-py has no class for its code MISCONF."""


class Scripts:
    """The scripts of one connection, called by the name of their file.

    redis-py's own ``Script`` asks the server before each pipeline whether it knows the script;
    here a server that has forgotten them (it was restarted) is told again when it says so.
    """

    NAMES = (
        "beat",
        "bury",
        "cancel",
        "claim",
        "delete",
        "due",
        "enqueue",
        "finish",
        "give_up",
        "mark",
        "publish",
        "purge",
        "reap",
        "release",
        "requeue",
        "retry",
        "schedule",
        "sweep",
    )

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._digests: dict[str, str] = {}

    def call(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """Run one script and return its reply."""
        return self.call_many(name, [(keys, args)])[0]

    def call_many(
        self, name: str, calls: Iterable[tuple[Sequence[str], Sequence[Arg]]]
    ) -> list[Any]:
        """Run a script several times in one round trip and return the replies in order.

        Raises:
            redis.exceptions.RedisError: the first error of any call; calls after it may have run.
        """
        replies = self.try_many(name, calls)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        return replies

    def try_many(
        self, name: str, calls: Iterable[tuple[Sequence[str], Sequence[Arg]]]
    ) -> list[Any]:
        """Run a script several times; a call that fails by itself has its error as its reply.

        Raises:
            redis.exceptions.RedisError: the server cannot take any call now (it is away, full,
                or cannot write to its disk); what ran before may have taken effect.
        """
        calls = list(calls)
        replies = self._send(name, calls)
        missing = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:
            self._load(name)
            for i, reply in zip(
                missing, self._send(name, [calls[i] for i in missing]), strict=True
            ):
                replies[i] = reply
        for reply in replies:
            if isinstance(reply, Exception) and type(reply) is not ResponseError:
                raise reply
            if isinstance(reply, ResponseError) and str(reply).startswith("MISCONF"):
                raise ServerCannotWrite(str(reply)) from reply
        return replies

    def _send(self, name: str, calls: Sequence[tuple[Sequence[str], Sequence[Arg]]]) -> list[Any]:
        digest = self._digests.get(name) or self._load(name)
        with self._connection.pipeline(transaction=False) as pipeline:
            for script_keys, args in calls:
                pipeline.evalsha(digest, len(script_keys), *script_keys, *args)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies

    def _load(self, name: str) -> str:
        source = _source(name, keys.RQ)
        digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        self._connection.script_load(source)
        self._digests[name] = digest
        return digest


@functools.cache
def _source(name: str, prefix: str) -> str:
    folder = resources.files("queue_service") / "lua"
    parts = [(folder / f"{part}.lua").read_text("utf-8") for part in ("common", name)]
    return "\n".join(parts).replace("@RQ@", prefix)
