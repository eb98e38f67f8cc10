"""qsvc fit: what a model takes and how many requests this machine holds, without loading it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cli.exits import EXIT_SOME_FAILED
from cli.options import has_worker_packages, json_option, print_json, say
from queue_service.doctor import gigabytes
from queue_service.errors import ConfigurationError, ModelUnavailable
from queue_service.settings import WorkerSettings

if TYPE_CHECKING:
    from workers.fit import Fit, ModelShape, SpeedEstimate

_SHORT_CONTEXTS = (1024, 4096, 16_384, 65_536)
_ESTIMATE = (
    "rough: what reading memory and multiplying allow, as fast as this device did both just now; "
    "no benchmark"
)


@click.command("fit", short_help="Tell how much of a model this machine holds, and how fast.")
@click.argument("model")
@click.option("--context", type=click.IntRange(min=1), help="Tokens of each request and answer.")
@click.option("--batch", type=click.IntRange(min=1), help="Requests at once (default: --slots).")
@click.option("--dtype", help="Weights: auto, float32, float16, bfloat16 or stored.")
@click.option("--kv-memory", metavar="SIZE", help="Memory for keys and values, such as 8GB.")
@json_option
def command(
    model: str,
    context: int | None,
    batch: int | None,
    dtype: str | None,
    kv_memory: str | None,
    as_json: bool,
) -> None:
    """Tell what MODEL takes here, how many requests fit, and about how fast they would be.

    Only the files' headers are read, and nothing is fetched: a folder with a config.json is
    enough. Ends with 1 where the model, or what --context and --batch ask for, does not fit.
    """
    settings = WorkerSettings.load(model=model, dtype=dtype, kv_memory=kv_memory)
    if not has_worker_packages():
        raise ModelUnavailable("MLX is not installed: pip install 'qsvc[worker]'")
    from workers.blas import load_blas

    load_blas(settings.blas_threads)
    # After the line above: MLX binds its BLAS when it is imported.
    from workers.fit import Fit, estimate_speed, measure_device, read_shape
    from workers.memory import device_limit, divide_memory

    shape = read_shape(model, dtype=settings.dtype)
    if context is not None and context > shape.context_length:
        raise ConfigurationError(f"the context of {model} has {shape.context_length:,} tokens")
    limit_bytes = device_limit()
    try:
        memory = divide_memory(
            limit_bytes, model_bytes=shape.weight_bytes, kv_bytes=settings.kv_memory
        )
    except ConfigurationError as error:
        _tell_too_large(shape, limit_bytes, str(error), as_json=as_json)
        sys.exit(EXIT_SOME_FAILED)
    fit = Fit(shape, memory)
    num_rows = batch or settings.slots
    estimate = estimate_speed(
        shape,
        measure_device(),
        num_rows=num_rows,
        context=context or min(shape.context_length, _SHORT_CONTEXTS[0]),
    )
    asked = _Asked(fit, context or shape.context_length, num_rows)
    if as_json:
        print_json({**_sizes(shape, limit_bytes), **_fitting(fit, asked, estimate)})
    else:
        for line in (*_shape_lines(shape, limit_bytes), *_lines(fit, asked, estimate)):
            click.echo(line)
    if not fit.num_rows(1) or (not asked.fits and (context or batch)):
        sys.exit(EXIT_SOME_FAILED)


class _Asked:
    """What somebody wants to run at once: rows, each of so many tokens."""

    def __init__(self, fit: Fit, context: int, num_rows: int) -> None:
        self.context = context
        self.num_rows = num_rows
        self.num_bytes = num_rows * fit.shape.row_bytes(context)
        self.fits = self.num_bytes <= fit.memory.kv_bytes
        self.most_rows = fit.num_rows(context)
        self.most_context = fit.context(num_rows)


def _sizes(shape: ModelShape, limit_bytes: int) -> dict[str, Any]:
    return {**asdict(shape), "limit_bytes": limit_bytes}


def _fitting(fit: Fit, asked: _Asked, estimate: SpeedEstimate | None) -> dict[str, Any]:
    return {
        "fits": fit.num_rows(1) > 0,
        "kv_bytes": fit.memory.kv_bytes,
        "prefix_bytes": fit.memory.prefix_bytes,
        "prefix_tokens": fit.num_prefix_tokens,
        "rows": [{"context": c, "rows": fit.num_rows(c)} for c in _contexts(fit.shape)],
        "asked": {
            "context": asked.context,
            "rows": asked.num_rows,
            "bytes": asked.num_bytes,
            "fits": asked.fits,
            "most_rows": asked.most_rows,
            "most_context": asked.most_context,
        },
        "rough_tokens_per_second": None if estimate is None else asdict(estimate),
    }


def _tell_too_large(shape: ModelShape, limit_bytes: int, reason: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**_sizes(shape, limit_bytes), "fits": False, "reason": reason})
        return
    for line in _shape_lines(shape, limit_bytes):
        click.echo(line)
    say(f"it does not fit: {reason}")


def _contexts(shape: ModelShape) -> list[int]:
    return [c for c in _SHORT_CONTEXTS if c < shape.context_length] + [shape.context_length]


def _shape_lines(shape: ModelShape, limit_bytes: int) -> list[str]:
    on_disk = "" if shape.file_bytes is None else f", {gigabytes(shape.file_bytes)} on disk"
    fixed = shape.fixed_bytes_per_row
    state = f", and {gigabytes(fixed)} for each row" if fixed else ""
    return [
        f"model            {shape.name}: {shape.family}, {_millions(shape.num_parameters)}",
        f"weights          {gigabytes(shape.weight_bytes)} as {shape.dtype} on the "
        f"{shape.device.upper()}{on_disk}",
        f"context          {shape.context_length:,} tokens",
        f"keys and values  {shape.kv_bytes_per_token:,} bytes a token{state}",
        f"may be used      {gigabytes(limit_bytes)}",
    ]


def _lines(fit: Fit, asked: _Asked, estimate: SpeedEstimate | None) -> list[str]:
    rows = [f"{fit.num_rows(c):,} of {c:,} tokens" for c in _contexts(fit.shape)]
    lines = [
        f"for rows         {gigabytes(fit.memory.kv_bytes)}: {', or '.join(rows)}",
        f"for prefixes     {gigabytes(fit.memory.prefix_bytes)}: {fit.num_prefix_tokens:,} tokens "
        "that requests share, kept for others",
    ]
    wanted = f"{asked.num_rows:,} rows of {asked.context:,} tokens ({gigabytes(asked.num_bytes)})"
    if asked.fits:
        lines.append(f"{wanted} fit")
    else:
        lines.append(
            f"{wanted} do not fit at once: {asked.most_rows:,} rows do, or {asked.num_rows:,} of "
            f"{asked.most_context:,} tokens; others wait for their turn"
        )
    if estimate is None:
        lines.append(
            "speed            no estimate: of a mixture of experts each step reads another part"
        )
    else:
        lines.append(
            f"speed            {estimate.alone:,.0f} tokens/s alone, {estimate.batch:,.0f} in a "
            f"batch of {asked.num_rows:,}, prompts {estimate.prefill:,.0f} ({_ESTIMATE})"
        )
    return lines


def _millions(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:,.1f} billion parameters"
    return f"{count / 1e6:,.0f} million parameters"
