"""The dashboard's pages and data, with jobs that stock tools cannot show or should not."""

from __future__ import annotations

import base64
import os
import pickle
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flask import Flask
from flask.testing import FlaskClient
from redis import Redis
from rq import Queue, SimpleWorker
from rq.executions import prepare_execution
from rq.job import Job, JobStatus
from rq.results import Result

from cli.dashboard_command import command
from queue_service import tasks
from queue_service.dashboard import Login, make_app, make_server
from queue_service.errors import ConfigurationError
from queue_service.rqcompat import SafeJob, SafeQueue

QUEUE = "qsvc:test"
SCRIPT = '<img src=x onerror="alert(1)">'


@pytest.fixture
def app(redis: Redis) -> Flask:
    return make_app(redis, server_name="unix://test")


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


def enqueue(redis: Redis, serializer: str = "json", **options: Any) -> Job:
    queue = Queue(QUEUE, connection=redis, serializer=serializer)
    return queue.enqueue(tasks.CHAT, {"prompt": SCRIPT}, **options)


def fail(redis: Redis, job: Job) -> None:
    """Fail the job as a worker does."""
    redis.lrem(f"rq:queue:{QUEUE}", 0, job.id)
    safe = SafeJob.fetch(job.id, redis)
    safe.set_status(JobStatus.FAILED)
    safe.failed_job_registry.add(safe, ttl=60, exc_string=SCRIPT)
    Result.create_failure(safe, 60, SCRIPT)


def start(redis: Redis, job: Job) -> str:
    """Let a worker start the job; return the worker's name."""
    worker = SimpleWorker([Queue(QUEUE, connection=redis)], connection=redis)
    worker.register_birth()  # type: ignore[no-untyped-call]
    prepare_execution(worker, job)
    job.set_status(JobStatus.STARTED)
    return worker.name


def listed(client: FlaskClient, registry: str = "queued", page: str = "8/asc/1") -> list[str]:
    answer = client.get(f"/0/data/jobs/{QUEUE}/{registry}/{page}.json")
    assert answer.status_code == 200
    return [job["id"] for job in answer.get_json()["jobs"]]


def status(client: FlaskClient, path: str, method: str = "GET", **options: Any) -> int:
    return client.open(path, method=method, buffered=True, **options).status_code


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_job_with_result_and_meta_is_shown(
    redis: Redis, client: FlaskClient, serializer: str
) -> None:
    job = enqueue(redis, serializer, meta={"model": "m"}, description="one chat")
    Result.create(job, Result.Type.SUCCESSFUL, ttl=60, return_value={"text": SCRIPT})
    assert status(client, f"/0/view/job/{job.id}") == 200
    data = client.get(f"/0/data/job/{job.id}.json").get_json()
    assert data["status"] == "queued"
    assert data["result"] == {"text": SCRIPT}
    assert data["metadata"] == '{"model": "m"}'
    assert data["description"] == "one chat"
    assert listed(client) == [job.id]


def test_queues_and_jobs_are_counted(redis: Redis, client: FlaskClient) -> None:
    enqueue(redis)
    fail(redis, enqueue(redis))
    (queue,) = client.get("/0/data/queues.json").get_json()["queues"]
    assert (queue["name"], queue["count"], queue["failed_job_registry_count"]) == (QUEUE, 1, 1)


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_worker_is_shown_while_it_runs_a_job(
    redis: Redis, client: FlaskClient, serializer: str
) -> None:
    job = enqueue(redis, serializer)
    name = start(redis, job)
    (worker,) = client.get("/0/data/workers.json").get_json()["workers"]
    assert (worker["name"], worker["queues"]) == (name, [QUEUE])
    assert worker["current_job"]["job_id"] == job.id
    assert worker["current_job"]["call_string"] == f"{tasks.CHAT}(…)"
    assert listed(client, "started") == [job.id]
    redis.delete(Job.key_for(job.id))
    (worker,) = client.get("/0/data/workers.json").get_json()["workers"]
    assert worker["current_job"] == "idle"


