"""The worker for RQ's command line: ``rq worker -w workers.rq_cli.QsvcWorker -u URL QUEUE…``."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

from redis import Redis, SSLConnection
from rq import Queue

from queue_service import keys
from queue_service.broker import bury_worker
from queue_service.errors import ConfigurationError
from queue_service.settings import PathSettings, RedisSettings, RetentionSettings, WorkerSettings
from workers.child import ServedModel, worker_parts
from workers.child_settings import ChildSettings
from workers.logs import configure_logging
from workers.main import load
from workers.rq_worker import BatchWorker, EngineFailed
from workers.supervisor import default_slot, default_worker_name, device_slot_lock


class QsvcWorker(BatchWorker):
    """A worker without a supervisor: nobody restarts it, and a crash costs its jobs a lease.

    Server, queues, name and ``--burst`` come from RQ's command line, all else from the
    environment and the config file, as for ``qsvc worker``. RQ's options for results, timeouts,
    serializer, handlers and logging have no meaning here.

    Raises:
        ConfigurationError: no model is named, or another worker has the device slot.
        QsvcError: the server or the model cannot be used.
    """

    def __init__(
        self,
        queues: Sequence[str | Queue],
        name: str | None = None,
        *,
        connection: Redis,
        **_: Any,
    ) -> None:
        worker = WorkerSettings.load(name=name)
        if worker.model is None:
            raise ConfigurationError("name the model to serve with QSVC_WORKER_MODEL")
        configure_logging(worker.log_level)
        alias = worker.alias or keys.alias_for(worker.model)
        slot = worker.device_slot or default_slot()
        settings = ChildSettings(
            redis=RedisSettings.load(url=url_of(connection)),
            worker=worker,
            retention=RetentionSettings.load(),
            alias=alias,
            name=worker.name or default_worker_name(alias, slot),
            burst=False,
        )
        names = [queue if isinstance(queue, str) else queue.name for queue in queues]
        self._slot = contextlib.ExitStack()
        self._slot.enter_context(device_slot_lock(PathSettings.load().cache_folder, slot))
        super().__init__(names, **worker_parts(settings, names, self.load_model))

    @staticmethod
    def load_model(settings: ChildSettings) -> ServedModel:
        """Load the model; called on the engine thread."""
        return load(settings)

    def work(
        self,
        burst: bool = False,
        *_: Any,
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        **__: Any,
    ) -> bool:
        """Serve the queues until told to stop; in burst mode until they are empty.

        Raises:
            ConfigurationError: an option is not supported, or a living worker has this name.
            EngineFailed: this process cannot go on; its jobs went back to their queues.
        """
        if max_jobs is not None or max_idle_time is not None:
            raise ConfigurationError(
                "--max-jobs and --max-idle-time are not supported; --burst ends the worker when "
                "its queues are empty"
            )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.request_stop)
        with self._slot:
            try:
                return super().work(burst=burst)
            except EngineFailed:
                bury_worker(self.connection, self.name)
                raise


def url_of(connection: Redis) -> str:
    """Return the URL of the server that a connection was made for.

    Raises:
        ConfigurationError: it has no address of its own (Sentinel).
    """
    pool = connection.connection_pool
    given = pool.connection_kwargs
    user, password = given.get("username") or "", given.get("password") or ""
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    options = {
        option: value
        for option, value in given.items()
        if value is not None and (option == "db" or option.startswith("ssl_"))
    }
    query = f"?{urlencode(options)}" if options else ""
    if "path" in given:
        return f"unix://{login}{quote(given['path'])}{query}"
    if "host" not in given:
        raise ConfigurationError("name one server with --url; only `qsvc worker` knows Sentinel")
    scheme = "rediss" if issubclass(pool.connection_class, SSLConnection) else "redis"
    host = f"[{given['host']}]" if ":" in given["host"] else given["host"]
    return f"{scheme}://{login}{host}:{given.get('port', 6379)}{query}"
