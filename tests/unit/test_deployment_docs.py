"""What docs/deployment.md and docs/shelf-of-macs.md tell people to write is accepted."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from cli.main import COMMANDS, cli
from queue_service.sentinel_url import SentinelUrl
from queue_service.settings import SECTIONS, RedisSettings, WorkerSettings
from tests.promql import series_of
from tests.unit.test_install_service import INSTALL_SERVICE
from workers.metrics import Metrics

ROOT = Path(__file__).parents[2]
DOCUMENTS = {
    name: (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("deployment.md", "shelf-of-macs.md")
}
both = pytest.mark.parametrize("name", DOCUMENTS)


def blocks(language: str) -> list[str]:
    """The code blocks of both documents in one language."""
    return [
        block
        for text in DOCUMENTS.values()
        for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize("block", blocks("toml"))
def test_a_config_file_of_the_documents_is_accepted(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(block)
    monkeypatch.setenv("QSVC_CONFIG", str(path))
    for section in SECTIONS:
        section.load()
    assert RedisSettings.load().url == tomllib.loads(block)["redis"]["url"]


def test_the_sentinel_url_of_the_document_names_what_the_text_says() -> None:
    [url] = re.findall(r'"(redis\+sentinel://[^"]+)"', DOCUMENTS["deployment.md"])
    named = SentinelUrl.parse(url)
    assert [host for host, _ in named.sentinels] == ["s1.example", "s2.example", "s3.example"]
    assert named.service == "main"


def parsed(command: click.Command, words: list[str]) -> dict[str, Any]:
    return command.make_context("command", words).params


def test_commands_of_the_documents_exist_with_their_options() -> None:
    seen = []
    for line in "\n".join(blocks("sh")).splitlines():
        words = shlex.split(line, comments=True)
        if "scripts/install_service" in words:
            parsed(INSTALL_SERVICE.command, words[words.index("scripts/install_service") + 1 :])
            seen.append("install_service")
        if words and Path(words[0]).name == "qsvc":
            command = cli.get_command(click.Context(cli), words[1])
            assert command is not None, words
            parsed(command, [word for word in words[2:] if word != "…"])
            seen.append(words[1])
    assert {"install_service", "submit", "doctor"} <= set(seen)


@both
def test_commands_settings_and_metrics_in_the_text_exist(name: str) -> None:
    text = DOCUMENTS[name]
    for command in re.findall(r"`qsvc (\w+)", text):
        assert command in COMMANDS
    known = series_of(iter(Metrics(dict, {}, lambda: 0).registry.collect()))
    for metric in re.findall(r"`(qsvc_\w+)`", text):
        assert metric in known
    for path in re.findall(r"`((?:docker|scripts|docs)/[\w./]*\w)`", text):
        assert (ROOT / path).exists() or path.startswith("docker/secrets/"), path
    for option in re.findall(r"`(--[\w-]+)", text):
        assert option in {o for p in INSTALL_SERVICE.command.params for o in p.opts}, option


def test_the_numbers_of_the_text_are_those_of_the_code() -> None:
    text = DOCUMENTS["deployment.md"]
    grace = WorkerSettings.model_fields["grace_seconds"].default
    assert f"`grace_seconds` ({grace:g})" in text
    margin = INSTALL_SERVICE.STOP_MARGIN_SECONDS
    assert f"waits {margin} seconds" in text
