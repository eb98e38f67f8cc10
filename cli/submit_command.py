"""qsvc submit: queue a batch file on a Redis server."""

from __future__ import annotations

import secrets
import sys

import click
from redis import Redis

from cli.exits import EXIT_INTERRUPTED, EXIT_SOME_FAILED
from cli.following import follow_shown
from cli.options import json_option, print_json, redis_option, say, seconds_of, server, tell
from cli.progress import Progress
from cli.terminal import ending_with
from queue_service import keys
from queue_service.batch_file import open_batch
from queue_service.batches import Batch, Batches
from queue_service.collector import collected
from queue_service.connection import check_server
from queue_service.prefix_plan import CHARS_PER_TOKEN, PrefixPlan
from queue_service.served import why_unserved
from queue_service.settings import RedisSettings, RetentionSettings, SubmitSettings
from queue_service.submission import (
    Feeder,
    Preview,
    SubmitOptions,
    feeding,
    preview,
    submit_file,
    wait_for_disk,
)

_MOST_SHOWN = 10
_MOST_SECONDS = 315_360_000


def _as_seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read a length of time; without a unit it is in seconds."""
    if value is None:
        return None
    seconds = seconds_of(f"{value}s" if value.isdecimal() else value)
    if not seconds or seconds > _MOST_SECONDS:
        raise click.BadParameter(
            f"{value!r} is no time such as 3600 (seconds), 90m, 12h or 2d, of ten years at most"
        )
    return seconds


@click.command("submit", short_help="Queue the lines of a file on a Redis server.")
@click.argument("file")
@redis_option
@click.option("--model", help="The model that answers (default: any worker's).")
@click.option("--alias", help="The alias of the model's workers (default: from --model).")
@click.option("--priority", type=click.Choice(["high", "low"]), help="Before or after the rest.")
@click.option("--key", default="", help="Tells submissions of the same file apart.")
@click.option("--new", "is_fresh", is_flag=True, help="A fresh run, though the file ran before.")
@click.option("--stream", is_flag=True, help="Write every line's text to its stream as it comes.")
@click.option("--trace", "is_traced", is_flag=True, help="Trace every line, for qsvc trace.")
@click.option("--strict", is_flag=True, help="One bad line refuses the whole file.")
@click.option(
    "--plan/--no-plan",
    default=None,
    help="Look for lines that begin alike, to keep what they share (default: yes).",
)
@click.option("--dry-run", is_flag=True, help="Say what would be queued, and queue nothing.")
@click.option(
    "--expires-in",
    callback=_as_seconds,
    metavar="TIME",
    help="Give up what has not ended by then: seconds, or a time such as 90m, 12h or 2d.",
)
@click.option("--metadata", multiple=True, metavar="NAME=VALUE", help="Kept with the batch.")
@click.option("--wait", "is_waiting", is_flag=True, help="Show how it comes on until it has ended.")
@json_option
def command(
    file: str,
    redis_url: str | None,
    model: str | None,
    alias: str | None,
    priority: str | None,
    key: str,
    is_fresh: bool,
    stream: bool,
    is_traced: bool,
    strict: bool,
    plan: bool | None,
    dry_run: bool,
    expires_in: int | None,
    metadata: tuple[str, ...],
    is_waiting: bool,
    as_json: bool,
) -> None:
    """Queue the lines of FILE (JSONL, .gz, .zst, or - for standard input).

    Submitting the same file again queues nothing twice. Prints the batch's id. With --dry-run it
    needs no server, shows bad lines and which lines begin alike, and ends with 1 when there are bad
    lines. With --wait it ends with 1 when lines failed or were cancelled; Ctrl-C then ends the
    waiting, and not the batch.
    """
    submit = SubmitSettings.load(plan=plan)
    if dry_run:
        with open_batch(file) as opened:
            found = preview(opened, submit, strict=strict)
        _show(found, as_json=as_json)
        if found.num_errors:
            sys.exit(EXIT_SOME_FAILED)
        return
    name = alias or (keys.alias_for(model) if model else "default")
    options = SubmitOptions(
        queue=keys.queue_name(name, priority),
        model=model or name,
        key=secrets.token_hex(8) if is_fresh else key,
        stream=stream,
        trace=is_traced,
        strict=strict,
        expires_in_seconds=expires_in,
        metadata=_pairs(metadata),
        submit=submit,
        retention=RetentionSettings.load(),
    )
    with (
        server(redis_url, instead="or use `qsvc run`, which needs none") as connection,
        open_batch(file) as opened,
        collected("qsvc-submit", is_wanted=is_traced) as spans,
    ):
        for finding in check_server(connection):
            if finding.fix:
                say(f"server: {finding.what}; {finding.fix}")
        if is_waiting:
            feeder = Feeder(connection, opened, options, spans)
            _wait(connection, RedisSettings.load(url=redis_url), feeder, as_json=as_json)
            return
        submission = submit_file(connection, opened, options, spans=spans, on_plan=_say_plan)
        is_on_disk = wait_for_disk(connection)
        batch = submission.batch
        why_unserved_now = why_unserved(connection, options.queue, options.model)
    if as_json:
        print_json({**batch.to_object(), "is_new": submission.is_new})
        return
    click.echo(batch.id)
    word = "submitted" if submission.is_new else "was submitted before, nothing queued twice:"
    failed = f", {batch.failed} of them refused or failed already" if batch.failed else ""
    say(f"{word} {batch.total} lines on {options.queue}{failed}")
    if not is_on_disk:
        say("the server cannot say that the lines are on its disk; a crash of it may lose them")
    if why_unserved_now and not batch.status.is_final:
        say(why_unserved_now)
    say(f"follow it: qsvc results {batch.id} -o results.jsonl --follow")


def _wait(
    connection: Redis,
    redis: RedisSettings,
    feeder: Feeder,
    *,
    as_json: bool,
) -> None:
    """Feed the batch and wait for its end; the exit code says whether all of it was answered."""
    if not as_json:
        click.echo(feeder.batch_id)
    failures: list[Exception] = []
    with ending_with(), Progress(is_shown=not as_json) as progress:
        try:
            with feeding(
                feeder,
                redis,
                on_plan=lambda plan: progress.note(plan.summary()) if plan.num_groups else None,
                on_failure=failures.append,
                should_stop=lambda: False,
            ):
                batch = follow_shown(
                    connection,
                    feeder.batch_id,
                    None,
                    progress,
                    should_stop=lambda: bool(failures),
                )
            is_interrupted = False
        except KeyboardInterrupt:
            batch, is_interrupted = Batches(connection).get(feeder.batch_id), True
            wait_for_disk(connection)
    if failures:
        raise failures[0]
    if as_json:
        print_json({**batch.to_object(), "is_new": feeder.is_new})
    elif is_interrupted:
        say(_goes_on(batch))
    else:
        say(_ended(batch))
    if is_interrupted:
        sys.exit(EXIT_INTERRUPTED)
    if batch.failed or batch.cancelled:
        sys.exit(EXIT_SOME_FAILED)


def _ended(batch: Batch) -> str:
    cancelled = f", {batch.cancelled} cancelled or expired" if batch.cancelled else ""
    return (
        f"{batch.total} lines: {batch.completed} completed, {batch.failed} failed{cancelled}\n"
        f"tokens: {batch.prompt_tokens} in ({batch.cached_tokens} cached), "
        f"{batch.completion_tokens} out\n"
        f"write them to a file: qsvc results {batch.id} -o results.jsonl"
    )


def _goes_on(batch: Batch) -> str:
    if not batch.is_submitted:
        return "not all lines are queued: run the same command to go on"
    return f"the batch goes on; follow it: qsvc results {batch.id} -o results.jsonl --follow"


def _say_plan(plan: PrefixPlan) -> None:
    if plan.num_groups:
        say(plan.summary())


def _show(found: Preview, *, as_json: bool) -> None:
    """Print what a submit would do."""
    if as_json:
        print_json(
            {
                "lines": found.num_lines,
                "bad_lines": found.num_errors,
                "first_errors": list(found.first_errors),
                "plan": found.plan.to_object() if found.plan else None,
            }
        )
        return
    for error in found.first_errors:
        tell(error)
    refused = f", {found.num_errors} of them bad" if found.num_errors else ""
    click.echo(f"{found.num_lines} lines{refused}; nothing was queued")
    if found.plan is None:
        return
    click.echo(found.plan.summary())
    groups = sorted(found.plan.groups(), key=lambda group: -group.saved_chars)
    for group in groups[:_MOST_SHOWN]:
        tokens = group.mark.chars // CHARS_PER_TOKEN
        click.echo(
            f"  {group.num_lines:,} lines, the first of them line {group.first_line}, share"
            f" {group.mark.chars:,} characters (about {tokens:,} tokens)"
        )
    if len(groups) > _MOST_SHOWN:
        click.echo(f"  and {len(groups) - _MOST_SHOWN:,} more groups")


def _pairs(items: tuple[str, ...]) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    if any(not separator for _, separator, _ in pairs):
        raise click.BadParameter("write it as NAME=VALUE", param_hint="--metadata")
    return {name: value for name, _, value in pairs}
