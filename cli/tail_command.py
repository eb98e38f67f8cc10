"""qsvc tail: print a job's text, or those of a batch's lines, as they are generated."""

from __future__ import annotations

import sys

import click
from redis import Redis
from rich.console import Console

from cli.exits import EXIT_SOME_FAILED
from cli.options import json_option, print_json, redis_option, say, server
from cli.printable import printable
from cli.status_command import is_job
from cli.tail_view import (
    AnswerView,
    JsonView,
    LiveView,
    TailView,
    ending,
    event_object,
    is_shown,
)
from cli.terminal import ending_with, is_live
from queue_service.batch_tail import BatchTail
from queue_service.batches import Batches
from queue_service.client import Reconnect, StreamReader
from queue_service.streams import End, EndReason, Restarted, Text


@click.command("tail", short_help="Print the text of a job or a batch as it comes.")
@click.argument("batch_or_job")
@click.option(
    "--from-start", is_flag=True, help="Of a batch, also the answers that had come before."
)
@redis_option
@json_option
def command(batch_or_job: str, from_start: bool, redis_url: str | None, as_json: bool) -> None:
    """Print the text of a job as it comes, from its beginning, or those of a batch's lines.

    A batch's texts come with their custom ids: on a terminal as they are generated, elsewhere each
    answer at its end. With --json every event is an object, one a line. Ends with 1 when the job,
    or a line of the batch, failed or was cancelled.
    """
    with server(redis_url) as connection, ending_with():
        if is_job(batch_or_job):
            is_well = _tail_job(connection, batch_or_job, as_json=as_json)
        else:
            is_well = _tail_batch(connection, batch_or_job, from_start=from_start, as_json=as_json)
    if not is_well:
        sys.exit(EXIT_SOME_FAILED)


def _tail_job(connection: Redis, job_id: str, *, as_json: bool) -> bool:
    patient = Reconnect(
        on_outage=lambda error: say(f"\n(the server is away and is waited for: {error})")
    )
    is_terminal = sys.stdout.isatty()
    has_text, is_well = False, True
    for event in StreamReader(connection, job_id, reconnect=patient):
        if isinstance(event, End):
            is_well = event.reason is EndReason.DONE
        if as_json:
            print_json(event_object(job_id, event))
            continue
        if not is_shown(event):
            continue
        match event:
            case Text(text=text):
                # What a model writes goes to files as it is; a terminal would obey some of it.
                # click would take colours out of it.
                shown = printable(text, keep="\n\t") if is_terminal else text
                click.echo(shown, nl=False, color=True)
                has_text = True
            case Restarted() if has_text:
                say("\n(the job began anew on another worker)")
            case End() as end:
                click.echo()
                if not is_well:
                    say(f"{job_id}: {ending(end)}")
    return is_well


def _tail_batch(connection: Redis, batch_id: str, *, from_start: bool, as_json: bool) -> bool:
    if Batches(connection).get(batch_id).status.is_final and not from_start and not as_json:
        say("the batch has ended; --from-start prints its answers")
    console = Console(highlight=False)
    view: TailView
    if as_json:
        view = JsonView()
    elif is_live(console):
        view = LiveView(console)
    else:
        view = AnswerView(lambda line: click.echo(line, color=True), say)
    tail = BatchTail(
        connection,
        batch_id,
        from_start=from_start,
        has_text=not isinstance(view, AnswerView),
        reconnect=Reconnect(
            on_outage=lambda error: view.note(f"the server is away and is waited for: {error}")
        ),
    )
    with view:
        for told in tail:
            view.show(told, tail.batch)
    batch = Batches(connection).get(batch_id)
    if not as_json:
        cancelled = f", {batch.cancelled} cancelled" if batch.cancelled else ""
        say(f"{batch.total} lines: {batch.completed} completed, {batch.failed} failed{cancelled}")
    return not (batch.failed or batch.cancelled)
