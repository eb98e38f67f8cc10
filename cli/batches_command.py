"""qsvc batches: list batches."""

from __future__ import annotations

import time

import click

from cli.options import json_option, print_json, redis_option, say, server, tell
from queue_service.batches import Batches


@click.command("batches")
@click.option(
    "--newest",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="How many, the newest first.",
)
@redis_option
@json_option
def command(newest: int, redis_url: str | None, as_json: bool) -> None:
    """List the batches of a server."""
    with server(redis_url) as connection:
        found = Batches(connection).newest(newest)
    if as_json:
        print_json({"object": "list", "data": [batch.to_object() for batch in found]})
        return
    if not found:
        say("no batches on this server")
    for batch in found:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch.timestamps["created_at"]))
        failed = f", {batch.failed} failed" if batch.failed else ""
        cancelled = f", {batch.cancelled} cancelled" if batch.cancelled else ""
        tell(
            f"{batch.id}  {created}  {batch.status.value:<11}  "
            f"{batch.ended}/{batch.total}{failed}{cancelled}  {batch.model}"
        )
