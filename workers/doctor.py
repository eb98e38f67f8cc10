"""What `qsvc doctor` looks at that needs MLX: the device, the model, the checkpoints on disk.

Device and model are looked at in a process of its own, since a model may end the one that runs it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from queue_service.connection import Finding, Level
from queue_service.doctor import Area, Diagnosis, gigabytes
from queue_service.errors import ConfigurationError, ModelUnavailable
from queue_service.settings import WorkerSettings
from workers.blas import NO_BLAS, load_blas
from workers.checkpoints.folders import CacheRoot
from workers.checkpoints.segment_file import BadSegment

if TYPE_CHECKING:
    from workers.fit import ModelShape

CHILD = (sys.executable, "-m", "workers.doctor")
# A large model is read from a slow disk in less.
_LIMIT_SECONDS = 900.0
_USUAL_CONTEXTS = (1024, 4096, 16_384)


def examine_model(
    settings: WorkerSettings,
    *,
    runs: bool = True,
    command: Sequence[str] = CHILD,
    limit_seconds: float = _LIMIT_SECONDS,
) -> list[Diagnosis]:
    """Return what a child process finds of the device, and of the model where one is named.

    Args:
        runs: load the model too, and run it; else only its files are looked at.
    """
    asked = {"worker": settings.model_dump(mode="json"), "runs": runs}
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as log:
        try:
            code = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                input=json.dumps(asked),
                text=True,
                stdout=told,
                stderr=log,
                timeout=limit_seconds,
                check=False,
            ).returncode
            end = "" if code == 0 else _describe_end(code)
        except subprocess.TimeoutExpired:
            end = f"took more than {limit_seconds:,.0f} s"
        told.seek(0)
        log.seek(0)
        found = [Diagnosis.from_object(json.loads(line)) for line in told if line.endswith("\n")]
        last_line = next((line.strip() for line in reversed(list(log)) if line.strip()), "")
    if end:
        what = f"looking at device and model {end}" + (f" ({last_line[:300]})" if last_line else "")
        fix = (
            "a worker would end like this: try a smaller model, another --dtype, or without --model"
        )
        found.append(Diagnosis(Area.MODEL, Finding(Level.REFUSED, what, fix)))
    return found


def check_blas(line: str | None) -> Finding:
    """Return whether MLX multiplies fast.

    Args:
        line: what `load_blas` said.
    """
    if line is None:
        return Finding(Level.INFO, "MLX has a fast BLAS of its own")
    what, _, fix = line.partition("; ")
    return Finding(Level.WARNING if line == NO_BLAS else Level.INFO, what, fix or None)


def check_size(shape: ModelShape, limit_bytes: int, kv_bytes: int | None = None) -> Finding:
    """Return what of a model fits into the memory that may be used, or that it does not.

    Args:
        kv_bytes: for keys and values, where the settings say.
    """
    from workers.fit import Fit
    from workers.memory import divide_memory

    try:
        memory = divide_memory(limit_bytes, model_bytes=shape.weight_bytes, kv_bytes=kv_bytes)
    except ConfigurationError as error:
        what, _, fix = str(error).partition("; ")
        return Finding(Level.REFUSED, f"it is too large for this machine: {what}", fix)
    fit = Fit(shape, memory)
    contexts = [c for c in _USUAL_CONTEXTS if c < shape.context_length] + [shape.context_length]
    rows = [f"{fit.num_rows(context):,} rows of {context:,} tokens" for context in contexts]
    if not fit.num_rows(shape.context_length):
        what = (
            f"it fits with {fit.context(1):,} tokens at most, of its {shape.context_length:,}: "
            "longer requests fail"
        )
        return Finding(Level.INFO, what, "give it more (--kv-memory), or use a smaller model")
    what = f"{gigabytes(memory.kv_bytes)} for keys and values hold {', or '.join(rows)}"
    return Finding(Level.INFO, what)


def check_checkpoints(folder: Path) -> list[Finding]:
    """Return whether the checkpoints of a folder can be read."""
    bad: list[BadSegment] = []
    root = CacheRoot(folder, lambda _, error: bad.append(error))
    try:
        folders = root.refresh()
        unreadable = sum(
            not os.access(one.file_of(entry), os.R_OK) for one in folders for entry in one.index
        )
    except FileNotFoundError:
        return [Finding(Level.INFO, f"no checkpoints are in {folder} yet")]
    except OSError as error:
        return [
            Finding(
                Level.REFUSED,
                f"the checkpoints in {folder} cannot be read: {error.strerror or error}",
                "give their files back to the worker's user (chown, chmod), or name another "
                "folder with QSVC_CHECKPOINTS_FOLDER",
            )
        ]
    found = []
    if bad:
        what = f"{len(bad)} checkpoints in {folder} are damaged, such as {bad[0]}"
        found.append(Finding(Level.WARNING, what, "qsvc cache verify --remove"))
    if unreadable:
        what = f"{unreadable} checkpoints in {folder} are another user's"
        fix = "chown them to the worker's user, or name another folder with QSVC_CHECKPOINTS_FOLDER"
        found.append(Finding(Level.WARNING, what, fix))
    num_segments = sum(len(one.index) for one in folders)
    what = f"{num_segments:,} checkpoints take {gigabytes(root.num_bytes)} in {folder}"
    return [*found, Finding(Level.INFO, what)]


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class _Teller:
    """Writes diagnoses to what was standard output; libraries print to standard error."""

    def __init__(self) -> None:
        self._fd = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(self, area: Area, finding: Finding) -> None:
        line = json.dumps(Diagnosis(area, finding).to_object()) + "\n"
        os.write(self._fd, line.encode())


def main() -> None:
    """Look at the device and the model that standard input names; tell each finding as it comes."""
    asked = json.loads(sys.stdin.read())
    settings = WorkerSettings.load(**asked["worker"])
    teller = _Teller()
    teller.tell(Area.DEVICE, check_blas(load_blas(settings.blas_threads)))
    # After the line above: MLX binds its BLAS when it is imported.
    from workers import memory

    try:
        limit_bytes = memory.device_limit()
    except ConfigurationError as error:
        fix = "name what rows may take with --kv-memory"
        teller.tell(Area.DEVICE, Finding(Level.REFUSED, str(error), fix))
        return
    device = memory.describe_device()
    what = f"MLX runs on {device}, and may use {gigabytes(limit_bytes)}"
    teller.tell(Area.DEVICE, Finding(Level.INFO, what))
    if settings.model is not None:
        for finding in _look_at_model(settings, limit_bytes, runs=asked["runs"]):
            teller.tell(Area.MODEL, finding)


def _look_at_model(settings: WorkerSettings, limit_bytes: int, *, runs: bool) -> Iterator[Finding]:
    from workers.fit import read_shape

    name = settings.model or ""
    try:
        shape = read_shape(name, dtype=settings.dtype)
    except ModelUnavailable as error:
        what, _, fix = str(error).partition("; ")
        yield Finding(Level.REFUSED, what, fix or "check the name; README.md says what can be one")
        return
    yield Finding(
        Level.INFO,
        f"{name} is here: {shape.family}, {shape.num_parameters / 1e6:,.0f} million parameters, "
        f"{gigabytes(shape.weight_bytes)} as {shape.dtype}",
    )
    yield Finding(
        Level.INFO,
        f"its context has {shape.context_length:,} tokens; each takes "
        f"{shape.kv_bytes_per_token:,} bytes of keys and values",
    )
    size = check_size(shape, limit_bytes, settings.kv_memory)
    yield size
    if size.level is Level.REFUSED:
        return
    if not runs:
        yield Finding(Level.INFO, "a worker is at work on this device: the model was not run")
        return
    from workers.models import load_model
    from workers.self_test import choose_runner

    try:
        batching, _ = choose_runner(load_model(name, dtype=settings.dtype).model)
    except ModelUnavailable as error:
        fix = "use a model of another family (docs/models.md), or another version of it"
        yield Finding(Level.REFUSED, str(error), fix)
        return
    yield Finding(Level.INFO, f"it runs, and its rows are {batching.value}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # As in workers/main.py: the interpreter's own end may abort inside MLX.
    os._exit(0)
