"""qsvc worker: serve a model's queues until told to stop."""

from __future__ import annotations

import click

from cli.options import on_stop, redis_option, say, server
from queue_service import keys
from queue_service.connection import check_server
from queue_service.errors import ConfigurationError
from queue_service.settings import PathSettings, RedisSettings, RetentionSettings, WorkerSettings


@click.command("worker", short_help="Serve a model until Ctrl-C.")
@click.option("--model", help="Hugging Face id, local folder, .gguf file, or smollm2-135m.")
@click.option("--alias", help="Name of the model's queues (default: from the model's name).")
@redis_option
@click.option("--name", help="The worker's name in `rq info` (default: host, alias and slot).")
@click.option("--queue", "queues", multiple=True, help="Another queue to claim from; repeatable.")
@click.option("--slots", type=int, help="Most requests generated at once (default: 32).")
@click.option("--dtype", help="Weights: auto, float32, float16, bfloat16 or stored.")
@click.option("--kv-memory", metavar="SIZE", help="Memory for keys and values, such as 8GB.")
@click.option("--blas-threads", type=int, help="CPU threads of OpenBLAS (Linux).")
@click.option("--device-slot", help="gpu:0, cpu:0, cpu:1 …: one run or worker on each.")
@click.option("--metrics-port", type=int, help="Serve Prometheus's /metrics here (off).")
@click.option("--burst", is_flag=True, help="End when the queues are empty.")
def command(
    model: str | None,
    alias: str | None,
    redis_url: str | None,
    name: str | None,
    queues: tuple[str, ...],
    slots: int | None,
    dtype: str | None,
    kv_memory: str | None,
    blas_threads: int | None,
    device_slot: str | None,
    metrics_port: int | None,
    burst: bool,
) -> None:
    """Serve a model: claim jobs from Redis, run them in one batch, write the answers.

    Ctrl-C or SIGTERM stops it: running jobs get the grace period, the rest go back to the
    front of their queues. Again: at once.
    """
    from workers.child_settings import ChildSettings
    from workers.logs import configure_logging
    from workers.supervisor import (
        Supervisor,
        default_slot,
        default_worker_name,
        device_slot_lock,
    )

    worker = WorkerSettings.load(
        model=model,
        alias=alias,
        name=name,
        queues=queues or None,
        slots=slots,
        dtype=dtype,
        kv_memory=kv_memory,
        blas_threads=blas_threads,
        device_slot=device_slot,
        metrics_port=metrics_port,
    )
    if worker.model is None:
        raise ConfigurationError("name the model to serve with --model or QSVC_WORKER_MODEL")
    served_alias = worker.alias or keys.alias_for(worker.model)
    slot = worker.device_slot or default_slot()
    settings = ChildSettings(
        redis=RedisSettings.load(url=redis_url),
        worker=worker,
        retention=RetentionSettings.load(),
        alias=served_alias,
        name=worker.name or default_worker_name(served_alias, slot),
        burst=burst,
    )
    # A mistake in the URL shows here; a server that goes away later is waited for.
    with server(redis_url) as connection:
        check_server(connection)
    configure_logging(worker.log_level)
    supervisor = Supervisor(settings)

    on_stop(supervisor.stop)
    with device_slot_lock(PathSettings.load().cache_folder, slot):
        say(f"qsvc worker {settings.name}: {worker.model}, queues {', '.join(settings.queues)}")
        supervisor.run()
