"""qsvc tail: print a job's text as it is generated."""

from __future__ import annotations

import sys

import click

from cli.exits import EXIT_SOME_FAILED
from cli.options import redis_option, say, server
from queue_service.streams import StreamEnd, read_text


@click.command("tail")
@click.argument("job_id")
@redis_option
def command(job_id: str, redis_url: str | None) -> None:
    """Print the text of a job as it comes, from its beginning."""
    with server(redis_url) as connection:
        for item in read_text(connection, job_id):
            if isinstance(item, StreamEnd):
                click.echo()
                if item.reason != "done":
                    say(f"{job_id}: {item.reason}" + (f": {item.message}" if item.message else ""))
                    sys.exit(EXIT_SOME_FAILED)
                return
            if item.restarted:
                say("\n(the job began anew on another worker)")
            click.echo(item.text, nl=False)
