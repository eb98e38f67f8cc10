"""`qsvc top` in a terminal and elsewhere, with workers that live and die and a server that goes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable

import pytest
from redis import Redis

from queue_service.connection import connect
from queue_service.local_server import LocalServer
from queue_service.settings import RedisSettings
from tests.cli_helpers import QSVC, HandWorker, run_qsvc
from tests.harness import (
    LONG_TEXT,
    SLOW_STEP_SECONDS,
    enqueue_chat,
    running_worker,
    worker_settings,
)
from tests.integration.test_overview import FAKE, LEASE_SECONDS, list_worker, submit
from tests.screen import Screen, terminal


def top(url: str, *options: str) -> tuple[str, ...]:
    return (*QSVC, "top", "--redis", url, "--interval", "0.3", *options)


def shows(*words: str) -> Callable[[Screen], bool]:
    return lambda screen: all(word in screen.text for word in words)


def test_top_shows_what_happens_until_ctrl_c(redis: Redis, redis_url: str) -> None:
    settings = worker_settings(redis_url, name="one", slots=4, claim_ahead=0)
    with (
        running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker,
        terminal(*top(redis_url), width=110) as shown,
    ):
        shown.wait_for(shows("1 of 1 workers live", "No open batches", "Nothing runs"), "idle")
        assert shown.screen.is_alternate
        job = enqueue_chat(redis, LONG_TEXT, FAKE)
        shown.wait_for(shows(job.id, "busy"), "a job that runs")
        batch_id = submit(redis, 40)
        shown.wait_for(shows(batch_id, "/40"), "a batch")
        worker.hasten()
        shown.wait_for(shows("No open batches", "Nothing runs"), "the batch's end")
        assert "prompt 1" not in shown.screen.text
        shown.interrupt()
        assert shown.end() == 130
        assert shown.screen.is_cursor_shown
        assert not shown.screen.is_alternate
        assert shown.screen.text == "", "something was left on the terminal"


def test_top_tells_a_dead_worker_and_ends_by_a_signal_with_the_terminal_tidy(
    redis: Redis, redis_url: str
) -> None:
    list_worker(redis, "gone", seconds_ago=LEASE_SECONDS + 30)
    with terminal(*top(redis_url)) as shown:
        shown.wait_for(shows("0 of 1 workers live", "gone", "dead 0:"), "a dead worker")
        shown.process.terminate()
        assert shown.end() == 143
        assert shown.screen.is_cursor_shown
        assert not shown.screen.is_alternate


def test_q_ends_top_and_other_keys_are_not_shown(redis: Redis, redis_url: str) -> None:
    with terminal(*top(redis_url, "--interval", "30"), height=12) as shown:
        shown.wait_for(shows("No workers"), "a picture")
        shown.press("xyz")
        shown.press("q")
        assert shown.end(10) == 0
        assert shown.screen.text == ""


def test_top_goes_on_over_an_outage(
    make_server: Callable[..., LocalServer], kill_server: Callable[[LocalServer], None]
) -> None:
    server = make_server()
    url = server.start()
    with terminal(*top(url), width=120) as shown:
        shown.wait_for(shows("No workers"), "an empty server")
        kill_server(server)
        shown.wait_for(shows("the server is away"), "the outage")
        server.start()
        with connect(RedisSettings.load(url=url)) as connection:
            batch_id = submit(connection, 2)
        shown.wait_for(lambda s: shows(batch_id)(s) and "is away" not in s.text, "its return")


def test_a_tiny_terminal_without_colour_is_enough(redis: Redis, redis_url: str) -> None:
    list_worker(redis, "w" * 100, seconds_ago=0)
    submit(redis, 3)
    with terminal(*top(redis_url), width=30, height=10, env={"NO_COLOR": "1"}) as shown:
        shown.wait_for(shows("qsvc top", "www"), "a picture")
        styles = {cell.style for row in shown.screen._rows for cell in row}
        assert not any(re.search(r"\b[349][0-7]\b", style) for style in styles), styles


def test_once_prints_one_picture_as_plain_text(redis: Redis, redis_url: str) -> None:
    batch_id = submit(redis, 3)
    done = subprocess.run(
        top(redis_url, "--once"), capture_output=True, text=True, check=True, timeout=60
    )
    assert batch_id in done.stdout
    assert "0/3" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_what_redis_holds_is_not_obeyed(redis: Redis, redis_url: str) -> None:
    list_worker(redis, "\x1b[2J\x1b]0;owned\x07[red]", seconds_ago=0, queue="qsvc:\x9b31m")
    shown = run_qsvc("top", "--redis", redis_url, "--once", "--interval", "0.1")
    assert "\\x1b[2J\\x1b]0;owned\\x07[red]" in shown.stdout
    assert "\x1b" not in shown.stdout
    # The terminal of the tests fails on a sequence that is not rich's.
    with terminal(*top(redis_url)) as drawn:
        drawn.wait_for(shows("\\x1b[2J"), "the name")


def test_json_is_one_object_for_each_look(redis: Redis, redis_url: str) -> None:
    batch_id = submit(redis, 3)
    HandWorker(redis, FAKE).claim(1)
    once = run_qsvc("top", "--redis", redis_url, "--once", "--json", "--interval", "0.1")
    [line] = once.stdout.splitlines()
    [batch] = json.loads(line)["batches"]
    assert (batch["id"], batch["running"], batch["waiting"]) == (batch_id, 1, 2)

    with subprocess.Popen(top(redis_url, "--json"), stdout=subprocess.PIPE, text=True) as going:
        assert going.stdout is not None
        looks = [json.loads(going.stdout.readline()) for _ in range(3)]
        going.terminate()
    assert [look["object"] for look in looks] == ["overview"] * 3
    assert looks[0]["at"] < looks[1]["at"] < looks[2]["at"]


@pytest.mark.parametrize("options", [[], ["--once"], ["--json"]])
def test_a_server_that_is_not_there_ends_with_code_3(options: list[str]) -> None:
    done = run_qsvc("top", "--redis", "unix:///nowhere/at-all.sock", *options)
    assert done.returncode == 3
    assert done.stdout == ""


def test_a_password_in_the_url_is_not_shown(redis: Redis, redis_url: str) -> None:
    redis.acl_setuser(
        "watcher", enabled=True, passwords=["+s3cret"], keys=["*"], commands=["+@all"]
    )
    try:
        url = redis_url.replace("unix://", "unix://watcher:s3cret@")
        done = run_qsvc("top", "--redis", url, "--once", "--interval", "0.1")
    finally:
        redis.acl_deluser("watcher")
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    assert os.path.basename(redis_url.partition("?")[0]) in done.stdout
