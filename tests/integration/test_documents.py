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
    TUTORIAL,
    blocks_to_run,
    copy_repository,
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


@pytest.mark.parametrize("document", [page for page in PAGES if page != TUTORIAL])
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


def test_the_tutorial_runs_with_the_fake_engine(
    short_folder: Path, programs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_repository(short_folder / "qsvc")
    environment = short_folder / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/activate").write_text(f"PATH={programs}\n")
    env = {"QSVC_VENV": str(environment), "PYTHONPATH": str(folder)}
    monkeypatch.chdir(folder)
    with open_page(folder, env) as page:
        shown = [page.run(block) for block in blocks_to_run(TUTORIAL)]
    assert (folder / ".venv").resolve() == environment.resolve()
    assert any("colour is answered: What colour" in output for output in shown)
    assert any(output.startswith("Name three fruits.") for output in shown), "the application"


def test_every_example_is_shown_in_a_document_as_it_is() -> None:
    blocks = {block.text for name in documents() for block in blocks_to_run(name)}
    examples = list((ROOT / "examples").glob("*.py"))
    assert examples
    assert [path.name for path in examples if path.read_text(encoding="utf-8") not in blocks] == []
