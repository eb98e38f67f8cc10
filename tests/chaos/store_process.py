"""A process of its own for tests of checkpoints: it forks children that write until they die.

Commands on standard input: a line of JSON, ``{"root", "model", "first", "count", "budget"}``. Each
answers with the child's id and lets the child store ``count`` prompts, counted from ``first``; the
child writes a line for each on standard output, then its end: ``done <id>``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.checkpoints import segments
from workers.checkpoints.directory import DirectoryStore
from workers.checkpoints.records import Identity

TOKENS = 700
WIDTH = 128


def prompt(number: int) -> list[int]:
    """Every fifth begins anew; the others share 300 tokens with the one before them."""
    shared = [number // 5] * 300
    return [*shared, *((number * 31 + place) % 5000 for place in range(TOKENS - len(shared)))]


def identity(model: str) -> Identity:
    return Identity({"model": model})


def write(root: str, model: str, first: int, count: int, budget: int) -> None:
    """Store prompts, and say so one by one."""
    store = DirectoryStore(Path(root), identity(model), budget)
    for number in range(first, first + count):
        tokens = prompt(number)
        start = store.covers(tokens)
        if start < len(tokens):
            for one in segments(
                tokens, start, identity=identity(model), width=WIDTH, max_bytes=1 << 19
            ):
                store.put(one)
        print(f"stored {number}", flush=True)
    print(f"counts {json.dumps(store.counts())}", flush=True)


def main() -> None:
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            write(**command)
            os._exit(0)
        print(f"child {child}", flush=True)
        os.waitpid(child, 0)
        print(f"done {child}", flush=True)


if __name__ == "__main__":
    main()
