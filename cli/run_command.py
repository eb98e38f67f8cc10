"""qsvc run: a batch file from start to end on this machine, with everything embedded."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cli.exits import EXIT_INTERRUPTED, EXIT_SOME_FAILED
from cli.options import json_option, on_stop, print_json, say
from cli.progress import Progress
from queue_service.settings import (
    CheckpointSettings,
    PathSettings,
    RetentionSettings,
    SubmitSettings,
    WorkerSettings,
)


@click.command("run", short_help="Run a file of requests through a local model.")
@click.argument("file")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="A file for the results."
)
@click.option(
    "--errors", type=click.Path(path_type=Path), help="A file of its own for lines that failed."
)
@click.option("--model", help="Hugging Face id, local folder, .gguf file (default: smollm2-135m).")
@click.option("--unordered", is_flag=True, help="Write lines as they end, not in input order.")
@click.option("--strict", is_flag=True, help="One bad line refuses the whole file.")
@click.option("--new", "is_fresh", is_flag=True, help="Run again from the start; replaces -o.")
@click.option(
    "--plan/--no-plan",
    default=None,
    help="Look for lines that begin alike, to keep what they share (default: yes).",
)
@click.option("--slots", type=int, help="Most requests generated at once (default: 32).")
@click.option("--dtype", help="Weights: auto, float32, float16, bfloat16 or stored.")
@click.option("--kv-memory", metavar="SIZE", help="Memory for keys and values, such as 8GB.")
@click.option("--blas-threads", type=int, help="CPU threads of OpenBLAS (Linux).")
@click.option("--device-slot", help="gpu:0, cpu:0, cpu:1 …: one run or worker on each.")
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write where each line's time went, for Perfetto or chrome://tracing.",
)
@json_option
def command(
    file: str,
    output: Path,
    errors: Path | None,
    model: str | None,
    unordered: bool,
    strict: bool,
    is_fresh: bool,
    plan: bool | None,
    slots: int | None,
    dtype: str | None,
    kv_memory: str | None,
    blas_threads: int | None,
    device_slot: str | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Run every line of FILE (JSONL, .gz, .zst, - for standard input) through a local model.

    No server to set up. Stopped or killed at any point, the same command goes on where it was
    and repeats nothing that has a result. Ctrl-C gives running requests ten seconds to end;
    again: it stops at once.
    """
    from workers.local_run import LocalRun, RunOptions
    from workers.model_info import DEMO_MODEL
    from workers.supervisor import default_slot

    worker = WorkerSettings.load(
        model=model,
        slots=slots,
        dtype=dtype,
        kv_memory=kv_memory,
        blas_threads=blas_threads,
        device_slot=device_slot,
    )
    options = RunOptions(
        file=file,
        output=output,
        errors=errors,
        model=worker.model or DEMO_MODEL,
        unordered=unordered,
        strict=strict,
        is_fresh=is_fresh,
        slot=worker.device_slot or default_slot(),
        trace=trace,
    )
    submit = SubmitSettings.load(plan=plan)
    if not CheckpointSettings.load().enabled:  # nothing would be kept
        submit = submit.model_copy(update={"plan": False})
    if worker.model is None:
        say(f"model: {DEMO_MODEL}, the demo model; name another with --model")
    with Progress(is_shown=not as_json) as progress:
        run = LocalRun(
            options,
            worker=worker,
            submit=submit,
            retention=RetentionSettings.load(),
            cache_folder=PathSettings.load().cache_folder,
            on_update=progress.update,
            on_note=progress.note,
        )

        on_stop(run.stop)
        summary = run.run()
    if as_json:
        print_json(summary.to_object())
    else:
        for line in summary.lines():
            say(line)
    if summary.was_stopped:
        sys.exit(EXIT_INTERRUPTED)
    if summary.batch.failed or summary.batch.cancelled:
        sys.exit(EXIT_SOME_FAILED)
