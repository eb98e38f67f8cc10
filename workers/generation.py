"""The engine thread: rows in, text out, one step at a time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.engine import Engine, Failed
from workers.requests import Generated, PreparedRequest
from workers.text import Decoder, TextPipeline

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes what the engine thread produces. Its methods never block."""

    def begin(self, request: PreparedRequest) -> None:
        """A row is about to run."""

    def advance(self, execution_id: str, token_id: int, text: str) -> None:
        """A row generated a token; the text is what became certain with it, perhaps empty."""

    def end(self, generated: Generated, last_text: str) -> None:
        """A row came to its end; the text is what had been held back."""

    def fail(self, execution_id: str, error: Exception) -> None:
        """A row came to no ending; the error's class says what becomes of its job."""

    def drop(self, execution_id: str) -> None:
        """A row was removed; nothing more is wanted of it."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the engine thread works with, made on that thread since MLX arrays belong to one."""

    engine: Engine
    decoder: Decoder
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class _Row:
    request: PreparedRequest
    text: TextPipeline


class GenerationThread:
    """Owns the engine and its thread.

    Args:
        make_parts: loads the model; called on the engine thread.
        sink: where tokens and endings go.
        on_failure: called on the engine thread with the exception that ended it.
        max_rows: rows handed to the engine at a time; more wait inside the thread.
    """

    def __init__(
        self,
        make_parts: Callable[[], EngineParts],
        sink: Sink,
        *,
        on_failure: Callable[[BaseException], None],
        max_rows: int,
    ) -> None:
        self._make_parts = make_parts
        self._sink = sink
        self._on_failure = on_failure
        self._max_rows = max_rows
        self._inbox: queue.SimpleQueue[Sequence[PreparedRequest] | None] = queue.SimpleQueue()
        self._waiting: list[PreparedRequest] = []
        self._rows: dict[str, _Row] = {}
        self._cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.steps = 0
        self.peak_bytes = 0

    def start(self) -> None:
        """Start the thread; loading the model is its first work."""
        self._thread.start()

    def submit(self, requests: Sequence[PreparedRequest]) -> None:
        """Hand over requests; any thread may call it."""
        self._inbox.put(requests)

    def cancel(self, execution_ids: Iterable[str]) -> None:
        """Drop rows at the next step; any thread may call it."""
        for execution_id in execution_ids:
            self._cancelled.put(execution_id)
        self._inbox.put(())

    def stop(self, timeout_seconds: float = 10) -> None:
        """End the thread after the step it is in; rows that run are forgotten."""
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join(timeout_seconds)

    @property
    def num_rows(self) -> int:
        """Rows in the batch or waiting for a place in it."""
        return len(self._rows) + len(self._waiting)

    def _run(self) -> None:
        try:
            parts = self._make_parts()
            while not self._stopping.is_set():
                self._turn(parts)
        except BaseException as failure:  # the top of the thread: its owner decides
            self._on_failure(failure)

    def _turn(self, parts: EngineParts) -> None:
        self._receive(idle=not parts.engine.has_work)
        cancelled = self._take_cancelled()
        # Once more: what was submitted before its cancel must be here when it is dropped.
        self._receive(idle=False)
        self._drop(cancelled, parts.engine)
        self._admit(parts)
        if not parts.engine.has_work:
            return
        for event in parts.engine.step():
            row = self._rows.get(event.execution_id)
            if row is None:
                continue
            if isinstance(event, Failed):
                self._fail(row, event.error)
                continue
            try:
                self._advance(parts.engine, row, event.token_id)
            except Exception as error:  # one row's text: its neighbours go on
                logger.exception("a row failed execution=%s", event.execution_id)
                parts.engine.remove([event.execution_id])
                self._fail(row, error)
        self.steps += 1
        self.peak_bytes = parts.engine.peak_bytes

    def _receive(self, *, idle: bool) -> None:
        if idle and not self._waiting:
            self._waiting.extend(self._inbox.get() or ())
        while not self._inbox.empty():
            self._waiting.extend(self._inbox.get() or ())

    def _take_cancelled(self) -> set[str]:
        cancelled: set[str] = set()
        while not self._cancelled.empty():
            cancelled.add(self._cancelled.get())
        return cancelled

    def _drop(self, cancelled: set[str], engine: Engine) -> None:
        if not cancelled:
            return
        self._waiting = [r for r in self._waiting if r.execution_id not in cancelled]
        engine.remove(cancelled & self._rows.keys())
        for execution_id in cancelled:
            self._rows.pop(execution_id, None)
            self._sink.drop(execution_id)

    def _admit(self, parts: EngineParts) -> None:
        room = self._max_rows - len(self._rows)
        admitted, self._waiting = self._waiting[:room], self._waiting[room:]
        if not admitted:
            return
        for request in admitted:
            text = TextPipeline(
                parts.decoder,
                eos_token_ids=parts.eos_token_ids,
                stop_strings=request.stop_strings,
                token_limit=request.token_limit,
            )
            self._rows[request.execution_id] = _Row(request, text)
            self._sink.begin(request)
        parts.engine.add(admitted)

    def _fail(self, row: _Row, error: Exception) -> None:
        self._rows.pop(row.request.execution_id, None)
        self._sink.fail(row.request.execution_id, error)

    def _advance(self, engine: Engine, row: _Row, token_id: int) -> None:
        execution_id = row.request.execution_id
        text = row.text.push(token_id)
        if row.text.finish_reason is None:
            self._sink.advance(execution_id, token_id, text)
            return
        del self._rows[execution_id]
        engine.remove([execution_id])
        text += row.text.finish()
        self._sink.end(
            Generated(
                request=row.request,
                text=row.text.text,
                finish_reason=row.text.finish_reason,
                completion_tokens=row.text.num_tokens,
            ),
            text,
        )
