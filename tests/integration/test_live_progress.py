"""How a batch comes on, in a terminal and in logs: `qsvc run`, `submit --wait`, `results`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from queue_service.batches import Batches
from queue_service.connection import connect
from queue_service.local_server import LocalServer
from queue_service.settings import PathSettings, RedisSettings
from tests.cli_helpers import (
    FAKE_QSVC,
    QSVC,
    HandWorker,
    assert_nothing_left_behind,
    chat_line,
    chat_lines,
    num_lines,
    run_qsvc,
    start_qsvc,
    wait_until,
    write_lines,
)
from tests.harness import SLOW_STEP_SECONDS, eventually, running_worker, worker_settings
from tests.integration.test_overview import FAKE
from tests.screen import Screen, terminal

SLOW = {"FAKE_STEP_SECONDS": "0.03"}


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Every run, however it ends, leaves neither worker nor server behind."""
    yield
    assert_nothing_left_behind(PathSettings.load().cache_folder)


def shows(pattern: str) -> Callable[[Screen], bool]:
    return lambda screen: re.search(pattern, screen.text) is not None


def newest_batch(redis: Redis) -> str:
    [batch] = eventually(lambda: Batches(redis).newest(1), "a batch")
    return batch.id


# qsvc run -------------------------------------------------------------------------------------


def test_a_run_in_a_terminal_shows_what_runs_how_fast_and_how_long(
    redis_server: LocalServer, tmp_path: Path
) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(200)), tmp_path / "out.jsonl"
    command = (*FAKE_QSVC, "run", file, "-o", out, "--model", "fake")
    with terminal(*command, width=100, env=SLOW) as shown:
        how_far = r"\d+/200  \d+%  0:\d\d left"
        pace = r"[\d.,]+ tok/s \([\d.,]+ on average\)"
        shown.wait_for(
            shows(rf"{how_far}\n\d+ running  \d+ waiting  {pace}"), "the time that is left"
        )
        assert not shown.screen.is_cursor_shown
        assert shown.end(60) == 0
        assert shown.screen.is_cursor_shown
        # The last picture stays, and the summary comes below it.
        assert shows(r"200/200  100%\n")(shown.screen)
        assert "200 jobs: 200 completed, 0 failed" in shown.screen.text
        assert shown.screen.text.count("/200") == 1, "a picture was left behind"
    assert num_lines(out) == 200


def test_ctrl_c_stops_a_run_in_a_terminal_and_leaves_it_tidy(
    redis_server: LocalServer, tmp_path: Path
) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(400)), tmp_path / "out.jsonl"
    command = (*FAKE_QSVC, "run", file, "-o", out, "--model", "fake")
    with terminal(*command, env=SLOW) as shown:
        shown.wait_for(shows("tok/s"), "a run")
        shown.interrupt()
        assert shown.end() == 130
        assert "stopping: running requests get" in shown.screen.text
        said = " ".join(shown.screen.text.split())  # however long the paths are
        assert "run the same command to go on" in said
        assert "Traceback" not in shown.screen.text
        assert shown.screen.is_cursor_shown


def test_the_picture_goes_to_the_terminal_where_the_output_does_not(
    redis_server: LocalServer, redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(30))
    said = tmp_path / "said.txt"
    settings = worker_settings(redis_url, slots=2)
    command = (*QSVC, "submit", file, "--alias", "fake", "--wait", "--redis", redis_url)
    with (
        said.open("wb") as stdout,
        running_worker(settings, step_seconds=SLOW_STEP_SECONDS),
        terminal(*command, stdout=stdout.fileno()) as shown,
    ):
        shown.wait_for(shows(r"/30"), "a picture")
        assert shown.end() == 0
    assert said.read_text() == newest_batch(redis) + "\n"


def test_a_log_gets_plain_lines(redis_server: LocalServer, tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(5)), tmp_path / "out.jsonl"
    done = run_qsvc("run", file, "-o", out, "--model", "fake", program=FAKE_QSVC)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d of 5 done, \d written, \d+ tok/s", done.stderr, re.MULTILINE)
    assert "\x1b" not in done.stderr


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(3))
    command = (*QSVC, "submit", file, "--alias", "fake", "--wait", "--redis", redis_url)
    with (
        running_worker(worker_settings(redis_url)),
        terminal(*command, env={"TERM": "dumb"}) as shown,
    ):
        assert shown.end() == 0
        assert shows(r"\d of 3 done, \d+ tok/s")(shown.screen)
        assert all(cell.style == "" for row in shown.screen._rows for cell in row)


