"""The documents keep up with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import COMMANDS
from queue_service.requests import FIELD_USES, Endpoint
from queue_service.scripts import Scripts
from tests.document_code import documents

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["make_settings_doc", "make_cli_doc", "make_metrics_doc"])
def test_a_document_that_is_made_from_code_says_what_the_code_does(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_names_every_command(command: str) -> None:
    assert re.search(rf"\bqsvc {command}\b", read("README.md"))


@pytest.mark.parametrize("script", Scripts.NAMES)
def test_the_redis_document_has_a_heading_for_every_script(script: str) -> None:
    assert f"\n### {script}.lua\n" in read("docs/redis.md")


@pytest.mark.parametrize("document", documents())
def test_links_between_documents_lead_to_files(document: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(document))
    assert [link for link in links if not ((ROOT / document).parent / link).exists()] == []


@pytest.mark.parametrize("document", ["docs/structure.md", "docs/redis.md"])
def test_files_that_a_document_names_exist(document: str) -> None:
    names = re.findall(r"`((?:queue_service|workers|cli|scripts|tests)/[\w./]*\w)`", read(document))
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("endpoint", "heading"), [(Endpoint.CHAT, "Chat"), (Endpoint.COMPLETIONS, "Completions")]
)
def test_the_document_of_requests_tells_the_use_of_every_field(
    endpoint: Endpoint, heading: str
) -> None:
    sections = re.split(r"^## (.+)$", read("docs/requests.md"), flags=re.MULTILINE)
    rows: list[tuple[str, str]] = []
    for name, text in zip(sections[1::2], sections[2::2], strict=True):
        if name in ("Both endpoints", heading):
            rows += re.findall(r"^\| `(\w+)` \| (\w+) \|", text, flags=re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert dict(rows) == FIELD_USES[endpoint]


def test_every_field_in_the_document_of_requests_names_a_test_that_exists() -> None:
    text = read("docs/requests.md")
    tests = re.findall(r"`(\w+\.py)::(test_\w+)`", text)
    assert len(tests) >= len(re.findall(r"^\| `", text, flags=re.MULTILINE))
    assert [
        f"{file}::{test}"
        for file, test in tests
        if f"def {test}(" not in read(f"tests/unit/{file}")
    ] == []
