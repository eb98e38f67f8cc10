"""The documents in which the answers of a model are the point are run with the demo model."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from queue_service import keys
from queue_service.local_server import LocalServer
from tests.cli_helpers import QSVC, ROOT, content_of, custom_ids_of, read_output, start_qsvc
from tests.document_code import (
    MODEL_PAGES,
    PREFIXES,
    STRUCTURED,
    TUTORIAL,
    blocks_to_run,
    copy_repository,
    open_page,
    program_folder,
)
from tests.harness import eventually

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="qsvc-docs-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with a worker of the demo model."""
    env = {
        "QSVC_CONFIG": os.devnull,
        "QSVC_CACHE_FOLDER": str(tmp_path_factory.mktemp("cache")),
    }
    with tempfile.TemporaryDirectory(prefix="qsvc-docs-") as data:
        server = LocalServer(Path(data))
        url = server.start()
        worker = start_qsvc(
            "worker", "--model", "smollm2-135m", "--redis", url, program=QSVC, env=env
        )
        try:
            with Redis.from_url(url) as connection:
                card = keys.model_card("smollm2-135m")
                eventually(lambda: connection.exists(card), "the worker is up", seconds=180)
            yield url
            worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=60)
        finally:
            worker.kill()
            worker.communicate()
            server.stop()


@pytest.mark.parametrize("document", [page for page in MODEL_PAGES if page != TUTORIAL])
def test_the_blocks_of_a_document_run_in_their_order(
    document: str, service: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSVC_REDIS_URL", service)
    monkeypatch.setenv("PATH", program_folder(tmp_path / "bin"))
    monkeypatch.chdir(folder)
    with open_page(folder, {"PYTHONPATH": str(ROOT)}, service) as page:
        shown = [page.run(block, seconds=180) for block in blocks_to_run(document)]
    if document == STRUCTURED:
        assert re.search(r"^3 labels: ", shown[-1], re.MULTILINE), "each answer fits the schema"
    if document == PREFIXES:
        [cached] = re.findall(r"\((\d+) cached\)", "".join(shown))
        assert int(cached) > 300, "three lines begin with what the first one computed"
        *_, last = shown[-1].splitlines()
        assert int(last.split()[0]) > 0, "the second turn begins with the first one"


def test_the_tutorial_is_followed_in_a_fresh_checkout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = copy_repository(folder / "qsvc")
    env = {"QSVC_VENV": sys.prefix, "PYTHONPATH": str(checkout)}
    monkeypatch.chdir(checkout)
    try:
        with open_page(checkout, env) as page:
            blocks = blocks_to_run(TUTORIAL)
            shown = {block.text: page.run(block, seconds=180) for block in blocks}
    finally:
        # The tutorial's last commands stop it; a test that fails before them leaves none behind.
        LocalServer(checkout / "server").stop()
    assert shown["python examples/ask.py\n"].strip(), "the application's answer"
    lines = read_output(checkout / "answers.jsonl")
    assert custom_ids_of(lines) == ["colour", "count", "wrong"]
    assert "banana" in content_of(lines[0])
