"""qsvc dead: look at the dead letter (RQ's FailedJobRegistry), retry or purge it."""

from __future__ import annotations

from typing import Any

import click

from cli.options import json_option, print_json, redis_option, say, server, tell
from cli.retry_command import say_without_job
from queue_service.dead_letter import DeadLetter


@click.group("dead")
def command() -> None:
    """Jobs that failed for good: list, show, retry, purge.

    Lines that were refused before they were queued are no jobs: the batch's results have them.
    """


def _filters(wrapped: click.decorators.FC) -> click.decorators.FC:
    wrapped = click.option("--code", help="Only those that failed with this code.")(wrapped)
    return click.option("--queue", help="Only those of this queue.")(wrapped)


@command.command("list")
@_filters
@redis_option
@json_option
def list_(queue: str | None, code: str | None, redis_url: str | None, as_json: bool) -> None:
    """List failed jobs with the code and the reason, never their prompts."""
    with server(redis_url) as connection:
        num_listed = 0
        for entry in DeadLetter(connection).entries(queue=queue, code=code):
            num_listed += 1
            if as_json:
                print_json(entry.to_object())
            else:
                tell(f"{entry.job_id}  {entry.queue}  {entry.code}: {entry.message}")
    if not num_listed and not as_json:
        say("no failed jobs")


@command.command("show")
@click.argument("job_id")
@redis_option
def show(job_id: str, redis_url: str | None) -> None:
    """Show all that is known of one failed job, as JSON."""
    with server(redis_url) as connection:
        print_json(DeadLetter(connection).entry(job_id).to_object())


def _selection(wrapped: click.decorators.FC) -> click.decorators.FC:
    """Add what says which jobs: names, or ``--all`` with the filters; and ``--redis``."""
    wrapped = _filters(redis_option(wrapped))
    every = click.option("--all", "everything", is_flag=True, help="All that the filters leave.")
    return click.argument("job_ids", nargs=-1)(every(wrapped))


@command.command("retry")
@_selection
def retry(redis_url: str | None, **selection: Any) -> None:
    """Queue failed jobs again, with a clean record."""
    with server(redis_url) as connection:
        dead = DeadLetter(connection)
        chosen = _chosen(dead, **selection)
        count = dead.retry(chosen)
    click.echo(f"{count} queued again")
    say_without_job(len(chosen) - count)


@command.command("purge")
@_selection
def purge(redis_url: str | None, **selection: Any) -> None:
    """Delete failed jobs. Lines of a batch keep their error in the batch's results."""
    with server(redis_url) as connection:
        dead = DeadLetter(connection)
        count = dead.purge(_chosen(dead, **selection))
    click.echo(f"{count} deleted")


def _chosen(
    dead: DeadLetter,
    *,
    job_ids: tuple[str, ...],
    everything: bool,
    queue: str | None,
    code: str | None,
) -> list[str]:
    if everything == bool(job_ids):
        raise click.UsageError("name jobs, or say --all (with --queue or --code to narrow it)")
    if job_ids:
        return [dead.entry(job_id).job_id for job_id in job_ids]  # one that has not failed raises
    return [entry.job_id for entry in dead.entries(queue=queue, code=code)]
