"""qsvc doctor: look for what is wrong, and say how to put it right."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence

import click
from redis import RedisError
from rich.console import Console
from rich.table import Table

from cli.exits import EXIT_SOME_FAILED
from cli.options import has_worker_packages, json_option, print_json, redis_option
from queue_service.connection import Finding, Level, connect, unavailable
from queue_service.doctor import (
    Area,
    Diagnosis,
    check_folder,
    examine_server,
    examine_versions,
    unreachable,
)
from queue_service.errors import ConfigurationError, ServerUnavailable
from queue_service.settings import CheckpointSettings, PathSettings, RedisSettings, WorkerSettings

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "wrong": "red"}


@click.command("doctor", short_help="Look for what is wrong, and how to put it right.")
@redis_option
@click.option("--model", help="Look at this model too, and run it for a moment.")
@json_option
def command(redis_url: str | None, model: str | None, as_json: bool) -> None:
    """Look at the server, workers, queues, versions, disk, device and a model.

    Ends with 1 when anything is wrong; every line that says so says how to put it right.
    """
    worker = WorkerSettings.load(model=model)
    found = [
        *_server(RedisSettings.load(url=redis_url), worker.lease_seconds),
        *(Diagnosis(Area.VERSIONS, finding) for finding in examine_versions()),
        *(Diagnosis(Area.DISK, finding) for finding in _disk()),
        *_model(worker),
    ]
    num_wrong = sum(one.is_wrong for one in found)
    if as_json:
        print_json({"ok": not num_wrong, "findings": [one.to_object() for one in found]})
    else:
        _show(found)
    if num_wrong:
        sys.exit(EXIT_SOME_FAILED)


def _server(settings: RedisSettings, lease_seconds: float) -> list[Diagnosis]:
    try:
        with contextlib.closing(connect(settings)) as connection:
            try:
                return examine_server(connection, lease_seconds=lease_seconds)
            except RedisError as error:
                raise unavailable(settings, error) from error
    except ServerUnavailable as error:
        return [unreachable(error, is_named="url" in settings.model_fields_set)]


def _disk() -> list[Finding]:
    cache = PathSettings.load().cache_folder
    found = check_folder(cache, PathSettings.env_name("cache_folder"))
    checkpoints = CheckpointSettings.load()
    if checkpoints.enabled and cache not in checkpoints.folder.parents:
        found += check_folder(checkpoints.folder, CheckpointSettings.env_name("folder"))
    return found


def _model(settings: WorkerSettings) -> list[Diagnosis]:
    if not has_worker_packages():
        level = Level.INFO if settings.model is None else Level.REFUSED
        what = "MLX is not installed: this machine can submit, and run no model"
        return [Diagnosis(Area.DEVICE, Finding(level, what, "pip install 'qsvc[worker]'"))]
    from workers.doctor import check_checkpoints, examine_model
    from workers.supervisor import default_slot, device_slot_lock

    found = []
    checkpoints = CheckpointSettings.load()
    if checkpoints.enabled:
        found = [Diagnosis(Area.DISK, one) for one in check_checkpoints(checkpoints.folder)]
    is_free = True
    try:
        with device_slot_lock(
            PathSettings.load().cache_folder, settings.device_slot or default_slot()
        ):
            pass
    except ConfigurationError:
        is_free = False
    except OSError:
        pass  # the folder cannot be used, which was found before
    return [*found, *examine_model(settings, runs=is_free)]


def _show(found: Sequence[Diagnosis]) -> None:
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(_table(found))
        return
    for line in _lines(found):
        click.echo(line)


def _table(found: Iterable[Diagnosis]) -> Table:
    table = Table("", "", box=None, padding=(0, 2, 0, 0))
    # Paths are broken, not cut.
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for one in found:
        word = _word(one.finding)
        table.add_row(f"[{_COLOURS[word]}]{word}[/]", one.area, *map(_escaped, _texts(one)))
    return table


def _lines(found: Iterable[Diagnosis]) -> Iterable[str]:
    for one in found:
        what, fix = _texts(one)
        yield f"{_word(one.finding):<8}{one.area.value:<9}{what}"
        if fix:
            yield f"{'':17}-> {fix}"


def _word(finding: Finding) -> str:
    if finding.level is Level.INFO:
        return "note" if finding.fix else "ok"
    return "warning" if finding.level is Level.WARNING else "wrong"


def _texts(one: Diagnosis) -> tuple[str, str]:
    return one.finding.what.replace("\n", " "), (one.finding.fix or "").replace("\n", " ")


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
