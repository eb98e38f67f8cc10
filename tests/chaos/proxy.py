"""A bad network in front of a server: every chunk is late, and connections break at random."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Listens on a Unix socket and passes what comes on to another.

    Args:
        path: where it listens.
        server_path: the server's socket.
        latency_seconds: each chunk, either way, is late by a random time between these two.
        break_probability: that a chunk is dropped and its connection with it.
        change: what becomes of each chunk, either way.

    Attributes:
        num_broken: connections broken so far.
    """

    def __init__(
        self,
        path: Path,
        server_path: Path,
        *,
        latency_seconds: tuple[float, float] = (0.0, 0.0),
        break_probability: float = 0.0,
        change: Callable[[bytes], bytes] = lambda chunk: chunk,
        seed: int = 1,
    ) -> None:
        self._server_path = server_path
        self._latency_seconds = latency_seconds
        self.break_probability = break_probability
        self._change = change
        self._random = random.Random(seed)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.url = f"unix://{path}"
        self.num_broken = 0

    @contextlib.contextmanager
    def serving(self) -> Iterator[Proxy]:
        """Serve for the length of the block."""
        self._begin(self._accept)
        try:
            yield self
        finally:
            _close(self._listener)
            with self._lock:
                sockets = list(self._open)
            for one in sockets:
                _close(one)
            for thread in self._threads:
                thread.join(5)

    def _begin(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed: the end
            server = socket.socket(socket.AF_UNIX)
            with self._lock:
                self._open |= {client, server}
            try:
                server.connect(str(self._server_path))
            except OSError:
                self._drop(client, server)
                continue
            self._begin(self._pass_on, client, server)
            self._begin(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while chunk := source.recv(_CHUNK_BYTES):
                with self._lock:
                    late_by = self._random.uniform(*self._latency_seconds)
                    breaks = self._random.random() < self.break_probability
                    self.num_broken += breaks
                if breaks:
                    break
                time.sleep(late_by)
                target.sendall(self._change(chunk))
        except OSError:
            pass  # the other direction ended the connection
        self._drop(source, target)

    def _drop(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._open -= set(sockets)
        for one in sockets:
            _close(one)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was not connected, or not any more
        one.shutdown(socket.SHUT_RDWR)
    one.close()
