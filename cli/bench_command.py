"""qsvc bench: how fast a person's own model and file are on this machine, by row counts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from cli.bench_chart import chart
from cli.bench_report import report_lines, report_object, report_table
from cli.exits import EXIT_INTERRUPTED, EXIT_SOME_FAILED
from cli.options import has_worker_packages, json_text, on_stop, say
from cli.progress import Progress
from queue_service.batch_file import open_batch
from queue_service.errors import ConfigurationError, ModelUnavailable
from queue_service.follow import Standing
from queue_service.settings import PathSettings, WorkerSettings

if TYPE_CHECKING:
    from workers.bench import BenchReport
    from workers.bench_jobs import BenchJobs

_DEFAULT_ROWS = "1,8,16,32"
# A file or a pipe has no columns; every figure shall be in it.
_PLAIN_COLUMNS = 160


def _row_counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Read row counts such as ``1,8,16``; ascending, each once."""
    try:
        counts = sorted({int(part) for part in value.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise click.BadParameter(f"{value!r} is no list of row counts such as {_DEFAULT_ROWS}")
    return tuple(counts)


@click.command("bench", short_help="Measure a model and a file on this machine.")
@click.argument("file", required=False)
@click.option("--model", help="Hugging Face id, local folder, .gguf file (default: smollm2-135m).")
@click.option(
    "--rows",
    callback=_row_counts,
    metavar="LIST",
    default=_DEFAULT_ROWS,
    show_default=True,
    help="Requests generated at once; a run for each of these.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="How many jobs each run has (default: twice the most rows).",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="No answer is longer, whatever its line says."
)
@click.option("--dtype", help="Weights: auto, float32, float16, bfloat16 or stored.")
@click.option("--kv-memory", metavar="SIZE", help="Memory for keys and values, such as 8GB.")
@click.option("--blas-threads", type=int, help="CPU threads of OpenBLAS (Linux).")
@click.option("--device-slot", help="gpu:0, cpu:0, cpu:1 …: one run or worker on each.")
@click.option("--json", "json_path", metavar="OUT", help="Write all figures; - is standard output.")
@click.option("--svg", "svg_path", metavar="OUT", help="Draw a picture of them.")
def command(
    file: str | None,
    model: str | None,
    rows: tuple[int, ...],
    jobs: int | None,
    max_tokens: int | None,
    dtype: str | None,
    kv_memory: str | None,
    blas_threads: int | None,
    device_slot: str | None,
    json_path: str | None,
    svg_path: str | None,
) -> None:
    """Run the first jobs of FILE, or prompts of our own, once for each of --rows.

    Each run is one of `qsvc run`, with a server, a worker and checkpoints of its own; nothing is
    kept of it. Loading the model is not counted. Ctrl-C ends it with what was measured so far.
    """
    worker = WorkerSettings.load(
        model=model,
        dtype=dtype,
        kv_memory=kv_memory,
        blas_threads=blas_threads,
        device_slot=device_slot,
    )
    for path in (json_path, svg_path):
        _check_output(path)
    if not has_worker_packages():
        raise ModelUnavailable("MLX is not installed: pip install 'qsvc[worker]'")
    from workers.bench_jobs import NUM_BUILT_IN, built_in_jobs, jobs_of_file
    from workers.model_info import DEMO_MODEL

    count = jobs or 2 * max(rows)
    if file is None:
        work = built_in_jobs(jobs or min(count, NUM_BUILT_IN), max_tokens=max_tokens)
    else:
        with open_batch(file) as opened:
            work = jobs_of_file(opened, count, max_tokens=max_tokens)
    if worker.model is None:
        say(f"model: {DEMO_MODEL}, the demo model; name another with --model")
        worker = worker.model_copy(update={"model": DEMO_MODEL})
    report = _measure(work, rows, worker)
    if report is None:
        sys.exit(EXIT_INTERRUPTED)
    _tell(report, json_path=json_path, svg_path=svg_path)
    if report.was_stopped:
        sys.exit(EXIT_INTERRUPTED)
    if report.failure or not report.runs or any(run.failed for run in report.runs):
        sys.exit(EXIT_SOME_FAILED)


def _measure(work: BenchJobs, rows: tuple[int, ...], worker: WorkerSettings) -> BenchReport | None:
    from workers import bench
    from workers.supervisor import default_slot

    shown = _Shown()
    run = bench.Bench(
        work,
        rows,
        worker=worker,
        slot=worker.device_slot or default_slot(),
        cache_folder=PathSettings.load().cache_folder,
        on_begin=shown.begin,
        on_update=shown.update,
        on_note=shown.note,
    )

    on_stop(run.stop)
    try:
        return run.run()
    finally:
        shown.end()


class _Shown:
    """The progress of the run that goes on: a picture for each, since rates begin anew."""

    def __init__(self) -> None:
        self._progress = Progress(is_shown=True)
        self._is_open = False

    def begin(self, rows: int) -> None:
        """Show the next run."""
        self.end()
        say(f"{rows} rows" if rows > 1 else "1 row")
        self._progress = Progress(is_shown=True)
        self._progress.__enter__()
        self._is_open = True

    def update(self, standing: Standing) -> None:
        """Show how it stands."""
        self._progress.update(standing)

    def note(self, text: str) -> None:
        """Say something above the picture."""
        self._progress.note(text)

    def end(self) -> None:
        """Leave the picture as it is."""
        if self._is_open:
            self._progress.__exit__(None, None, None)
            self._is_open = False


def _tell(report: BenchReport, *, json_path: str | None, svg_path: str | None) -> None:
    if json_path != "-":
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=_PLAIN_COLUMNS)
        head, foot = report_lines(report)
        for line in head:
            console.print(line, soft_wrap=True)
        if report.runs:
            console.print(report_table(report.runs))
        for line in foot:
            console.print(line, soft_wrap=True)
    if json_path == "-":
        click.echo(json_text(report_object(report)))
    elif json_path is not None:
        _write(json_path, json_text(report_object(report), indent=2) + "\n")
    if svg_path is not None and report.runs:
        model = report.look.model
        title = f"{model.name} ({model.dtype}), {report.num_jobs} jobs of {report.source}"
        _write(svg_path, chart(report.runs, title=title, subtitle=report.look.machine.device))


def _check_output(path: str | None) -> None:
    """Refuse a place where nothing can be written before hours of work, not after them."""
    if path is None or path == "-":
        return
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise ConfigurationError(f"cannot write {path}: name a file in a folder that is there")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
    say(f"written: {path}")
