"""qsvc results: write a batch's results to a file."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from cli.exits import EXIT_SOME_FAILED
from cli.following import follow_shown
from cli.options import redis_option, say, server
from cli.progress import Progress
from cli.status_command import is_job
from cli.terminal import ending_with
from queue_service import keys
from queue_service.batches import Batches
from queue_service.errors import ConfigurationError
from queue_service.output import BatchOutput, CompletionOrder, InputOrder, OutputFile
from queue_service.results import BatchReader


@click.command("results", short_help="Write the results of a batch to a file.")
@click.argument("batch_id")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The file to write or go on with.",
)
@click.option("--errors", type=click.Path(path_type=Path), help="A file for lines that failed.")
@click.option("--follow", "is_following", is_flag=True, help="Go on until the batch has ended.")
@click.option("--unordered", is_flag=True, help="In the order of the ends, not of the input.")
@click.option("--overwrite", is_flag=True, help="Replace a file that holds something else.")
@redis_option
def command(
    batch_id: str,
    output: Path,
    errors: Path | None,
    is_following: bool,
    unordered: bool,
    overwrite: bool,
    redis_url: str | None,
) -> None:
    """Write the results of a batch; run again, go on where the file ends."""
    if is_job(batch_id) and batch_id.startswith("batch_"):
        raise click.UsageError(
            f"results takes a batch's id, here {keys.line_of(batch_id)[0]}; "
            f"qsvc status and qsvc tail show one line of it, such as {batch_id}"
        )
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(server(redis_url))
        batch = Batches(connection).get(batch_id)
        order = CompletionOrder if unordered else InputOrder
        files = [
            stack.enter_context(contextlib.closing(OutputFile(path)))
            for path in (output, errors)
            if path is not None
        ]
        if overwrite:
            for file in files:
                file.truncate(0)
        writer = BatchOutput(BatchReader(connection, batch_id), order(connection, batch_id), *files)
        try:
            writer.resume()
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}, or replace it with --overwrite") from error
        if is_following:
            with ending_with(), Progress(is_shown=True) as progress:
                batch = follow_shown(connection, batch_id, writer, progress)
        else:
            while writer.advance():
                pass
    cancelled = f", {batch.cancelled} cancelled or expired" if batch.cancelled else ""
    say(
        f"{writer.num_written} of {batch.total} lines in {output}, {batch.failed} failed{cancelled}"
    )
    if writer.num_written < batch.total:
        say("the batch has not ended; --follow waits for the rest")
    if batch.failed or batch.cancelled:
        sys.exit(EXIT_SOME_FAILED)
