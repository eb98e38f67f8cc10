"""The room in front of the engine: what was claimed ahead waits here, and has not begun."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from workers.begun import BegunNotes
from workers.requests import PreparedRequest


class WaitingRoom:
    """Hands prepared requests to the engine while few are with it. Any thread may call it.

    Args:
        submit: takes requests that are to run, at once.
        most: requests that are with the engine at a time, beside urgent ones, which others make
            room for.
        at_once: so many are handed over together, where that many wait.
    """

    def __init__(
        self,
        submit: Callable[[Sequence[PreparedRequest]], None],
        notes: BegunNotes,
        *,
        most: int,
        at_once: int = 1,
    ) -> None:
        self._submit = submit
        self._notes = notes
        self._most = most
        self._at_once = at_once
        self._waiting: deque[PreparedRequest] = deque()
        self._begun: set[str] = set()
        # Also held while requests are handed over, so that they arrive in their order.
        self._lock = threading.Lock()

    def add(self, requests: Sequence[PreparedRequest]) -> None:
        """Let these wait for their turn: the highest priority first, within one as they came."""
        with self._lock:
            is_in_order = True
            for request in requests:
                if self._waiting and request.priority > self._waiting[-1].priority:
                    is_in_order = False
                self._waiting.append(request)
            if not is_in_order:
                self._waiting = deque(sorted(self._waiting, key=lambda one: -one.priority))
            self._advance()

    def leave(self, execution_id: str) -> None:
        """One has ended: the next may begin."""
        with self._lock:
            if execution_id not in self._begun:
                return
            self._forget(execution_id)
            if self._most - len(self._begun) >= self._at_once:
                self._advance()

    def drop(self, execution_ids: Iterable[str]) -> None:
        """Forget these, whether they wait or are with the engine, which is told by others."""
        dropped = set(execution_ids)
        with self._lock:
            for execution_id in dropped & self._begun:
                self._forget(execution_id)
            if any(request.execution_id in dropped for request in self._waiting):
                self._waiting = deque(
                    one for one in self._waiting if one.execution_id not in dropped
                )
            self._advance()

    def _forget(self, execution_id: str) -> None:
        self._begun.discard(execution_id)
        self._notes.end(execution_id)

    def _advance(self) -> None:
        turn = []
        while self._waiting and (len(self._begun) < self._most or self._waiting[0].is_urgent):
            request = self._waiting.popleft()
            self._begun.add(request.execution_id)
            self._notes.begin(request.execution_id)
            turn.append(request)
        if turn:
            self._submit(turn)
