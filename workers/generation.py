"""The engine thread: rows in, text out, one step at a time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from queue_service.trace import Phase
from workers.answer import AnswerDecoder, ChoiceBuilder
from workers.answer_forms import Piece
from workers.engine import Begun, Engine, Failed, Kept, RowRequest, Token, TokenLogprobs
from workers.requests import Generated, PreparedRequest, RunTimes
from workers.tracing import Tracer

logger = logging.getLogger(__name__)

NO_TOKEN = -1


class Sink(Protocol):
    """Takes what the engine thread produces. Its methods never block."""

    def begin(self, request: PreparedRequest) -> None:
        """A request is about to run."""

    def resume(
        self, execution_id: str, choice: int, token_ids: Sequence[int], pieces: Sequence[Piece]
    ) -> None:
        """A choice begins with tokens of an earlier execution, and what had become certain."""

    def note_cached(self, execution_id: str, num_tokens: int) -> None:
        """So many tokens of a request's prompts were not computed, all told so far."""

    def advance(
        self,
        execution_id: str,
        choice: int,
        token_id: int,
        pieces: Sequence[Piece],
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """A choice has one token more, or NO_TOKEN; the pieces became certain with it.

        What ends a choice is one too: whoever goes on must know that it has ended.
        """

    def end(self, generated: Generated) -> None:
        """Every choice of a request came to its end."""

    def fail(self, execution_id: str, error: Exception) -> None:
        """A request came to no ending; the error's class says what becomes of its job."""

    def drop(self, execution_id: str) -> None:
        """A request was removed; nothing more is wanted of it."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the engine thread works with, made on that thread since MLX arrays belong to one."""

    engine: Engine
    decoder: AnswerDecoder


@dataclass(slots=True)
class _Job:
    """A request that runs, and its choices."""

    request: PreparedRequest
    builders: list[ChoiceBuilder]
    began: float
    admitted: float | None = None
    first_token: float | None = None
    cached_tokens: int = 0

    def note_cached(self, choice: int, num_tokens: int) -> bool:
        """Count what a prompt had from others, once however many choices it has.

        A request that goes on has the count of its first execution.
        """
        is_counted = (
            num_tokens > 0
            and self.request.resumed is None
            and choice % self.request.choices_per_prompt == 0
        )
        if is_counted:
            self.cached_tokens += num_tokens
        return is_counted

    @property
    def row_ids(self) -> list[str]:
        return [self.request.row_id(choice) for choice in range(len(self.builders))]

    @property
    def has_ended(self) -> bool:
        return all(builder.has_ended for builder in self.builders)


class GenerationThread:
    """Owns the engine and its thread.

    Args:
        make_parts: loads the model; called on the engine thread.
        sink: where tokens and endings go.
        on_failure: called on the engine thread with the exception that ended it.
        max_rows: rows handed to the engine at a time; more wait inside the thread.
        on_kept: called on the engine thread with the tokens of a chat that a later prompt may
            go on with.
        tracer: notes when what happened.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        make_parts: Callable[[], EngineParts],
        sink: Sink,
        *,
        on_failure: Callable[[BaseException], None],
        max_rows: int,
        on_kept: Callable[[Sequence[int]], None] = lambda _: None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._tracer = tracer or Tracer()
        self._make_parts = make_parts
        self._sink = sink
        self._on_failure = on_failure
        self._max_rows = max_rows
        self._on_kept = on_kept
        self._inbox: queue.SimpleQueue[Sequence[PreparedRequest] | None] = queue.SimpleQueue()
        self._waiting: list[PreparedRequest] = []
        self._jobs: dict[str, _Job] = {}
        self._rows: dict[str, tuple[_Job, int]] = {}
        self._cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._expected: queue.SimpleQueue[Sequence[Sequence[int]]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.steps = 0
        self.peak_bytes = 0
        self.kv_bytes = 0
        self.peak_kv_bytes = 0

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

    def expect(self, prompts: Sequence[Sequence[int]]) -> None:
        """Note prompts that are about to come; any thread may call it."""
        self._expected.put(prompts)

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
            parts.engine.on_step = self._tracer.note_step
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
        while not self._expected.empty():
            parts.engine.expect(self._expected.get())
        if not parts.engine.has_work:
            if self._rows:
                raise RuntimeError(f"the engine has lost {len(self._rows)} rows")
            return
        stepped_at = self._clock()
        for event in parts.engine.step():
            if isinstance(event, Kept):
                self._on_kept(event.token_ids)
                continue
            job, choice = self._rows.get(event.row_id, (None, 0))
            if job is None:
                continue
            if isinstance(event, Begun):
                if job.admitted is None:
                    job.admitted = stepped_at  # the event comes after the step's work on its prompt
                if job.note_cached(choice, event.cached_tokens):
                    self._sink.note_cached(job.request.execution_id, job.cached_tokens)
                    self._tracer.mark(
                        job.request.execution_id,
                        Phase.CACHE_RESTORE,
                        tokens=event.cached_tokens,
                    )
                continue
            if isinstance(event, Failed):
                self._fail(parts.engine, job, event.error)
                continue
            try:
                self._advance(parts.engine, job, choice, event)
            except Exception as error:  # one request's text: the others go on
                logger.exception("an answer failed execution=%s", job.request.execution_id)
                self._fail(parts.engine, job, error)
        self.steps += 1
        self.peak_bytes = parts.engine.peak_bytes
        self.kv_bytes = parts.engine.kv_bytes
        self.peak_kv_bytes = max(self.peak_kv_bytes, self.kv_bytes)

    def _receive(self, *, idle: bool) -> None:
        if idle and not self._waiting:
            self._wait_in_line(self._inbox.get() or ())
        while not self._inbox.empty():
            self._wait_in_line(self._inbox.get() or ())

    def _wait_in_line(self, requests: Sequence[PreparedRequest]) -> None:
        self._waiting.extend(requests)
        if any(request.priority for request in self._waiting):
            self._waiting.sort(key=lambda request: -request.priority)  # stable: FIFO within one

    def _take_cancelled(self) -> set[str]:
        cancelled: set[str] = set()
        while not self._cancelled.empty():
            cancelled.add(self._cancelled.get())
        return cancelled

    def _drop(self, cancelled: set[str], engine: Engine) -> None:
        if not cancelled:
            return
        self._waiting = [r for r in self._waiting if r.execution_id not in cancelled]
        for execution_id in cancelled:
            job = self._jobs.get(execution_id)
            if job is not None:
                self._remove(engine, job)
            self._sink.drop(execution_id)

    def _admit(self, parts: EngineParts) -> None:
        """Hand over what waits, while there is room for the first choice of the next one."""
        while self._waiting and (len(self._rows) < self._max_rows or self._waiting[0].is_urgent):
            request = self._waiting.pop(0)
            try:
                rows, builders, said = self._make_ready(parts, request)
            except Exception as error:  # one request's matcher or text: the others go on
                if request.resumed is not None:
                    logger.warning(
                        "a job begins anew execution=%s (%s)", request.execution_id, error
                    )
                    self._waiting.insert(0, replace(request, resumed=None))
                    continue
                logger.exception("a request cannot begin execution=%s", request.execution_id)
                self._sink.begin(request)
                self._sink.fail(request.execution_id, error)
                continue
            job = _Job(request, builders, began=self._clock())
            self._tracer.until_now(request.execution_id, Phase.ENGINE_REQUEST_WAIT)
            if request.resumed is not None:
                job.cached_tokens = request.resumed.header.cached_tokens
            self._jobs[request.execution_id] = job
            self._sink.begin(request)
            for choice, pieces in enumerate(said):
                if generated := request.generated(choice):
                    self._sink.resume(request.execution_id, choice, generated, pieces)
                elif pieces:
                    self._sink.advance(request.execution_id, choice, NO_TOKEN, pieces)
            going_on = [
                (row, choice) for choice, row in enumerate(rows) if not builders[choice].has_ended
            ]
            self._rows.update((row.row_id, (job, choice)) for row, choice in going_on)
            parts.engine.add([row for row, _ in going_on])
            if not going_on:  # it was lost after its last token
                self._end(job)

    def _make_ready(
        self, parts: EngineParts, request: PreparedRequest
    ) -> tuple[list[RowRequest], list[ChoiceBuilder], list[list[Piece]]]:
        """Return rows and builders of a request, and what is certain of each choice already."""
        rows = request.rows(parts.decoder)
        builders = [self._builder(parts, request, choice) for choice in range(len(rows))]
        said = []
        for choice, (row, builder) in enumerate(zip(rows, builders, strict=True)):
            pieces = builder.begin()
            scores = request.resumed.scores.get(choice, ()) if request.resumed is not None else ()
            for index, token_id in enumerate(row.generated_ids):
                logprobs = TokenLogprobs(*scores[index]) if scores else None
                pieces += builder.push(Token(row.row_id, token_id, logprobs))
            said.append(pieces)
        return rows, builders, said

    @staticmethod
    def _builder(parts: EngineParts, request: PreparedRequest, choice: int) -> ChoiceBuilder:
        prompt = request.prompt_of(choice)
        return ChoiceBuilder(
            parts.decoder,
            request.form.splitter(choice),
            stop_ids=request.stop_ids,
            stop_strings=request.stop_strings,
            token_limit=prompt.token_limit,
            echo=prompt.echo,
        )

    def _advance(self, engine: Engine, job: _Job, choice: int, token: Token) -> None:
        if job.first_token is None:
            job.first_token = self._clock()
            self._tracer.mark(job.request.execution_id, Phase.FIRST_TOKEN)
        builder = job.builders[choice]
        pieces = builder.push(token)
        self._sink.advance(job.request.execution_id, choice, token.token_id, pieces, token.logprobs)
        if not builder.has_ended:
            return
        del self._rows[token.row_id]
        engine.remove([token.row_id])
        if job.has_ended:
            self._end(job)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.request.execution_id]
        choices = [one.choice() for one in job.builders]
        times = None
        if job.first_token is not None:
            admitted = job.began if job.admitted is None else job.admitted
            times = RunTimes(job.began, admitted, job.first_token, self._clock())
        self._sink.end(Generated(job.request, choices, job.cached_tokens, times))

    def _fail(self, engine: Engine, job: _Job, error: Exception) -> None:
        self._remove(engine, job)
        self._sink.fail(job.request.execution_id, error)

    def _remove(self, engine: Engine, job: _Job) -> None:
        engine.remove(job.row_ids)
        self._jobs.pop(job.request.execution_id, None)
        for row_id in job.row_ids:
            self._rows.pop(row_id, None)
