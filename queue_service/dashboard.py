"""Runs rq-dashboard so that it shows our jobs, and so that no job can script its pages."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from flask import Flask, Response, abort, g, jsonify, request
from jinja2 import BaseLoader, Environment
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import JOB_ID_PATTERN, Job
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.results import Result
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler
from werkzeug.serving import make_server as make_wsgi_server

from queue_service.errors import ConfigurationError, RequestError
from queue_service.rqcompat import SafeJob, SafeQueue, SafeWorker

REGISTRIES: dict[str, type[BaseRegistry]] = {
    "canceled": CanceledJobRegistry,
    "deferred": DeferredJobRegistry,
    "failed": FailedJobRegistry,
    "finished": FinishedJobRegistry,
    "scheduled": ScheduledJobRegistry,
    "started": StartedJobRegistry,
}


@dataclass(frozen=True, slots=True)
class Login:
    """Who may use the dashboard (HTTP basic authentication)."""

    username: str
    password: str = field(repr=False)

    def admits(self, username: str | None, password: str | None) -> bool:
        """Tell whether these are the right name and password."""
        given = f"{username}\0{password}".encode()
        return hmac.compare_digest(given, f"{self.username}\0{self.password}".encode())


def make_server(
    connection: Redis, *, server_name: str, host: str, port: int, login: Login | None
) -> BaseWSGIServer:
    """Return a server that listens already; ``serve_forever()`` runs it.

    Args:
        connection: to the server that holds the queues; answers are bytes.
        server_name: what the pages call that server; must not hold a password.
        host: the address to listen on.
        port: 0 takes any free one; the server's ``port`` says which.
        login: None lets everybody in, which is allowed on a loopback address only.

    Raises:
        ConfigurationError: other machines would reach it without a password, or the address is
            taken or not this machine's.
    """
    if login is None and not _is_loopback(host):
        raise ConfigurationError(
            f"Everybody who reaches {host} could read, requeue and delete jobs. Set a password "
            "(--password) or listen on 127.0.0.1."
        )
    app = make_app(connection, server_name=server_name, login=login)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as exc:
        raise ConfigurationError(
            f"The dashboard cannot listen on {host}, port {port}: {exc.strerror}. "
            "Choose another --port (0 takes any free one) or --host."
        ) from exc
    with listener:  # werkzeug goes on with a duplicate of its descriptor
        return make_wsgi_server(
            host, port, app, threaded=True, request_handler=_QuietHandler, fd=listener.fileno()
        )


def make_app(connection: Redis, *, server_name: str, login: Login | None = None) -> Flask:
    """Return the dashboard as a WSGI application; the arguments are those of make_server."""
    web = _load_rq_dashboard(connection)
    app = _Dashboard(connection, server_name)
    app.before_request(_Guard(login))
    app.after_request(_add_headers)
    app.context_processor(lambda: {"script_nonce": g.script_nonce})
    for error, status, text in [
        (NoSuchJobError, 404, "there is no such job"),
        (InvalidJobOperation, 409, "the job's state does not allow this"),
        (RedisConnectionError, 503, "the Redis server cannot be reached"),
        (RedisTimeoutError, 503, "the Redis server does not answer"),
    ]:
        app.register_error_handler(error, _answer(status, text))
    app.register_blueprint(web.blueprint)
    app.view_functions["rq_dashboard.requeue_all"] = lambda queue_name: _requeue_all(
        queue_name, connection
    )
    return app


class _Dashboard(Flask):
    """rq-dashboard's own pages, with everything that they print escaped."""

    def __init__(self, connection: Redis, server_name: str) -> None:
        super().__init__("rq_dashboard")
        self.redis_conn = connection  # where rq-dashboard looks for it
        self.config["RQ_DASHBOARD_REDIS_URL"] = (server_name,)  # shown, never connected to

    def create_global_jinja_loader(self) -> Any:
        return _EscapingLoader(super().create_global_jinja_loader())


class _EscapingLoader(BaseLoader):
    """Makes rq-dashboard's templates print everything as text (rq-dashboard issue #526).

    In its underscore templates ``<%=`` prints raw HTML and ``<%-`` text; in its scripts Jinja
    does not escape by itself. Its own script gets the nonce that the page's policy asks for.
    """

    _ESCAPED_BY_HAND = re.compile(r"\$\('<div/>'\)\.text\((.*?)\)\.html\(\)")
    _INLINE_SCRIPT = '<script type="text/javascript"'

    def __init__(self, inner: BaseLoader) -> None:
        self._inner = inner

    def get_source(
        self, environment: Environment, template: str
    ) -> tuple[str, str | None, Callable[[], bool] | None]:
        source, filename, is_current = self._inner.get_source(environment, template)
        source = self._ESCAPED_BY_HAND.sub(r"\1", source).replace("<%=", "<%-")
        source = source.replace("'{{ queue.name }}'", "{{ queue.name|tojson }}")
        source = source.replace(
            f"{self._INLINE_SCRIPT}>", f'{self._INLINE_SCRIPT} nonce="{{{{ script_nonce }}}}">'
        )
        return source, filename, is_current


