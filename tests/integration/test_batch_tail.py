"""The texts of a batch's lines as they come: read from a real server, and shown by `qsvc tail`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from queue_service import keys
from queue_service.batch_tail import BatchTail, LineEvent
from queue_service.batches import Batches
from queue_service.broker import Claimed
from queue_service.connection import connect
from queue_service.dialogue import Reconnect
from queue_service.errors import BatchNotFound
from queue_service.local_server import LocalServer
from queue_service.settings import RedisSettings
from queue_service.streams import End, EndReason, Text
from tests.cli_helpers import (
    QSVC,
    HandWorker,
    chat_line,
    chat_lines,
    run_qsvc,
    start_qsvc,
    write_lines,
)
from tests.harness import SLOW_STEP_SECONDS, running_worker, worker_settings
from tests.integration.test_overview import FAKE, submit
from tests.screen import terminal


def texts(told: list[LineEvent]) -> dict[str, str]:
    """The text of each line by its custom id."""
    found: dict[str, str] = {}
    for one in told:
        text = one.event.text if isinstance(one.event, Text) else ""
        found[one.ref.custom_id] = found.get(one.ref.custom_id, "") + text
    return found


def ends(told: list[LineEvent]) -> dict[str, EndReason]:
    return {one.ref.custom_id: one.event.reason for one in told if isinstance(one.event, End)}


def taken(tail: BatchTail, until: Callable[[list[LineEvent]], object]) -> list[LineEvent]:
    """The events up to the one with which the condition holds."""
    told: list[LineEvent] = []
    while not until(told):
        told.append(next(tail))
    return told


# What is read ---------------------------------------------------------------------------------


def test_lines_are_told_at_once_each_text_once_and_in_order(redis: Redis, redis_url: str) -> None:
    settings = worker_settings(redis_url, slots=4, claim_ahead=2)
    batch_id = submit(redis, 30)
    tail = BatchTail(redis, batch_id)
    next_event = tail.__next__
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS):
        told = [next_event(), *tail]
    assert texts(told) == {f"c{i}": f"prompt {i}" for i in range(1, 31)}
    assert ends(told) == {f"c{i}": EndReason.DONE for i in range(1, 31)}
    assert len([one for one in told if isinstance(one.event, End)]) == 30
    assert tail.batch is not None
    assert tail.batch.status.is_final


def test_texts_of_running_lines_come_before_their_ends(redis: Redis) -> None:
    batch_id = submit(redis, 3)
    worker = HandWorker(redis, FAKE)
    first, second, third = worker.claim()
    tail = BatchTail(redis, batch_id)
    worker.stream(first, 1, {"i": 0, "a": 1, "t": "pro"})
    worker.stream(second, 1, {"i": 0, "a": 1, "t": "prompt"})
    told = taken(tail, lambda told: len(told) == 2)
    assert texts(told) == {"c1": "pro", "c2": "prompt"}
    assert redis.ttl(keys.watch(third.job_id)) > 0, "its worker is not asked for the text"
    worker.answer(second, first)
    worker.fail(third)
    told += tail
    assert texts(told) == {"c1": "prompt 1", "c2": "prompt 2", "c3": ""}
    assert ends(told) == {"c1": EndReason.DONE, "c2": EndReason.DONE, "c3": EndReason.ERROR}
    [failure] = [one.event for one in told if one.event == End(EndReason.ERROR, _message(one))]
    assert isinstance(failure, End)
    assert failure.message == "it failed: internal_error"


def _message(told: LineEvent) -> str | None:
    return told.event.message if isinstance(told.event, End) else None


def test_what_had_ended_is_told_when_asked_for(redis: Redis) -> None:
    batch_id = submit(redis, 4)
    worker = HandWorker(redis, FAKE)
    worker.answer(*worker.claim(2))
    later, from_start = BatchTail(redis, batch_id), BatchTail(redis, batch_id, from_start=True)
    assert set(texts(taken(from_start, lambda told: len(ends(told)) == 2))) == {"c1", "c2"}
    running = worker.claim()
    worker.stream(running[0], 1, {"i": 0, "a": 1, "t": "prompt"})
    told = taken(later, lambda told: len(told) == 1)
    worker.answer(*running)
    assert set(texts([*told, *later])) == {"c3", "c4"}
    assert set(texts(list(from_start))) == {"c3", "c4"}


def test_a_batch_that_has_ended_tells_nothing_or_all(redis: Redis) -> None:
    batch_id = submit(redis, 600)
    assert HandWorker(redis, FAKE).answer_all() == 600
    assert list(BatchTail(redis, batch_id)) == []
    told = list(BatchTail(redis, batch_id, from_start=True))
    assert texts(told) == {f"c{i}": f"prompt {i}" for i in range(1, 601)}


def test_lines_that_are_cancelled_or_refused_have_an_end(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [*chat_lines(2), "{"])
    url = redis.connection_pool.connection_kwargs["path"]
    done = run_qsvc("submit", path, "--alias", "fake", "--redis", f"unix://{url}")
    batch_id = done.stdout.strip()
    Batches(redis).cancel(batch_id)
    told = list(BatchTail(redis, batch_id, from_start=True))
    assert ends(told) == {
        "c1": EndReason.CANCELLED,
        "c2": EndReason.CANCELLED,
        "": EndReason.ERROR,
    }


def test_a_batch_that_is_not_there_or_goes_is_an_error(redis: Redis) -> None:
    with pytest.raises(BatchNotFound):
        next(BatchTail(redis, "batch_unknown"))
    batch_id = submit(redis, 2)
    worker = HandWorker(redis, FAKE)
    worker.answer(*worker.claim(1))
    tail = BatchTail(redis, batch_id, from_start=True)
    next(tail)
    Batches(redis).delete(batch_id)
    with pytest.raises(BatchNotFound):
        list(tail)


def test_an_outage_is_waited_for_and_nothing_is_told_twice(
    make_server: Callable[..., LocalServer], kill_server: Callable[[LocalServer], None]
) -> None:
    server = make_server()
    url = server.start()
    claimed: list[Claimed] = []
    outages: list[Exception] = []

    def go_on(error: Exception) -> None:
        outages.append(error)
        server.start()
        with connect(RedisSettings.load(url=url)) as another:
            HandWorker(another, FAKE).answer(*claimed)

    with connect(RedisSettings.load(url=url)) as connection:
        batch_id = submit(connection, 2)
        worker = HandWorker(connection, FAKE)
        claimed += worker.claim()
        worker.stream(claimed[0], 1, {"i": 0, "a": 1, "t": "prompt"})
        tail = BatchTail(connection, batch_id, reconnect=Reconnect(on_outage=go_on))
        told = taken(tail, lambda told: len(told) == 1)
        connection.execute_command("WAITAOF", 1, 0, 4000)
        kill_server(server)
        told += tail
    assert texts(told) == {"c1": "prompt 1", "c2": "prompt 2"}
    assert len(outages) == 1


# The command ----------------------------------------------------------------------------------


def test_elsewhere_than_on_a_terminal_each_answer_comes_whole_at_its_end(
    redis: Redis, redis_url: str
) -> None:
    batch_id = submit(redis, 3)
    worker = HandWorker(redis, FAKE)
    first, second, third = worker.claim()
    command = ("tail", batch_id, "--from-start", "--redis", redis_url)
    with start_qsvc(*command, program=QSVC) as tail:
        assert tail.stdout is not None
        worker.stream(first, 1, {"i": 0, "a": 1, "t": "told\nbefore"})
        worker.answer(second, text="one\ntwo\n")
        # Its end was told after the stream of the first one was.
        assert tail.stdout.readline() == "c2: one\n"
        assert tail.stdout.readline() == "c2: two\n"
        worker.answer(first)
        assert tail.stdout.readline() == "c1: prompt 1\n"
        worker.fail(third)
        out, err = tail.communicate(timeout=20)
    assert tail.returncode == 1
    assert out == "", "a line without an answer has none to print"
    assert f"{third.job_id} (c3): error: it failed: internal_error" in err
    assert "3 lines: 2 completed, 1 failed" in err


def test_on_a_terminal_open_lines_stand_below_what_is_complete(
    redis: Redis, redis_url: str
) -> None:
    batch_id = submit(redis, 3)
    worker = HandWorker(redis, FAKE)
    first, second, third = worker.claim()
    with terminal(*QSVC, "tail", batch_id, "--redis", redis_url, width=60) as shown:
        worker.stream(first, 1, {"i": 0, "a": 1, "t": "The first line\nand the sec"})
        worker.stream(second, 1, {"i": 0, "a": 1, "t": "Another \x1b[31manswer"})
        screen = shown.wait_for(
            lambda s: "c1 The first line\n" in s.text and "c1 and the sec" in s.text, "two texts"
        )
        shown.wait_for(lambda s: "c2 Another \\x1b[31manswer" in s.text, "the other one")
        worker.stream(second, 2, {"i": 9, "a": 1, "t": ", which is long" * 9})
        shown.wait_for(lambda s: "which is long▏" in s.text, "the end of a long line")
        assert screen.text.count("which is long▏") == 1
        worker.answer(first, text="The first line\nand the second")
        shown.wait_for(lambda s: "c1 and the second\n" in s.text, "the second line")
        worker.answer(second, text="Another \x1b[31manswer" + ", which is long" * 9)
        worker.fail(third)
        assert shown.end() == 1
        assert "c3 error: it failed: internal_error" in screen.text
        assert "3 lines: 2 completed, 1 failed" in screen.text
        assert screen.text.count("The first line") == 1
        assert "▏" not in screen.text, "an open line was left there"
        assert screen.is_cursor_shown


def test_ctrl_c_leaves_what_was_read(redis: Redis, redis_url: str) -> None:
    batch_id = submit(redis, 1)
    worker = HandWorker(redis, FAKE)
    [claimed] = worker.claim()
    with terminal(*QSVC, "tail", batch_id, "--redis", redis_url) as shown:
        worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "half an ans"})
        shown.wait_for(lambda s: "half an ans" in s.text, "the text")
        shown.interrupt()
        assert shown.end() == 130
        assert "half an ans" in shown.screen.text
        assert "Traceback" not in shown.screen.text
        assert shown.screen.is_cursor_shown


def test_json_has_every_event(redis: Redis, redis_url: str) -> None:
    batch_id = submit(redis, 2)
    worker = HandWorker(redis, FAKE)
    first, second = worker.claim()
    worker.stream(first, 1, {"i": 0, "a": 1, "k": "reasoning", "t": "hm"})
    worker.answer(second)
    with start_qsvc("tail", batch_id, "--json", "--redis", redis_url, program=QSVC) as tail:
        assert tail.stdout is not None
        event = json.loads(tail.stdout.readline())
        assert event == {
            "event": "text",
            "job_id": first.job_id,
            "choice": 0,
            "kind": "reasoning",
            "text": "hm",
            "line": 1,
            "custom_id": "c1",
        }
        worker.answer(first)
        out, err = tail.communicate(timeout=20)
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events][-1] == "end"
    assert {event["custom_id"] for event in events} == {"c1"}, "the other had ended before"
    assert (tail.returncode, err) == (0, "")

    job = run_qsvc("tail", second.job_id, "--json", "--redis", redis_url)
    assert [json.loads(line) for line in job.stdout.splitlines()] == [
        {
            "event": "text",
            "job_id": second.job_id,
            "choice": 0,
            "kind": "text",
            "text": "prompt 2",
        },
        {"event": "end", "job_id": second.job_id, "reason": "done", "message": None},
    ]


def test_a_batch_that_has_ended_can_be_printed(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    lines = [chat_line("\x1b[2Jid", "hello"), chat_line("b" * 100, "there")]
    path = write_lines(tmp_path / "in.jsonl", lines)
    submitted = run_qsvc("submit", path, "--alias", "fake", "--redis", redis_url)
    batch_id = submitted.stdout.strip()
    HandWorker(redis, FAKE).answer_all()
    done = run_qsvc("tail", batch_id, "--redis", redis_url)
    assert (done.returncode, done.stdout) == (0, "")
    assert "--from-start" in done.stderr
    done = run_qsvc("tail", batch_id, "--from-start", "--redis", redis_url)
    assert done.stdout == f"\\x1b[2Jid: hello\n{'b' * 100}: there\n"
    with terminal(*QSVC, "tail", batch_id, "--from-start", "--redis", redis_url) as shown:
        assert shown.end() == 0
        assert "\\x1b[2Jid hello" in shown.screen.text
        assert "bbb…bbb" in shown.screen.text


def test_a_terminal_is_not_obeying_the_text_of_one_job(redis: Redis, redis_url: str) -> None:
    submit(redis, 1)
    worker = HandWorker(redis, FAKE)
    [claimed] = worker.claim()
    worker.answer(claimed, text="red: \x1b[31m\nnext")
    with terminal(*QSVC, "tail", claimed.job_id, "--redis", redis_url) as shown:
        assert shown.end() == 0
        assert shown.screen.lines[:2] == ["red: \\x1b[31m", "next"]
    done = run_qsvc("tail", claimed.job_id, "--redis", redis_url)
    assert done.stdout == "red: \x1b[31m\nnext\n", "a file gets what the model wrote"