def test_a_narrow_terminal_without_colour_is_enough(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(40))
    command = (*QSVC, "submit", file, "--alias", "fake", "--wait", "--redis", redis_url)
    settings = worker_settings(redis_url, slots=2)
    with (
        running_worker(settings, step_seconds=SLOW_STEP_SECONDS),
        terminal(*command, width=22, env={"NO_COLOR": "1"}) as shown,
    ):
        shown.wait_for(shows(r"\d+/40  \d+%\n\d+ running"), "a picture of two rows")
        styles = {cell.style for row in shown.screen._rows for cell in row}
        assert not any(re.search(r"\b[349][0-7]\b", style) for style in styles), styles
        assert shown.end() == 0


# qsvc submit --wait ---------------------------------------------------------------------------


def test_a_submit_that_waits_ends_with_the_batch(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(8))
    command = ("submit", file, "--alias", "fake", "--wait", "--redis", redis_url)
    with running_worker(worker_settings(redis_url)):
        done = run_qsvc(*command)
        assert done.returncode == 0, done.stderr
        assert done.stdout == newest_batch(redis) + "\n"
        assert "8 lines: 8 completed, 0 failed" in done.stderr
        again = run_qsvc(*command, "--json")
    [line] = again.stdout.splitlines()
    shown = json.loads(line)
    assert (shown["status"], shown["is_new"]) == ("completed", False)
    assert shown["request_counts"]["completed"] == 8
    assert again.stderr == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_lines_that_fail_are_told_by_the_exit_code(
    redis: Redis, redis_url: str, tmp_path: Path, as_json: bool
) -> None:
    file = write_lines(tmp_path / "in.jsonl", [*chat_lines(2), chat_line("bad", "refuse me")])
    options = ["--json"] if as_json else []
    with running_worker(worker_settings(redis_url)):
        done = run_qsvc("submit", file, "--alias", "fake", "--wait", "--redis", redis_url, *options)
    assert done.returncode == 1
    if as_json:
        assert json.loads(done.stdout)["request_counts"]["failed"] == 1
    else:
        assert "3 lines: 2 completed, 1 failed" in done.stderr


def test_ctrl_c_ends_the_waiting_and_not_the_batch(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(3))
    command = (*QSVC, "submit", file, "--alias", "fake", "--wait", "--redis", redis_url)
    with terminal(*command) as shown:
        shown.wait_for(shows(r"0/3  0%"), "a picture")
        assert "no worker serves qsvc:fake now" in shown.screen.text
        shown.interrupt()
        assert shown.end() == 130
        assert "the batch goes on; follow it: qsvc results batch_" in shown.screen.text
        assert "Traceback" not in shown.screen.text
        assert shown.screen.is_cursor_shown
    assert Batches(redis).get(newest_batch(redis)).status == "in_progress"
    assert HandWorker(redis, FAKE).answer_all() == 3


def test_a_file_larger_than_the_window_is_fed_while_it_is_waited_for(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(900))
    env = {"QSVC_SUBMIT_WINDOW_LINES": "200"}
    command = ("submit", file, "--alias", "fake", "--wait", "--redis", redis_url)
    with start_qsvc(*command, program=QSVC, env=env) as waiting:
        batch_id = newest_batch(redis)
        wait_until(lambda: Batches(redis).get(batch_id).total, "the first lines")
        worker = HandWorker(redis, FAKE)
        done = 0
        while done < 900:
            done += worker.answer_all()
            assert waiting.poll() is None or done == 900
        out, err = waiting.communicate(timeout=30)
    assert (waiting.returncode, out) == (0, f"{batch_id}\n")
    assert "900 lines: 900 completed" in err


def test_a_submit_that_waits_goes_on_over_an_outage(
    make_server: Callable[..., LocalServer],
    kill_server: Callable[[LocalServer], None],
    tmp_path: Path,
) -> None:
    server = make_server()
    url = server.start()
    file = write_lines(tmp_path / "in.jsonl", chat_lines(3))
    command = (*QSVC, "submit", file, "--alias", "fake", "--wait", "--redis", url)
    with terminal(*command) as shown:
        shown.wait_for(shows(r"0/3  0%"), "a picture")
        with connect(RedisSettings.load(url=url)) as connection:
            connection.execute_command("WAITAOF", 1, 0, 4000)
        kill_server(server)
        shown.wait_for(shows("waiting for the server"), "the outage")
        server.start()
        with connect(RedisSettings.load(url=url)) as connection:
            assert HandWorker(connection, FAKE).answer_all() == 3
        assert shown.end() == 0
        assert "3 lines: 3 completed" in shown.screen.text


# qsvc results ---------------------------------------------------------------------------------


def test_results_that_are_followed_show_the_same_and_end_tidily(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(3)), tmp_path / "out.jsonl"
    done = run_qsvc("submit", file, "--alias", "fake", "--redis", redis_url)
    batch_id = done.stdout.strip()
    with terminal(*QSVC, "results", batch_id, "-o", out, "--follow", "--redis", redis_url) as shown:
        shown.wait_for(shows(r"0/3  0%"), "a picture")
        shown.process.terminate()
        assert shown.end() == 143
        assert shown.screen.is_cursor_shown
