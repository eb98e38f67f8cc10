"""The jobs that a benchmark runs: the first of a person's file, or prompts of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from queue_service.batch_file import BatchFile, read_batch
from queue_service.errors import BatchFileError, ConfigurationError, LineError, RequestError
from queue_service.requests import Endpoint, parse_request

BUILT_IN = "built-in prompts"
BUILT_IN_TOKENS = 64

_TASKS = (
    "Explain {} to a child of ten in one paragraph.",
    "Write the beginning of a story in which {} plays a part.",
    "List what a newcomer should know about {}, the most important first.",
    "A friend says that {} is overrated. Answer in a short letter.",
    "Compare {} as it is today with how it was a hundred years ago.",
    "What are three common mistakes of people who write about {}?",
    "Write a quiz of five questions about {}, with the answers at the end.",
    "Describe {} from the point of view of a traveller who meets it for the first time.",
)
_SUBJECTS = (
    "the tide", "a lighthouse", "bread", "the violin", "chess", "a glacier", "the printing press",
    "rain", "a night train", "honey", "the compass", "a market square", "volcanoes", "tea",
    "the bicycle", "a library",
)  # fmt: skip
NUM_BUILT_IN = len(_TASKS) * len(_SUBJECTS)


@dataclass(frozen=True, slots=True)
class BenchJobs:
    """Some requests, as lines of a batch file.

    Attributes:
        source: where they are from, for people.
        lines: objects with custom_id, method, url and body.
    """

    source: str
    lines: Sequence[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.lines)

    def write(self, path: Path) -> None:
        """Write the batch file."""
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in self.lines)


def jobs_of_file(file: BatchFile, count: int, *, max_tokens: int | None = None) -> BenchJobs:
    """Return the first jobs of a file.

    Args:
        count: how many; all when the file has fewer.
        max_tokens: no answer may have more; None leaves the limits as they are.

    Raises:
        BatchFileError: the file cannot be read, has no job, or one of these lines is bad.
    """
    lines: list[dict[str, Any]] = []
    for line in read_batch(file):
        if isinstance(line, LineError):
            raise BatchFileError(f"{file.name}: line {line.line}: {line.code}: {line.message}")
        try:
            body = (
                line.body if max_tokens is None else _capped(line.endpoint, line.body, max_tokens)
            )
        except RequestError as error:
            raise BatchFileError(
                f"{file.name}: line {line.line}: {error.message} (with --max-tokens {max_tokens})"
            ) from error
        lines.append(_line(line.custom_id, line.endpoint, body))
        if len(lines) == count:
            break
    return BenchJobs(file.name, lines)


def built_in_jobs(count: int, *, max_tokens: int | None = None) -> BenchJobs:
    """Return prompts of our own, none like another, each with an answer of the same length.

    Raises:
        ConfigurationError: there are not so many.
    """
    if count > NUM_BUILT_IN:
        raise ConfigurationError(
            f"there are {NUM_BUILT_IN} built-in prompts, not {count}: name a FILE, or fewer --jobs"
        )
    prompts = [task.format(subject) for task in _TASKS for subject in _SUBJECTS]
    return BenchJobs(BUILT_IN, list(_built_in(prompts[:count], max_tokens or BUILT_IN_TOKENS)))


def _built_in(prompts: Sequence[str], max_tokens: int) -> Iterator[dict[str, Any]]:
    for number, prompt in enumerate(prompts, start=1):
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            # All answers have one length, whatever a model has to say.
            "ignore_eos": True,
        }
        yield _line(f"prompt-{number}", Endpoint.CHAT, body)


def _capped(endpoint: Endpoint, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    limit = parse_request(endpoint, body, is_clean=True).token_limit
    capped = {**body, "max_tokens": max_tokens if limit is None else min(limit, max_tokens)}
    capped.pop("max_completion_tokens", None)
    parse_request(endpoint, capped, is_clean=True)
    return capped


def _line(custom_id: str, endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": endpoint.value, "body": body}
