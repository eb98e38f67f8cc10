"""What a benchmark has to know before it runs: this machine, and what a model's rows take.

A process of its own looks, since whoever watches over workers does not import MLX.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from queue_service.errors import ConfigurationError, ModelUnavailable
from queue_service.settings import WorkerSettings

LOOK = (sys.executable, "-m", "workers.bench_look")

_PACKAGES = ("qsvc", "mlx", "mlx-lm", "rq", "redis")


@dataclass(frozen=True, slots=True)
class Machine:
    """What figures depend on.

    Attributes:
        device: where MLX computes, for people.
        kind: ``cpu`` or ``gpu``.
        system: operating system and Python.
        memory_bytes: of the machine, or what its container may use.
        usable_bytes: what a worker may use of it, or of a GPU's.
        blas: the library of the CPU's products and its threads; None where MLX has its own.
        load: processes that wanted a core before, on average of a minute.
    """

    device: str
    kind: str
    system: str
    cores: int
    memory_bytes: int
    usable_bytes: int
    blas: str | None
    versions: Mapping[str, str]
    load: float


@dataclass(frozen=True, slots=True)
class Model:
    """What a model takes here.

    Attributes:
        kv_bytes: what keys and values of rows may take.
        row_bytes: pairs of a number of tokens and what a row of up to so many takes, ascending.
    """

    name: str
    family: str
    dtype: str
    weight_bytes: int
    context_length: int
    kv_bytes: int
    row_bytes: tuple[tuple[int, int], ...]

    def bytes_of_row(self, num_tokens: int) -> int:
        """Return what a row of so many tokens takes."""
        fitting = (size for most, size in self.row_bytes if num_tokens <= most)
        return next(fitting, self.row_bytes[-1][1])


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen."""

    machine: Machine
    model: Model

    def to_object(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    @classmethod
    def from_object(cls, fields: Mapping[str, Any]) -> Look:
        """Read what ``to_object`` returned, as JSON gives it back."""
        model = dict(fields["model"])
        rows = tuple((tokens, size) for tokens, size in model.pop("row_bytes"))
        return cls(Machine(**fields["machine"]), Model(**model, row_bytes=rows))


def look(settings: WorkerSettings) -> Look:
    """Look at this machine and a model, which is fetched where it is not here; imports MLX.

    Raises:
        ModelUnavailable: there is no such model, or it cannot be loaded.
        ConfigurationError: model and keys and values do not fit.
    """
    from workers.blas import load_blas

    load_before = os.getloadavg()[0]
    blas = load_blas(settings.blas_threads)
    # After the line above: MLX binds its BLAS when it is imported.
    from workers import memory
    from workers.fit import read_shape
    from workers.kv_blocks import capacity_for
    from workers.models import device_kind, find_model

    name = settings.model or ""
    find_model(name)
    shape = read_shape(name, dtype=settings.dtype)
    plan = memory.plan_memory(model_bytes=shape.weight_bytes, kv_bytes=settings.kv_memory)
    row_bytes, num_tokens = [], 1
    while num_tokens <= shape.context_length:
        most = capacity_for(num_tokens)
        row_bytes.append((most, shape.row_bytes(most)))
        num_tokens = most + 1
    machine = Machine(
        device=memory.describe_device(),
        kind=device_kind(),
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        cores=os.cpu_count() or 1,
        memory_bytes=memory.host_bytes(),
        usable_bytes=plan.limit_bytes,
        blas=blas,
        versions={package: metadata.version(package) for package in _PACKAGES},
        load=round(load_before, 2),
    )
    model = Model(
        name=name,
        family=shape.family,
        dtype=shape.dtype,
        weight_bytes=shape.weight_bytes,
        context_length=shape.context_length,
        kv_bytes=plan.kv_bytes,
        row_bytes=tuple(row_bytes),
    )
    return Look(machine, model)


def read_answer(text: str, *, code: int) -> Look:
    """Return what the process saw, from what it wrote.

    Raises:
        ModelUnavailable, ConfigurationError: as it raised, or it died.
    """
    answer = json.loads(text) if text.strip() else {}
    if "seen" in answer:
        return Look.from_object(answer["seen"])
    if answer.get("kind") == ConfigurationError.__name__:
        raise ConfigurationError(answer["message"])
    raise ModelUnavailable(
        answer.get("message") or f"looking at the model ended a process (code {code}); see above"
    )


def main() -> None:
    """Look, with settings from standard input, and write what was seen as JSON."""
    settings = WorkerSettings.load(**json.loads(sys.stdin.read()))
    answer_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print
    try:
        answer: dict[str, Any] = {"seen": look(settings).to_object()}
    except (ConfigurationError, ModelUnavailable) as error:
        answer = {"kind": type(error).__name__, "message": str(error)}
    with os.fdopen(answer_fd, "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    # As in workers/main.py: the interpreter's own end may abort inside MLX.
    os._exit(0)
