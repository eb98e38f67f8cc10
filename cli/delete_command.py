"""qsvc delete: delete a batch with everything it owns."""

from __future__ import annotations

import sys

import click

from cli.exits import EXIT_SOME_FAILED
from cli.options import redis_option, say, server
from queue_service.batches import Batches


@click.command("delete", short_help="Delete a batch from the server.")
@click.argument("batch_id")
@click.option("--yes", is_flag=True, help="Do not ask.")
@redis_option
def command(batch_id: str, yes: bool, redis_url: str | None) -> None:
    """Cancel a batch and delete it from the server: its jobs, results and streams.

    Files that results were written to stay. Ends with 1 when the answer is no, or nobody can be
    asked.
    """
    with server(redis_url) as connection:
        batches = Batches(connection)
        batch = batches.get(batch_id)
        if not yes and not _confirmed(f"delete {batch.total} lines and their results?"):
            say(f"{batch_id} is not deleted; with --yes it is, and nobody is asked")
            sys.exit(EXIT_SOME_FAILED)
        batches.delete(batch_id)
    click.echo(f"{batch_id} deleted")


def _confirmed(question: str) -> bool:
    """Ask a person yes or no; the end of the input is a no. Ctrl-C ends the command."""
    click.echo(f"{question} [y/N]: ", nl=False, err=True)
    answer = sys.stdin.readline() if sys.stdin is not None else ""
    if not answer.endswith("\n"):
        click.echo(err=True)
    return answer.strip().lower() in ("y", "yes")
