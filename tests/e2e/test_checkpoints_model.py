"""Checkpoints on the real path: what one `qsvc run` computed, the next one reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Queue

from queue_service import keys, tasks
from queue_service.results import read_job
from queue_service.settings import CheckpointSettings
from tests.cli_helpers import content_of, read_output, run_qsvc, write_lines

pytestmark = pytest.mark.model

NOTES = " ".join(
    f"Item {n} is in box {n * 7 % 31}, which is {n * 13 % 29} steps away." for n in range(24)
)
QUESTIONS = ("Which box has item 3?", "How far is item 9?", "Name one item.")


def line(name: str, question: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": NOTES}, {"role": "user", "content": question}]
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, "max_tokens": 8, "temperature": 0, **body},
    }


def cached_tokens(answer: dict[str, Any]) -> int:
    usage = answer["response"]["body"]["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def run(tmp_path: Path, name: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    file, out = write_lines(tmp_path / f"{name}.jsonl", lines), tmp_path / f"{name}-out.jsonl"
    done = run_qsvc("run", file, "-o", out, seconds=120)
    assert done.returncode == 0, done.stderr
    return read_output(out)


def test_a_prefix_is_computed_once_for_every_run_after(tmp_path: Path) -> None:
    lines = [line(str(i), question) for i, question in enumerate(QUESTIONS)]
    cold = run(tmp_path, "cold", lines)
    assert cached_tokens(cold[0]) == 0
    shared = cached_tokens(cold[1])
    assert shared > 256
    # Writes are not 0 on the real path, and neither are hits after a restart.
    assert any(CheckpointSettings.load().folder.rglob("*.qkv"))
    warm = run(tmp_path, "warm", lines)
    assert all(cached_tokens(answer) >= shared for answer in warm)
    assert [content_of(answer) for answer in warm] == [content_of(answer) for answer in cold]
    verified = run_qsvc("cache", "verify", "--json")
    assert verified.returncode == 0, verified.stderr


def test_a_chat_goes_on_in_the_next_run_where_its_answer_ended(tmp_path: Path) -> None:
    first = line("turn 1", QUESTIONS[0], session_id="s")
    [answer] = run(tmp_path, "one", [first])
    told = answer["response"]["body"]
    second = line("turn 2", "And item 4?", session_id="s")
    question = second["body"]["messages"].pop()
    second["body"]["messages"] += [
        first["body"]["messages"][1],
        {"role": "assistant", "content": content_of(answer)},
        question,
    ]
    [following] = run(tmp_path, "two", [second])
    # All of the turn before but its last token, which was drawn and never fed.
    assert cached_tokens(following) >= told["usage"]["total_tokens"] - 1


def test_a_file_is_planned_so_that_the_second_of_a_group_finds_what_the_first_computed(
    tmp_path: Path,
) -> None:
    def shuffled(notes: str) -> list[dict[str, Any]]:
        lines = [line(str(i), question) for i, question in enumerate([*QUESTIONS, "Why?"])]
        for one, group in zip(lines, "ABAB", strict=True):
            one["body"]["messages"][0]["content"] = f"{notes} {group}. {NOTES[: len(NOTES) // 2]}"
        return lines

    env = {"QSVC_WORKER_CLAIM_AHEAD": "0"}
    cached: dict[str, list[int]] = {}
    said: dict[str, str] = {}
    for flag in ("--plan", "--no-plan"):
        file = write_lines(tmp_path / f"in{flag}.jsonl", shuffled(f"Notes {flag}"))
        out = tmp_path / f"out{flag}.jsonl"
        done = run_qsvc("run", file, "-o", out, "--slots", "1", flag, env=env, seconds=180)
        assert done.returncode == 0, done.stderr
        cached[flag], said[flag] = (
            [cached_tokens(answer) for answer in read_output(out)],
            done.stderr,
        )
    assert "4 of 4 lines begin like others, in 2 groups" in said["--plan"]
    assert "begin like others" not in said["--no-plan"]
    assert all(tokens > 128 for tokens in cached["--plan"][2:]), cached
    # Without a plan nobody knows that what comes for the first time will come again.
    assert all(tokens < 128 for tokens in cached["--no-plan"]), cached


@pytest.mark.slow
def test_eight_bits_at_rest_take_a_quarter_of_the_room_and_still_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line(str(i), question) for i, question in enumerate(QUESTIONS)]
    sizes = {}
    for form in ("exact", "8bit"):
        folder = tmp_path / form
        monkeypatch.setenv("QSVC_CHECKPOINTS_FOLDER", str(folder))
        monkeypatch.setenv("QSVC_CHECKPOINTS_AT_REST", form)
        cold = run(tmp_path, f"{form}-cold", lines)
        warm = run(tmp_path, f"{form}-warm", lines)
        sizes[form] = sum(file.stat().st_size for file in folder.rglob("*.qkv"))
        assert all(cached_tokens(answer) > 256 for answer in warm)
        assert all(content_of(answer).strip() for answer in cold + warm)
    assert sizes["8bit"] < 0.35 * sizes["exact"]


def test_plain_jobs_are_looked_at_before_they_are_claimed(redis: Redis, redis_url: str) -> None:
    """One row, nothing claimed ahead: only the queue can tell that the first prompt's beginning
    will come again."""
    alias = keys.alias_for("smollm2-135m")
    queue = Queue(keys.queue_name(alias), connection=redis, serializer="json")
    jobs = [
        queue.enqueue(tasks.CHAT, line(str(i), question)["body"])
        for i, question in enumerate(QUESTIONS[:2])
    ]
    env = {"QSVC_WORKER_CLAIM_AHEAD": "0"}
    command = ("worker", "--model", "smollm2-135m", "--redis", redis_url, "--slots", "1", "--burst")
    done = run_qsvc(*command, env=env, seconds=120)
    assert done.returncode == 0, done.stderr
    bodies = [read_job(redis, job.id).body for job in jobs]
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies if body]
    assert cached[0] == 0
    assert cached[1] > 256
