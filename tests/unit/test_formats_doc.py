"""docs/formats.md shows what the code makes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from queue_service.batch_file import open_batch, read_batch
from queue_service.batches import Batch, Status
from queue_service.errors import BatchFileError, LineError
from queue_service.requests import Endpoint
from queue_service.responses import (
    Choice,
    FinishReason,
    Usage,
    completion_body,
    failure_line,
    success_line,
    unanswered_line,
)
from queue_service.sweeper import _GONE
from tests.cli_helpers import ROOT, chat_line, write_lines
from workers.outcomes import _CODES

TEXT = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
OBJECTS = [json.loads(block) for block in re.findall(r"^```json\n(.*?)\n```$", TEXT, re.M)]
REQUEST, ANSWER, FAILURE, UNANSWERED, COMPLETION, BATCH = OBJECTS
JOB = "batch_0a1b2c3d4e5f60718293a4b5-"


def made(endpoint: Endpoint, shown: dict[str, Any]) -> dict[str, Any]:
    """The answer that the code makes of what a shown one tells."""
    [choice] = shown["choices"]
    usage = shown["usage"]
    text = choice["text"] if endpoint is Endpoint.COMPLETIONS else choice["message"]["content"]
    num_tokens = usage["completion_tokens"]
    return completion_body(
        endpoint,
        job_id=f"{JOB}1",
        model=shown["model"],
        created=shown["created"],
        choices=[Choice(text, FinishReason(choice["finish_reason"]), num_tokens)],
        usage=Usage(usage["prompt_tokens"], num_tokens),
        fingerprint=shown["system_fingerprint"],
    )


def test_the_shown_answers_are_what_the_code_makes() -> None:
    body = made(Endpoint.CHAT, ANSWER["response"]["body"])
    assert success_line(f"{JOB}1", "a-1", body) == ANSWER
    assert made(Endpoint.COMPLETIONS, COMPLETION) == COMPLETION


def test_the_shown_errors_are_what_the_code_makes(tmp_path: Path) -> None:
    bad = chat_line("a-2", "x", max_tokens=0)
    file = write_lines(tmp_path / "f.jsonl", [chat_line("a-1", "x"), bad])
    [error] = errors_of(file)
    told = {**error.to_error(), "line": error.line, "status_code": error.status_code}
    assert failure_line(f"{JOB}2", "a-2", told) == FAILURE
    brief = UNANSWERED["error"]
    assert unanswered_line(f"{JOB}3", "a-3", brief["code"], brief["message"]) == UNANSWERED


def test_the_shown_batch_has_the_fields_of_one() -> None:
    counts = BATCH["request_counts"]
    batch = Batch(
        id=BATCH["id"],
        status=Status(BATCH["status"]),
        endpoint=BATCH["endpoint"],
        queue="qsvc:smollm2-135m",
        model=BATCH["model"],
        total=counts["total"],
        completed=counts["completed"],
        failed=counts["failed"],
        cancelled=counts["cancelled"],
        is_submitted=True,
        prompt_tokens=BATCH["usage"]["input_tokens"],
        completion_tokens=BATCH["usage"]["output_tokens"],
        cached_tokens=0,
        timestamps={n: v for n, v in BATCH.items() if n.endswith("_at") and v is not None},
        metadata=BATCH["metadata"],
        retention_seconds=1,
        forgotten=0,
    )
    assert batch.to_object() == BATCH


def errors_of(file: Path, **limits: int) -> list[LineError]:
    with open_batch(str(file)) as opened:
        return [item for item in read_batch(opened, **limits) if isinstance(item, LineError)]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}
BAD_LINES = {
    "invalid_json_line": "[1]",
    "missing_field": {"custom_id": "x"},
    "duplicate_custom_id": chat_line("first", "x"),
    "url_mismatch": {**chat_line("x", "x"), "url": "/v1/completions"},
    "invalid_request": chat_line("x", "x", max_tokens=0),
    "invalid_schema": chat_line("x", "x", response_format=SCHEMA),
}


def codes_of_table(heading: str) -> set[str]:
    [_, rest] = TEXT.split(f"\n## {heading}\n")
    table = re.findall(r"^\| (`.*?) \|", rest.split("\n## ")[0], re.M)
    return {code for cell in table for code in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(("code", "line"), BAD_LINES.items())
def test_a_bad_line_has_the_code_of_the_table(code: str, line: Any, tmp_path: Path) -> None:
    assert code in codes_of_table("A file of requests")
    file = write_lines(tmp_path / "f.jsonl", [chat_line("first", "x"), line])
    assert [error.code for error in errors_of(file)] == [code]


def test_an_empty_file_and_one_that_is_too_long_have_the_codes_of_the_table(
    tmp_path: Path,
) -> None:
    assert {"empty_file", "too_many_tasks"} <= codes_of_table("A file of requests")
    with pytest.raises(BatchFileError) as refusal:
        errors_of(write_lines(tmp_path / "empty.jsonl", []))
    assert refusal.value.code == "empty_file"
    file = write_lines(tmp_path / "f.jsonl", [chat_line("a", "x"), chat_line("b", "x")])
    assert [error.code for error in errors_of(file, max_lines=1)] == ["too_many_tasks"]


def test_the_document_has_every_code_that_a_worker_gives() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", TEXT, re.M)
    told = {(code, int(status)) for code, status in rows}
    assert told >= {*_CODES.values(), (_GONE["code"], _GONE["status_code"])}
