"""The commands and programs of the documents are run as they are there, with the fake engine."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from queue_service.client import enqueue_chat, wait
from queue_service.connection import connect
from queue_service.settings import RedisSettings
from tests.cli_helpers import FAKE_QSVC, ROOT
from tests.document_code import (
    MODEL_PAGES,
    blocks_to_run,
    documents,
    open_page,
    program_folder,
)
from tests.harness import chat_body, running_worker, worker_settings

# Where a block takes for granted that something is there, it is this.
ALIAS = "smollm2-135m"
PAGES = [name for name in documents() if blocks_to_run(name) and name not in MODEL_PAGES]


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with the command whose workers have the fake engine."""
    return program_folder(
        tmp_path / "bin",
        qsvc=list(FAKE_QSVC),
        redis_cli=[sys.executable, "-m", "tests.fake_redis_cli"],
    )


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="qsvc-docs-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("document", PAGES)
def test_the_blocks_of_a_document_run_in_their_order(
    document: str,
    redis_url: str,
    programs: str,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(ROOT / "examples", short_folder / "examples")
    shutil.copy(ROOT / "examples/jobs.jsonl", short_folder / "jobs.jsonl")
    monkeypatch.setenv("QSVC_REDIS_URL", redis_url)
    monkeypatch.setenv("PATH", programs)
    monkeypatch.chdir(short_folder)
    shown = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_worker(worker_settings(redis_url, alias=ALIAS)))
        connection = stack.enter_context(connect(RedisSettings.load(url=redis_url)))
        job = enqueue_chat(connection, chat_body("a job that streams", stream=True))
        wait(connection, job, timeout_seconds=30)
        env = {"PYTHONPATH": str(ROOT), "JOB": job}
        page = stack.enter_context(open_page(short_folder, env, redis_url))
        for block in blocks_to_run(document):
            shown[block] = page.run(block)
    # The fake engine answers with the question.
    for block, output in shown.items():
        if "Name three fruits." in block.text and "print" in block.text:
            assert "Name three fruits." in output, block.place
        if "cat report.txt" in block.text:
            assert output.endswith("Name three fruits.\n"), block.place
        if "$JOB" in block.text:
            assert "a job that streams" in output, block.place


def test_every_example_is_shown_in_a_document_as_it_is() -> None:
    blocks = {block.text for name in documents() for block in blocks_to_run(name)}
    examples = list((ROOT / "examples").glob("*.py"))
    assert examples
    assert [path.name for path in examples if path.read_text(encoding="utf-8") not in blocks] == []