def test_a_job_that_waits_for_others_is_shown(redis: Redis, client: FlaskClient) -> None:
    first, second = enqueue(redis), enqueue(redis)
    child = enqueue(redis, depends_on=[first, second])
    second.delete()
    data = client.get(f"/0/data/job/{child.id}.json").get_json()
    shown = dict(zip(data["depends_on"], data["depends_on_status"], strict=True))
    assert shown == {first.id: "active", second.id: "expired"}


class Attack:
    """Makes a file when pickle reads it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


def test_hostile_jobs_are_shown_and_nothing_of_them_runs(
    redis: Redis, client: FlaskClient, tmp_path: Path
) -> None:
    attack = pickle.dumps(Attack(tmp_path / "attacked"))
    job = enqueue(redis)
    redis.hset(Job.key_for(job.id), mapping={"data": zlib.compress(attack), "meta": attack})
    redis.xadd(f"rq:results:{job.id}", {"type": 1, "return_value": base64.b64encode(attack)})
    redis.rpush(f"rq:queue:{QUEUE}", "<no id>", "gone")
    start(redis, job)
    assert listed(client) == [job.id]
    assert status(client, f"/0/view/job/{job.id}") == 200
    data = client.get(f"/0/data/job/{job.id}.json").get_json()
    assert "not plain data" in data["exc_info"]
    assert "not plain data" in data["metadata"]
    (worker,) = client.get("/0/data/workers.json").get_json()["workers"]
    assert worker["current_job"]["call_string"] == "unreadable payload"
    fail(redis, job)
    assert status(client, f"/job/{job.id}/requeue", "POST") == 200
    assert redis.hget(Job.key_for(job.id), "meta") == attack
    assert status(client, f"/job/{job.id}/delete", "POST") == 200
    assert not Job.exists(job.id, redis)
    assert not (tmp_path / "attacked").exists()


def test_every_template_prints_everything_as_text(app: Flask) -> None:
    loader = app.jinja_env.loader
    assert loader is not None
    folder = Path(app.root_path) / "templates"
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert len(names) > 10
    printed = 0
    for name in names:
        source, _, _ = loader.get_source(app.jinja_env, name)
        assert "<%=" not in source, name
        assert ".html() %>" not in source, name
        printed += source.count("<%-")
        if not app.select_jinja_autoescape(name):
            for expression in re.findall(r"\{\{(.*?)\}\}", source):
                assert "tojson" in expression, name
    assert printed > 50


def test_a_page_runs_its_own_script_only(client: FlaskClient) -> None:
    pages = [client.get(path) for path in ("/", "/0/view/jobs", "/0/view/workers")]
    nonces = set()
    for page in pages:
        policy = page.headers["Content-Security-Policy"]
        (nonce,) = re.findall(r"script-src 'self' 'nonce-([\w-]+)' 'unsafe-eval';", policy)
        scripts = re.findall(r"<script([^>]*)>", page.text)
        inline = [s for s in scripts if "src=" not in s and "text/template" not in s]
        assert inline == [f' type="text/javascript" nonce="{nonce}"']
        nonces.add(nonce)
    assert len(nonces) == len(pages)


def test_a_queue_name_in_a_link_does_not_become_script(client: FlaskClient) -> None:
    page = client.get("/0/view/jobs/x');alert(1);('/queued/8/asc/1")
    assert page.status_code == 200
    assert "x');alert(1);('" not in page.text
    assert r"x\u0027);alert(1);(\u0027" in page.text


@pytest.mark.parametrize(
    "path",
    [
        "/0/view/job/unknown",
        "/0/data/job/unknown.json",
        "/0/view/job/not%20an%20id",
        "/1/view/queues",
        "/0/view/jobs/q/unknown/8/asc/1",
        "/0/data/jobs/q/unknown/8/asc/1.json",
        "/0/data/jobs/q/queued/0/asc/1.json",
        "/0/data/jobs/q/queued/8/asc/x.json",
        "/nothing",
    ],
)
def test_what_is_unknown_is_not_found(client: FlaskClient, path: str) -> None:
    assert status(client, path) == 404


def test_requeueing_and_deleting_an_unknown_job_is_no_crash(client: FlaskClient) -> None:
    assert status(client, "/job/unknown/requeue", "POST") == 404
    assert client.post("/job/unknown/delete").get_json() == {"status": "ERROR"}


def test_a_job_that_did_not_fail_is_not_requeued(redis: Redis, client: FlaskClient) -> None:
    assert status(client, f"/job/{enqueue(redis).id}/requeue", "POST") == 409


def test_failed_jobs_are_requeued_by_a_post_only(redis: Redis, client: FlaskClient) -> None:
    kept, gone = enqueue(redis), enqueue(redis, "pickle")
    for job in (kept, gone):
        fail(redis, job)
    redis.delete(Job.key_for(gone.id))
    for method in ("GET", "HEAD"):
        assert status(client, f"/requeue/{QUEUE}", method) == 405
    assert listed(client) == []
    assert client.post(f"/requeue/{QUEUE}").get_json() == {"status": "OK", "count": 1}
    assert listed(client) == [kept.id]


@pytest.mark.parametrize("registry", ["queued", "failed", "started"])
def test_a_list_is_emptied(redis: Redis, client: FlaskClient, registry: str) -> None:
    job = enqueue(redis)
    if registry == "failed":
        fail(redis, job)
    if registry == "started":
        redis.delete(f"rq:queue:{QUEUE}")
        start(redis, job)
    assert listed(client, registry) == [job.id]
    assert status(client, f"/queue/{QUEUE}/{registry}/empty", "POST") == 200
    assert listed(client, registry) == []
    assert not Job.exists(job.id, redis)


@pytest.mark.parametrize("registry", ["queued", "failed"])
def test_pages_hold_each_job_once(redis: Redis, client: FlaskClient, registry: str) -> None:
    jobs = [enqueue(redis) for _ in range(7)]
    if registry == "failed":
        for rank, job in enumerate(jobs):
            fail(redis, job)
            redis.zadd(f"rq:failed:{QUEUE}", {job.id: 2e9 + rank})
    job_ids = [job.id for job in jobs]
    ascending = [listed(client, registry, f"3/asc/{page}") for page in (1, 2, 3, 4)]
    assert ascending == [job_ids[:3], job_ids[3:6], job_ids[6:], []]
    descending = [listed(client, registry, f"3/dsc/{page}") for page in (1, 2, 3, 4)]
    assert descending == [job_ids[:3:-1], job_ids[3:0:-1], job_ids[:1], []]


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:1", "null"])
def test_another_site_changes_nothing(redis: Redis, client: FlaskClient, origin: str) -> None:
    job = enqueue(redis)
    url = f"/job/{job.id}/delete"
    assert status(client, url, "POST", headers={"Origin": origin}) == 403
    assert Job.exists(job.id, redis)
    assert status(client, url, "POST", headers={"Origin": "http://localhost"}) == 200
    assert not Job.exists(job.id, redis)


def test_without_a_password_only_loopback_names_are_answered(client: FlaskClient) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""):
        assert status(client, "/", headers={"Host": host}) in {400, 403}
    for host in ("localhost:9181", "127.0.0.1:9181", "[::1]:9181"):
        assert status(client, "/", headers={"Host": host}) == 200


def test_a_password_is_asked_for_everywhere(redis: Redis) -> None:
    login = Login("me", "sécret")
    assert "sécret" not in repr(login)
    client = make_app(redis, server_name="unix://test", login=login).test_client()
    paths = ["/", "/0/data/queues.json", "/static/js/jquery-3.5.1.min.js", "/favicon.ico", "/none"]
    for path in paths:
        answer = client.get(path, buffered=True)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"].startswith("Basic")
    for wrong in (("me", ""), ("me", "sécre"), ("", "sécret"), ("me\0", "sécret")):
        assert status(client, "/", auth=wrong) == 401
    assert [status(client, path, auth=("me", "sécret")) for path in paths] == [200] * 4 + [404]
    assert status(client, "/", auth=("me", "sécret"), headers={"Host": "jobs.example"}) == 200


def test_two_dashboards_in_one_process_do_not_mix(redis: Redis, client: FlaskClient) -> None:
    make_app(redis, server_name="other", login=Login("me", "secret"))
    assert status(client, "/") == 200
    import rq_dashboard.web

    assert rq_dashboard.web.Job is Job


def test_a_server_that_is_away_is_named_as_the_reason(tmp_path: Path) -> None:
    away = Redis.from_url(f"unix://{tmp_path}/none.sock")
    answer = make_app(away, server_name="x").test_client().get("/0/data/queues.json")
    assert answer.status_code == 503
    assert answer.get_json() == {"error": "the Redis server cannot be reached"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_other_machines_need_a_password(redis: Redis, host: str) -> None:
    with pytest.raises(ConfigurationError, match="--password"):
        make_server(redis, server_name="x", host=host, port=0, login=None)


def test_with_a_password_every_address_may_be_listened_on(redis: Redis) -> None:
    server = make_server(redis, server_name="x", host="0.0.0.0", port=0, login=Login("me", "s"))
    assert server.port > 0
    server.server_close()


def test_a_taken_port_is_explained(redis: Redis) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="--port"):
            make_server(redis, server_name="x", host="127.0.0.1", port=port, login=None)


def test_the_command_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flask", None)
    monkeypatch.delitem(sys.modules, "queue_service.dashboard")
    result = CliRunner().invoke(command)
    assert isinstance(result.exception, ConfigurationError)
    assert "pip install 'qsvc[dashboard]'" in str(result.exception)


def test_the_command_refuses_an_open_address(redis_url: str) -> None:
    result = CliRunner().invoke(command, ["--redis", redis_url, "--host", "0.0.0.0"])
    assert isinstance(result.exception, ConfigurationError)
    result = CliRunner().invoke(
        command, ["--redis", redis_url, "--host", "0.0.0.0", "--password", ""]
    )
    assert isinstance(result.exception, ConfigurationError)


def test_the_running_command_serves_and_keeps_the_password(redis: Redis, redis_url: str) -> None:
    job = SafeQueue(QUEUE, redis).enqueue(tasks.chat, {"prompt": "hello"})
    redis.acl_setuser(
        "viewer", enabled=True, passwords=["+p4ssw0rd"], keys=["*"], commands=["+@all"]
    )
    url = f"{redis_url.replace('unix://', 'unix://viewer:p4ssw0rd@')}"
    code = "from cli.dashboard_command import command; command()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "--port", "0"],
        env=os.environ | {"QSVC_REDIS_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        base = process.stdout.readline().strip()
        pages = []
        for path in ("", f"0/view/job/{job.id}", "0/data/queues.json"):
            with urllib.request.urlopen(base + path, timeout=30) as answer:
                pages.append(answer.read().decode())
        process.terminate()
        output = "".join(process.communicate(timeout=30))
    redis.acl_deluser("viewer")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", base)
    assert QUEUE in pages[2]
    assert job.id in pages[1]
    assert "***@" in pages[0]
    assert output == ""
    assert "p4ssw0rd" not in "".join(pages) + base


def test_the_password_may_come_from_a_file(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("pass word\n")
    with subprocess.Popen(
        [sys.executable, "-c", "from cli.dashboard_command import command; command()", "--port=0"],
        env=os.environ | {"QSVC_REDIS_URL": redis_url, "QSVC_DASHBOARD_PASSWORD_FILE": str(secret)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        base = process.stdout.readline().strip()
        login = base64.b64encode(b"qsvc:pass word").decode()
        request = urllib.request.Request(base, headers={"Authorization": f"Basic {login}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(base, timeout=30)
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_file_without_a_password_lets_nobody_in(
    redis_url: str, tmp_path: Path, content: str | None
) -> None:
    secret = tmp_path / "password"
    if content is not None:
        secret.write_text(content)
    result = CliRunner().invoke(
        command, ["--redis", redis_url, "--port", "0", "--password-file", str(secret)]
    )
    assert isinstance(result.exception, ConfigurationError)
    assert str(secret) in str(result.exception)