class _Guard:
    """Looks at every request first: who asks, from which page, and for something that exists."""

    def __init__(self, login: Login | None) -> None:
        self._login = login

    def __call__(self) -> Response | None:
        g.script_nonce = secrets.token_urlsafe(16)
        if self._login is None:
            # A page elsewhere can point its own host name at 127.0.0.1 and then read ours.
            if not _is_loopback(urlsplit(f"//{request.host}").hostname or ""):
                abort(403, "Without a password the dashboard answers to loopback names only.")
        elif not self._is_admitted(self._login):
            return Response(
                "Please log in.", 401, {"WWW-Authenticate": 'Basic realm="qsvc", charset="UTF-8"'}
            )
        self._refuse_other_sites()
        self._refuse_unknown()
        return None

    @staticmethod
    def _is_admitted(login: Login) -> bool:
        given = request.authorization
        return given is not None and login.admits(given.username, given.password)

    @staticmethod
    def _refuse_other_sites() -> None:
        if request.method in {"GET", "HEAD", "OPTIONS"}:
            # The one route of rq-dashboard that changes state on a GET, which a link can cause.
            if request.endpoint == "rq_dashboard.requeue_all":
                abort(405, "Requeueing needs a POST.")
            return
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            abort(403, "Another site may not change jobs.")

    @staticmethod
    def _refuse_unknown() -> None:
        values = request.view_args or {}
        exists = (
            values.get("instance_number", 0) == 0
            and values.get("registry_name", "queued") in {"queued", *REGISTRIES}
            and JOB_ID_PATTERN.fullmatch(values.get("job_id", "any"))
            and all(
                re.fullmatch("[1-9][0-9]{0,5}", str(values.get(name, 1)))
                for name in ("page", "per_page")
            )
        )
        if not exists:
            abort(404)


def _add_headers(response: Response) -> Response:
    # Event handlers in what a page shows do not run even if the escaping missed one;
    # underscore compiles its templates with eval.
    response.headers["Content-Security-Policy"] = (
        f"default-src 'self'; script-src 'self' 'nonce-{g.script_nonce}' 'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


class _DashboardJob(SafeJob):
    """A job as rq-dashboard's pages want it: ids as bytes, and something to show for anything."""

    @property
    def dependency_ids(self) -> Any:
        return [dependency_id.encode() for dependency_id in super().dependency_ids]

    def get_meta(self, refresh: bool = True) -> dict[str, Any]:
        try:
            meta: dict[str, Any] = super().get_meta(refresh)
        except RequestError as exc:
            return {"unreadable": exc.message}
        return meta

    def latest_result(self, timeout: int = 0) -> Result | None:
        try:
            return super().latest_result(timeout)
        except RequestError as exc:
            kind = Result.Type.FAILED
            return Result(self.id, kind, self.connection, id="unread", exc_string=exc.message)


class _DashboardQueue(SafeQueue):
    job_class = _DashboardJob


class _DashboardWorker(SafeWorker):
    job_class = _DashboardJob
    queue_class = _DashboardQueue

    def get_current_job(self) -> Job | None:
        try:
            return super().get_current_job()
        except NoSuchJobError:
            return None  # it went away since the worker's executions were read


class _QuietHandler(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log no requests: every open page sends one each few seconds."""


def _load_rq_dashboard(connection: Redis) -> ModuleType:
    """Return a private copy of its web module that uses our classes and our connection.

    Its views reach the classes as names of their module; a copy leaves the imported one alone.
    """
    spec = find_spec("rq_dashboard.web")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("rq_dashboard has no module web", name="rq_dashboard.web")
    web = module_from_spec(spec)
    spec.loader.exec_module(web)

    def list_jobs(
        queue_name: str, registry_name: str, offset: int, per_page: int, order: str, _: Redis
    ) -> tuple[int, list[dict[str, Any]]]:
        queue = _DashboardQueue(queue_name, connection)
        total, job_ids = _page_of_job_ids(queue, registry_name, offset, per_page, order == "dsc")
        return total, [web.serialize_job(job) for job in _existing_jobs(job_ids, connection)]

    replacements: dict[str, object] = {
        "Job": _DashboardJob,
        "Queue": _DashboardQueue,
        "Worker": _DashboardWorker,
        "from_url": lambda *_, **__: (None, connection),
        "get_queue_registry_jobs_count": list_jobs,
        "requeue_job": lambda job_id, connection: SafeJob.fetch(job_id, connection).requeue(),
    }
    vars(web).update(replacements)
    return web


def _page_of_job_ids(
    queue: SafeQueue, registry_name: str, offset: int, per_page: int, newest_first: bool
) -> tuple[int, list[str]]:
    """Return how many jobs there are, and the ids on one page."""
    registry = None
    if registry_name != "queued":
        registry = REGISTRIES[registry_name](queue=queue, job_class=queue.job_class)
    total = queue.count if registry is None else registry.get_job_count(cleanup=False)
    first, end = offset, min(offset + per_page, total)
    if newest_first:
        first, end = max(total - end, 0), total - first
    if first >= end:
        return total, []
    if registry is None:
        job_ids = queue.get_job_ids(first, end - first)
    else:
        job_ids = registry.get_job_ids(first, end - 1, cleanup=False)
    return total, job_ids[::-1] if newest_first else job_ids


def _existing_jobs(job_ids: list[str], connection: Redis) -> list[Job]:
    jobs = []
    for job_id in job_ids:
        try:
            jobs.append(_DashboardJob.fetch(job_id, connection))
        except (NoSuchJobError, ValueError):
            continue  # expired (the next cleanup forgets it), or an id that is none
    return jobs


def _requeue_all(queue_name: str, connection: Redis) -> Response:
    registry = SafeQueue(queue_name, connection).failed_job_registry
    count = 0
    for job_id in registry.get_job_ids(cleanup=False):
        try:
            registry.requeue(job_id)
        except (NoSuchJobError, InvalidJobOperation):
            continue  # expired, or somebody else was faster
        count += 1
    return jsonify(status="OK", count=count)


def _answer(status: int, text: str) -> Callable[[Exception], tuple[Response, int]]:
    return lambda _: (jsonify(error=text), status)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
