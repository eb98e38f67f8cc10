"""qsvc tail: print a job's text as it is generated."""

from __future__ import annotations

import sys

import click

from cli.exits import EXIT_SOME_FAILED
from cli.options import redis_option, say, server
from queue_service.client import Reconnect, StreamReader
from queue_service.streams import End, EndReason, Restarted, Text, TextKind


@click.command("tail")
@click.argument("job_id")
@redis_option
def command(job_id: str, redis_url: str | None) -> None:
    """Print the text of a job as it comes, from its beginning."""
    patient = Reconnect(
        on_outage=lambda error: say(f"\n(the server is away and is waited for: {error})")
    )
    has_text = False
    with server(redis_url) as connection:
        for event in StreamReader(connection, job_id, reconnect=patient):
            match event:
                case Text(choice=0, kind=TextKind.TEXT, text=text):
                    click.echo(text, nl=False)
                    has_text = True
                case Restarted(choice=0) if has_text:
                    say("\n(the job began anew on another worker)")
                case End(reason=reason, message=message):
                    click.echo()
                    if reason is not EndReason.DONE:
                        say(f"{job_id}: {reason}" + (f": {message}" if message else ""))
                        sys.exit(EXIT_SOME_FAILED)
