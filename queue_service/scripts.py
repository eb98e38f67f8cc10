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
        replies = self.send([(name, keys, args) for keys, args in calls])
        for failure in filter(None, map(failure_in, replies)):
            raise failure
        return replies

    def send(self, calls: Sequence[tuple[str, Sequence[str], Sequence[Arg]]]) -> list[Any]:
        """Run scripts in one round trip, in order; a call that fails has its error as its reply.

        ``failure_in`` tells errors of the call from those of the server.
        """
        replies = self._send(calls)
        missing = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:
            for name in {calls[i][0] for i in missing}:
                self._load(name)
            again = self._send([calls[i] for i in missing])
            for i, reply in zip(missing, again, strict=True):
                replies[i] = reply
        return replies

    def _send(self, calls: Sequence[tuple[str, Sequence[str], Sequence[Arg]]]) -> list[Any]:
        digests = {name: self._digests.get(name) or self._load(name) for name, _, _ in calls}
        with self._connection.pipeline(transaction=False) as pipeline:
            for name, script_keys, args in calls:
                pipeline.evalsha(digests[name], len(script_keys), *script_keys, *args)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies

    def _load(self, name: str) -> str:
        source = _source(name, keys.RQ)
        digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        self._connection.script_load(source)
        self._digests[name] = digest
        return digest


def failure_in(reply: Any) -> Exception | None:
    """Return why the server cannot take any call now, None where the reply does not say so."""
    if isinstance(reply, Exception) and type(reply) is not ResponseError:
        return reply
    if isinstance(reply, ResponseError) and str(reply).startswith("MISCONF"):
        return ServerCannotWrite(str(reply))
    return None


@functools.cache
def _source(name: str, prefix: str) -> str:
    folder = resources.files("queue_service") / "lua"
    parts = [(folder / f"{part}.lua").read_text("utf-8") for part in ("common", name)]
    return "\n".join(parts).replace("@RQ@", prefix)
