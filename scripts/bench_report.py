"""What the benchmarks of the engine have in common: workloads, the machine, tables, files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_processes import ROOT, llama_program

FOLDERS = (ROOT / "shared" / "workloads", ROOT.parent / "shared" / "workloads")


def find(name: str, folder: Path | None) -> Path:
    """Return the batch file of a name, or of which it is the beginning in a folder."""
    if Path(name).is_file():
        return Path(name)
    for place in [folder] if folder else FOLDERS:
        found = sorted(place.glob(f"{name}*.jsonl"))
        if found:
            return found[0]
    raise SystemExit(f"no file {name}, and no workload of that name; see --folder")


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def count_jobs(file: Path) -> int:
    return len(file.read_text().splitlines())


def describe_machine(
    *, threads: int, row_limit: int, dtype: str = "float32", with_llama: bool = False
) -> dict[str, Any]:
    versions = {}
    for name in ("qsvc", "mlx", "mlx-lm", "ngsolve-openblas"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if with_llama and (program := llama_program()):
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        versions["llama-server"] = (done.stdout + done.stderr).strip().partition("\n")[0]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "threads": threads,
        "row_limit": row_limit,
        "dtype": dtype,
        "versions": versions,
    }


def print_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as Markdown.

    Args:
        columns: the heading of each key, in their order; a row without the key has an empty cell.
    """
    print("| " + " | ".join(columns.values()) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        cells = ("" if row.get(name) is None else str(row[name]) for name in columns)
        print("| " + " | ".join(cells) + " |")
    print(flush=True)


def save(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
