"""What scripts that make a document from code do with it."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(path: Path, text: str) -> None:
    """Write a document; with --check only say whether the file is stale, and end with 1 if so."""
    if sys.argv[1:] != ["--check"]:
        path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        sys.exit(f"{path} is stale: run scripts/{Path(sys.argv[0]).name}")
