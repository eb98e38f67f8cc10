"""Makes links that leave docs/ work on the site: it gets a copy of each file that a page names.

mkdocs calls the two functions; mkdocs.yml names this file.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
CHANGES = "changes.md"
_LINK = re.compile(r"(?<=\]\()(?P<path>\.\./[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make a page of the changelog, which lies where people look for it in a repository."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, CHANGES, content=changes))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to what the site has of them."""
    folder = PurePosixPath(page.file.src_uri).parent
    docs = Path(config.docs_dir).resolve()

    def on_site(link: re.Match[str]) -> str:
        target = (docs / folder / link["path"]).resolve()
        if target.is_relative_to(docs) or not target.is_file():
            return link[0]  # mkdocs itself says when there is no such file
        name = target.relative_to(ROOT).as_posix()
        uri = CHANGES if name == "CHANGELOG.md" else _copy(name, config, files)
        up = "../" * len(folder.parts)
        return f"{up}{uri}{link['anchor'] or ''}"

    return _LINK.sub(on_site, markdown)


def _copy(name: str, config: MkDocsConfig, files: Files) -> str:
    """Put a file of the repository on the site, as text that a browser shows; return where."""
    uri = f"source/{name}.txt"
    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, content=(ROOT / name).read_bytes()))
    return uri
