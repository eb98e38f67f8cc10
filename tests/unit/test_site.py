"""The site over docs/ is built without a warning, and takes nothing from another host."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.cli_helpers import ROOT
from tests.document_code import all_blocks, documents


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(site)],
        cwd=config.parent,
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Addresses(HTMLParser):
    """Collects what a page loads, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            elif name in ("src", "srcset", "data", "poster") or (name == "href" and tag == "link"):
                self.loaded.append(value or "")
            elif name == "href":
                self.links.append(value or "")


def pages(site: Path) -> Iterator[tuple[Path, Addresses]]:
    found = sorted(site.rglob("*.html"))
    assert len(found) > 20
    for path in found:
        addresses = Addresses()
        addresses.feed(path.read_text(encoding="utf-8"))
        yield path, addresses


def is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def test_a_page_loads_nothing_from_another_host(site: Path) -> None:
    for path, addresses in pages(site):
        assert [one for one in addresses.loaded if is_elsewhere(one)] == [], path
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", text), path
        # Diagrams would be drawn by a script that is fetched from elsewhere.
        assert 'class="mermaid"' not in text, path
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", text), path


def test_every_link_on_the_site_leads_to_a_file_of_it_and_a_place_in_it(site: Path) -> None:
    ids = {path.resolve(): addresses.ids for path, addresses in pages(site)}
    for path, addresses in pages(site):
        # The page for wrong addresses is served at any of them, so its links begin at the root.
        for link in addresses.links if path.name != "404.html" else []:
            if is_elsewhere(link):
                continue
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if target.is_dir():
                target /= "index.html"
            assert target.is_file(), f"{path.relative_to(site)}: {link}"
            if parts.fragment and target.suffix == ".html" and parts.fragment != "__skip":
                assert unquote(parts.fragment) in ids[target], f"{path.relative_to(site)}: {link}"


def test_a_file_outside_the_documents_that_a_page_names_is_on_the_site(site: Path) -> None:
    shown = (site / "source/examples/ask.py.txt").read_bytes()
    assert shown == (ROOT / "examples/ask.py").read_bytes()
    assert "Unreleased" in (site / "changes.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", [name for name in documents() if name != "README.md"])
def test_every_block_of_a_document_is_shown_as_code(document: str, site: Path) -> None:
    page = site / Path(document).relative_to("docs").with_suffix(".html")
    shown = re.findall(r"<pre.*?</pre>", page.read_text(encoding="utf-8"), re.DOTALL)
    texts = [html.unescape(re.sub(r"<.*?>", "", one)) for one in shown]
    assert texts == [block.text for block in all_blocks(document)]


@pytest.mark.parametrize(
    ("link", "missed"),
    [("no-page.md", "no-page.md"), ("index.md#no-place", "#no-place"), ("../no-file", "no-file")],
)
def test_a_link_to_nothing_is_an_error(link: str, missed: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Page\n\n[words]({link})\n")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[0]
    hooks = f"hooks:\n  - {ROOT / 'scripts/site_hooks.py'}"
    config = re.sub(r"hooks:\n.*", hooks, config)
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert missed in done.stderr
