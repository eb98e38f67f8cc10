"""qsvc cache: look after the checkpoints that workers keep on disk."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
from pydantic import ByteSize, TypeAdapter, ValidationError

from cli.exits import EXIT_SOME_FAILED
from cli.options import json_option, print_json, say, seconds_of, tell
from queue_service.errors import ConfigurationError
from queue_service.settings import CheckpointSettings


@click.group("cache")
def command() -> None:
    """Checkpoints on disk: stats, ls, verify, prune, export, import.

    Workers keep the keys and values of what prompts begin with, and need not compute them again.
    """


def _root_option(wrapped: click.decorators.FC) -> click.decorators.FC:
    return click.option(
        "--root",
        type=click.Path(path_type=Path),
        help="The checkpoints' folder (else $QSVC_CHECKPOINTS_FOLDER, the config file).",
    )(wrapped)


def _as_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError:
        raise click.BadParameter(f"{value!r} is no size such as 500MB or 20GB") from None


def _as_seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    seconds = seconds_of(value)
    if seconds is None:
        raise click.BadParameter(f"{value!r} is no age such as 12h, 30d or 4w")
    return seconds


@command.command("stats")
@_root_option
@json_option
def stats(root: Path | None, as_json: bool) -> None:
    """Show what each model's checkpoints take."""
    from workers.checkpoints import maintenance

    folder = _folder(root)
    with _files_of(folder):
        found = maintenance.stats(folder)
    num_bytes = sum(one.num_bytes for one in found)
    if as_json:
        print_json(
            {"root": str(folder), "num_bytes": num_bytes, "data": [asdict(one) for one in found]}
        )
        return
    for one in found:
        used = "never used" if one.used_at is None else f"last used {_time(one.used_at)}"
        tell(
            f"{one.namespace}  {one.model or 'unnamed'}: {one.num_segments} segments, "
            f"{one.num_tokens:,} tokens, {_size(one.num_bytes)}, {used}"
        )
    say(f"{folder}: {_size(num_bytes)}" if found else f"no checkpoints in {folder}")


@command.command("ls")
@_root_option
@json_option
def ls(root: Path | None, as_json: bool) -> None:
    """List all segments, those last used first. Their tokens are not shown."""
    from workers.checkpoints import maintenance

    folder = _folder(root)
    with _files_of(folder):
        found = maintenance.entries(folder)
    for one in found:
        if as_json:
            print_json(asdict(one))
        else:
            lost = "" if one.is_reachable else "  what it follows is gone"
            click.echo(
                f"{one.namespace[:8]}  {one.digest}  tokens {one.start}-{one.end}  "
                f"{_size(one.num_bytes)}  {_time(one.used_at)}{lost}"
            )
    if not found and not as_json:
        say(f"no checkpoints in {folder}")


@command.command("verify")
@click.option("--remove", is_flag=True, help="Delete the bad ones.")
@_root_option
@json_option
def verify(remove: bool, root: Path | None, as_json: bool) -> None:
    """Read every file and check all of it. Ends with 1 where bad ones are left."""
    from workers.checkpoints import maintenance

    folder = _folder(root)
    with _files_of(folder):
        report = maintenance.verify(folder, remove=remove)
    if as_json:
        print_json(
            {
                "num_good": report.num_good,
                "num_removed": report.num_removed,
                "bad": [{"path": str(bad.path), "reason": bad.reason} for bad in report.bad],
            }
        )
    else:
        for bad in report.bad:
            click.echo(f"{bad.path}: {bad.reason}")
        say(f"{report.num_good} good, {len(report.bad)} bad, {report.num_removed} deleted")
    if len(report.bad) > report.num_removed:
        sys.exit(EXIT_SOME_FAILED)


@command.command("prune")
@click.option(
    "--to",
    "to_bytes",
    metavar="SIZE",
    callback=_as_bytes,
    help="Until they take no more than SIZE, such as 5GB.",
)
@click.option(
    "--older-than",
    "age_seconds",
    metavar="AGE",
    callback=_as_seconds,
    help="Those not used for so long, such as 12h, 30d or 4w.",
)
@_root_option
@json_option
def prune(to_bytes: int | None, age_seconds: int | None, root: Path | None, as_json: bool) -> None:
    """Delete checkpoints: those of least worth, or those long unused. Workers may be running."""
    from workers.checkpoints import maintenance

    if to_bytes is None and age_seconds is None:
        raise click.UsageError("say how far: --to SIZE, --older-than AGE, or both")
    folder = _folder(root)
    since = None if age_seconds is None else time.time() - age_seconds
    with _files_of(folder):
        removed = maintenance.prune(folder, to_bytes=to_bytes, unused_since=since)
    if as_json:
        print_json(asdict(removed))
    else:
        click.echo(f"{removed.num_segments} segments deleted, {_size(removed.num_bytes)}")


@command.command("export")
@click.argument("archive", type=click.Path(dir_okay=False, path_type=Path))
@_root_option
@json_option
def export(archive: Path, root: Path | None, as_json: bool) -> None:
    """Write all checkpoints into a tar file, to use them on another machine.

    It holds the tokens of prompts' beginnings, from which their text can be read.
    """
    from workers.checkpoints import maintenance

    folder = _folder(root)
    with _files_of(folder):
        count = maintenance.export(folder, archive)
    if as_json:
        print_json({"num_segments": count})
    else:
        click.echo(f"{count} segments written to {archive}")


@command.command("import")
@click.argument("archive", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_root_option
@json_option
def import_(archive: Path, root: Path | None, as_json: bool) -> None:
    """Add the checkpoints of a tar file that `qsvc cache export` wrote.

    Each is verified first, and none is deleted to make room. Ends with 1 where some are bad.
    """
    from workers.checkpoints import maintenance
    from workers.checkpoints.directory import default_budget

    folder = CheckpointSettings.load(folder=root).folder
    with _files_of(folder):
        budget = CheckpointSettings.load().budget
        imported = maintenance.import_(
            folder, archive, budget_bytes=default_budget(folder) if budget is None else budget
        )
    if as_json:
        bad = [{"name": name, "reason": reason} for name, reason in imported.bad]
        print_json({**asdict(imported), "bad": bad})
    else:
        for name, reason in imported.bad:
            say(f"{name!r}: {reason}")
        click.echo(
            f"{imported.num_added} segments added, {imported.num_present} were there, "
            f"{imported.num_without_room} without room, "
            f"{imported.num_without_parent} that follow what is not there, {len(imported.bad)} bad"
        )
    if imported.bad:
        sys.exit(EXIT_SOME_FAILED)


def _folder(root: Path | None) -> Path:
    """Return the folder to look at; one that was named and is not there is a mistake.

    The other may not be there yet: a worker makes it.
    """
    folder = CheckpointSettings.load(folder=root).folder
    if root is not None and not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}; name another with --root")
    return folder


@contextlib.contextmanager
def _files_of(folder: Path) -> Iterator[None]:
    """Report what the system says of files as one error."""
    try:
        yield
    except OSError as exc:
        raise ConfigurationError(f"the checkpoints in {folder} cannot be used: {exc}") from exc


def _size(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable(decimal=True)


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
