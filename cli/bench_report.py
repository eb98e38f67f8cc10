"""Tells what a benchmark came to: as a table, as lines, and as an object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from cli.printable import printable
from cli.terminal import UNKNOWN, share
from queue_service.doctor import gigabytes

if TYPE_CHECKING:
    from workers.bench import BenchReport
    from workers.bench_figures import RunFigures, Spread

# Where more than half of the cores had work already, the figures are of a busy machine.
_BUSY_SHARE = 0.5
_EQUAL_SHARE = 0.8


def report_lines(report: BenchReport) -> tuple[list[Text], list[Text]]:
    """Return what a person reads before the table, and what after it."""
    machine, model = report.look.machine, report.look.model
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    head = [
        f"model    {model.name}: {model.family}, {gigabytes(model.weight_bytes)} as {model.dtype}",
        f"jobs     {report.num_jobs} of {report.source}",
        f"machine  {machine.device}, {machine.cores} cores, {gigabytes(machine.memory_bytes)} of "
        f"memory; a worker may use {gigabytes(machine.usable_bytes)}, of which "
        f"{gigabytes(model.kv_bytes)} are for keys and values",
        f"system   {machine.system}; {versions}",
    ]
    if machine.blas is not None:
        head.append(f"         {machine.blas}")
    if machine.load > _BUSY_SHARE * machine.cores:
        head.append(
            f"busy     {machine.load:.1f} processes wanted one of {machine.cores} cores before it "
            "began: figures of an idle machine would be higher"
        )
    foot = [f"{one.rows} rows were not run: {one.reason}" for one in report.skipped]
    for run in report.runs:
        foot += _doubts(run)
    cores = sorted(run.cores for run in report.runs if run.cores)
    # What a CPU does for a GPU depends on the rows.
    if machine.kind == "cpu" and cores and cores[0] < _EQUAL_SHARE * cores[-1]:
        foot.append(
            f"other work took more from some runs than from others (the worker had {cores[0]:.2f} "
            f"to {cores[-1]:.2f} cores): do not compare them closely"
        )
    if report.was_stopped:
        foot.append("stopped: the row counts that are missing were not run to their end")
    if report.failure is not None:
        foot.append(f"ended by a fault: {report.failure}")
    best = best_line(report.runs)
    if best is not None:
        foot.append(best)
    keep = "\n"
    return [Text(printable(line)) for line in head], [
        Text(printable(line, keep=keep)) for line in foot
    ]


def report_table(runs: Sequence[RunFigures]) -> Table:
    """Return the figures, a column for each row count."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("rows")
    for run in runs:
        table.add_column(str(run.rows), justify="right")
    for label, cell in _FIGURES:
        table.add_row(label, *(cell(run) for run in runs))
    return table


def report_object(report: BenchReport) -> dict[str, Any]:
    """Return everything for ``--json``; sizes are bytes, times are seconds."""
    seen = report.look.to_object()
    seen["model"].pop("row_bytes")
    best = _best(report.runs)
    return {
        **seen,
        "jobs": report.num_jobs,
        "source": report.source,
        "runs": [run.to_object() for run in report.runs],
        "skipped": [asdict(one) for one in report.skipped],
        "best_rows": None if best is None else best.rows,
        "stopped": report.was_stopped,
        "failure": report.failure,
    }


def best_line(runs: Sequence[RunFigures]) -> str | None:
    """Return which row count to take, and what it costs the single job; None of one run."""
    best = _best(runs)
    if best is None or len(runs) < 2:
        return None
    least = min(runs, key=lambda run: run.rows)
    most = max(runs, key=lambda run: run.tokens_per_second)
    text = f"best for throughput: {_rows(best.rows)}, {best.tokens_per_second:,.1f} tokens/s"
    if best is not most:
        text += f" (within 5% of {_rows(most.rows)}, which let each job wait longer)"
    if best is least or not least.tokens_per_second:
        return text
    text += f", {best.tokens_per_second / least.tokens_per_second:.1f} times {_rows(least.rows)}"
    costs = [
        f"{what} {_seconds(there.p50)} instead of {_seconds(here.p50)}"
        for what, there, here in (
            ("a job takes", best.job, least.job),
            ("its first token", best.first_token, least.first_token),
        )
        if there is not None and here is not None
    ]
    return f"{text}; at the median {', '.join(costs)}" if costs else text


def _best(runs: Sequence[RunFigures]) -> RunFigures | None:
    # The figures know no MLX, and the command has loaded them by then.
    from workers.bench_figures import best_run

    return best_run(runs)


def _doubts(run: RunFigures) -> list[str]:
    found = []
    if run.failed:
        found.append(f"{_rows(run.rows)}: {run.failed} jobs failed, such as: {run.failure}")
    if run.restarts:
        found.append(f"{_rows(run.rows)}: the worker died {run.restarts} times, see qsvc doctor")
    if run.jobs and run.most_rows < run.rows:
        found.append(
            f"{_rows(run.rows)}: no more than {run.most_rows} were filled at once, for want of "
            "memory, or because jobs ended too soon"
        )
    return found


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _seconds(value: float) -> str:
    """Return a time with three digits, in the unit that suits it."""
    if value < 0.9995:
        return f"{_three_digits(1000 * value)} ms"
    return f"{_three_digits(value)} s"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _spread(value: Spread | None) -> str:
    return UNKNOWN if value is None else f"{_seconds(value.p50)} / {_seconds(value.p95)}"


_FIGURES: Sequence[tuple[str, Callable[[RunFigures], str]]] = (
    ("jobs/s", lambda run: f"{run.jobs_per_second:.2f}"),
    ("generated tokens/s", lambda run: f"{run.tokens_per_second:,.1f}"),
    (
        "prompt tokens/s, computed",
        lambda run: f"{run.computed_prompt_tokens_per_second:,.1f}",
    ),
    ("prompts, cached", lambda run: share(run.cached_share)),
    ("first token, p50 / p95", lambda run: _spread(run.first_token)),
    ("between tokens, p50 / p95", lambda run: _spread(run.between_tokens)),
    ("whole job, p50 / p95", lambda run: _spread(run.job)),
    ("most memory", lambda run: gigabytes(run.peak_bytes)),
    ("of it keys and values", lambda run: gigabytes(run.peak_kv_bytes)),
    ("rows filled at once", lambda run: str(run.most_rows)),
    ("jobs failed", lambda run: str(run.failed)),
    ("worker restarts", lambda run: str(run.restarts)),
    ("seconds", lambda run: f"{run.seconds:,.1f}"),
    ("cores busy with it", lambda run: f"{run.cores:.2f}" if run.cores else UNKNOWN),
)
