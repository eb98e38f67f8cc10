"""The benchmark of prefixes, small: that it runs, and what does not depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli_helpers import write_lines

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]
RULES = " ".join(f"Rule {n}: never put more than {n * 7 % 31} in box {n}." for n in range(24))


def bench(tmp_path: Path, *arguments: str | Path, seconds: float) -> dict[str, Any]:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_prefix", "--quick", "--json", out, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def workload(tmp_path: Path) -> Path:
    lines = []
    for number in range(3):
        question = {"role": "user", "content": f"What may be in box {number}?"}
        messages = [{"role": "system", "content": RULES}, question]
        lines.append(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": messages, "temperature": 0},
            }
        )
    return write_lines(tmp_path / "rules.jsonl", lines)


def test_what_jobs_have_in_common_is_computed_once_and_little_is_stored(tmp_path: Path) -> None:
    rows = bench(tmp_path, "--parts", "shape", seconds=120)["shape"]
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    for row in rows:
        assert row["prefix_prefills"] == 1
        assert row["computed_tokens"] == row["distinct_tokens"]
        assert 0 < row["files"] <= 8
        assert row["disk_bytes"] < (60e6 if row["dtype"] == "float32" else 30e6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part_of_the_benchmark_runs(tmp_path: Path) -> None:
    figures = bench(tmp_path, "--workloads", workload(tmp_path), seconds=580)
    peers = {row["peer"]: row for row in figures["workloads"]["summary"]}
    assert set(peers) == {"cold", "warm", "by-hand"}
    assert peers["cold"]["computed_tokens"] == peers["cold"]["distinct_tokens"]
    assert peers["warm"]["computed_tokens"] < peers["cold"]["computed_tokens"]
    assert peers["warm"]["equal_to_cold"] == "3 of 3"
    assert peers["by-hand"]["equal_to_cold"] == "3 of 3"
    assert all(row["exact"] for row in figures["codec"]["rows"])
    assert figures["codec"]["opening"]["files"] == 100
    assert figures["writing"]["step_ms"] > 0
