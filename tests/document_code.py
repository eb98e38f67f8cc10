"""Runs the programs that documents show, as they are there."""

from __future__ import annotations

import io
import re
from typing import Any

from tests.cli_helpers import ROOT

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(document: str) -> list[str]:
    """Return the programs of a document."""
    return _BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))


def run_block(block: str, redis_url: str, names: dict[str, Any]) -> str:
    """Run a program against a server and return what it prints; its names stay in ``names``.

    The server of the program, ``Redis()``, becomes that of the test.
    """
    assert "Redis()" in block
    shown = io.StringIO()

    def show(*values: object, **options: Any) -> None:
        print(*values, **{**options, "file": shown})

    names.update({"__name__": "__main__", "print": show})
    exec(block.replace("Redis()", f"Redis.from_url({redis_url!r})"), names)  # noqa: S102 - ours
    return shown.getvalue()
