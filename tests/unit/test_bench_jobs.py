"""The jobs of a benchmark: the first of a file, or ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from queue_service.batch_file import BatchLine, open_batch, read_batch
from queue_service.errors import BatchFileError, ConfigurationError
from tests.cli_helpers import chat_line, chat_lines, write_lines
from workers.bench_jobs import BUILT_IN, NUM_BUILT_IN, BenchJobs, built_in_jobs, jobs_of_file


def first(path: Path, count: int, **options: Any) -> BenchJobs:
    with open_batch(path) as file:
        return jobs_of_file(file, count, **options)


def read_back(jobs: BenchJobs, path: Path) -> list[BatchLine]:
    jobs.write(path)
    with open_batch(path) as file:
        lines = list(read_batch(file))
    assert all(isinstance(line, BatchLine) for line in lines)
    return [line for line in lines if isinstance(line, BatchLine)]


def test_the_first_jobs_of_a_file_are_taken(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(9))
    jobs = first(file, 3)
    assert (len(jobs), jobs.source) == (3, str(file))
    assert [line.custom_id for line in read_back(jobs, tmp_path / "out")] == ["c1", "c2", "c3"]
    assert len(first(file, 100)) == 9


def test_bare_bodies_and_completions_are_jobs_too(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 9}])
    [line] = read_back(first(file, 1, max_tokens=4), tmp_path / "out")
    assert (line.endpoint.value, line.body["max_tokens"]) == ("/v1/completions", 4)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, 8), ({"max_tokens": 4}, 4), ({"max_tokens": 99}, 8), ({"max_completion_tokens": 99}, 8)],
)
def test_answers_are_no_longer_than_max_tokens(
    tmp_path: Path, fields: dict[str, int], limit: int
) -> None:
    file = write_lines(tmp_path / "in.jsonl", [chat_line("a", "hi", **fields)])
    [line] = read_back(first(file, 1, max_tokens=8), tmp_path / "out")
    assert line.body["max_tokens"] == limit
    assert "max_completion_tokens" not in line.body
    [line] = read_back(first(file, 1), tmp_path / "out")
    assert line.body.items() >= fields.items()


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", [*chat_lines(2), "{bad"])
    with pytest.raises(BatchFileError, match=r"in\.jsonl: line 3: invalid_json_line: "):
        first(file, 9)
    assert len(first(file, 2)) == 2  # it is not among them


def test_a_line_that_allows_no_shorter_answer_is_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", [chat_line("a", "hi", max_tokens=9, min_tokens=6)])
    with pytest.raises(BatchFileError, match=r"line 1: .*--max-tokens 4"):
        first(file, 1, max_tokens=4)


def test_a_file_without_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="no request"):
        first(write_lines(tmp_path / "in.jsonl", []), 1)


def test_built_in_jobs_differ_and_have_answers_of_one_length(tmp_path: Path) -> None:
    jobs = built_in_jobs(NUM_BUILT_IN, max_tokens=5)
    lines = read_back(jobs, tmp_path / "out")
    assert jobs.source == BUILT_IN
    assert len({line.body["messages"][0]["content"] for line in lines}) == NUM_BUILT_IN == 128
    assert {(line.body["max_tokens"], line.body["ignore_eos"]) for line in lines} == {(5, True)}


def test_there_are_not_more_built_in_jobs_than_that() -> None:
    with pytest.raises(ConfigurationError, match=r"128 built-in prompts, not 129"):
        built_in_jobs(129)
