"""qsvc trace: what happened to a job when, as a waterfall or for a trace viewer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
from redis import Redis

from cli.options import json_option, print_json, redis_option, say, server, tell
from cli.status_command import is_job
from queue_service.batches import Batches
from queue_service.errors import JobNotFound
from queue_service.trace import (
    Event,
    Trace,
    read_batch_traces,
    read_traces,
    write_chrome_trace,
)

_LEAST_BAR, _MOST_BAR = 10, 60
_BAR, _MARK = "█", "▏"


@click.command("trace", short_help="Show what happened to a job when.")
@click.argument("names", metavar="JOB|BATCH...", nargs=-1, required=True)
@click.option(
    "--chrome",
    "chrome_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the traces for Perfetto or chrome://tracing.",
)
@redis_option
@json_option
def command(
    names: tuple[str, ...], chrome_file: Path | None, redis_url: str | None, as_json: bool
) -> None:
    """Show the traces of jobs or of all lines of batches, an execution each: where their time went.

    A job is traced when it was submitted with --trace, or when its worker traces some of all
    (worker.trace_every). Traces are kept for a day. A line of a batch has the id BATCH-LINE.
    """
    with server(redis_url) as connection:
        found = {name: _traces_of(connection, name) for name in names}
    missing = [name for name, traces in found.items() if not traces]
    if missing:
        raise JobNotFound(
            f"no trace of {', '.join(missing)}: jobs are traced when they are submitted with "
            "--trace, or by worker.trace_every, and traces are kept for a day"
        )
    traces = [trace for one in found.values() for trace in one]
    if chrome_file is not None:
        write_chrome_trace(chrome_file, traces)
        say(f"{len(traces)} traces written to {chrome_file}: open it in ui.perfetto.dev")
    if as_json:
        for trace in traces:
            print_json(json.loads(trace.to_json()))
    elif chrome_file is None:
        width = shutil.get_terminal_size().columns
        for trace in traces:
            for line in waterfall(trace, width):
                tell(line)


def _traces_of(connection: Redis, name: str) -> list[Trace]:
    if is_job(name):
        return read_traces(connection, name)
    batch = Batches(connection).get(name)
    return list(read_batch_traces(connection, batch.id))


def waterfall(trace: Trace, width: int) -> list[str]:
    """Return a trace as lines: each phase, when it began, how long it took, and a bar."""
    head = (
        f"{trace.job_id}  {trace.outcome}  attempt {trace.attempt}  {_span(trace.total_ms)}"
        f"  worker {trace.worker}"
    )
    texts = [(e.phase, _span(e.start_ms), _span(e.duration_ms)) for e in trace.events]
    columns = [max(map(len, column)) for column in zip(*texts, strict=True)] or [0, 0, 0]
    told = max(map(len, map(_told, trace.events)), default=0)
    room = min(_MOST_BAR, max(_LEAST_BAR, width - sum(columns) - told - 9))
    lines = [head]
    for event, (phase, began, took) in zip(trace.events, texts, strict=True):
        bar = _bar(event, trace.total_ms, room)
        text = f"{phase:<{columns[0]}}  {began:>{columns[1]}}  {took:>{columns[2]}}  {bar:<{room}}"
        lines.append(f"{text}  {_told(event)}".rstrip())
    return lines


def _bar(event: Event, total_ms: float, room: int) -> str:
    scale = room / max(total_ms, 1e-3)
    start = min(room - 1, int(event.start_ms * scale))
    length = round(event.duration_ms * scale)
    return " " * start + (_BAR * min(length, room - start) if length >= 1 else _MARK)


def _told(event: Event) -> str:
    return " ".join(f"{name}={value}" for name, value in event.attributes.items() if value != 0)


def _span(milliseconds: float) -> str:
    if milliseconds >= 10_000:
        return f"{milliseconds / 1e3:.1f} s"
    return f"{milliseconds:.1f} ms"
