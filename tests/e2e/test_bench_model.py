"""`qsvc bench` with the demo model."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from queue_service.settings import PathSettings
from tests.cli_helpers import chat_line, run_qsvc, write_lines

pytestmark = pytest.mark.model


def test_a_benchmark_of_the_demo_model_has_every_figure(tmp_path: Path) -> None:
    lines = [
        chat_line(city, f"Where is {city}?", max_tokens=99, temperature=0, ignore_eos=True)
        for city in ("Paris", "Rome", "Oslo", "Cairo", "Lima")
    ]
    file = write_lines(tmp_path / "in.jsonl", lines)
    figures, picture = tmp_path / "out.json", tmp_path / "out.svg"
    done = run_qsvc(
        "bench", file, "--model", "smollm2-135m", "--rows", "1,2,2000", "--jobs", "4",
        "--max-tokens", "4", "--json", figures, "--svg", picture, seconds=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "best for throughput: " in done.stdout
    told = json.loads(figures.read_text())
    assert told["model"]["dtype"] == "float32"
    assert told["machine"]["versions"].keys() >= {"mlx", "mlx-lm"}
    assert [run["rows"] for run in told["runs"]] == [1, 2]
    assert [one["rows"] for one in told["skipped"]] == [2000]
    for run in told["runs"]:
        assert (run["jobs"], run["failed"], run["restarts"]) == (4, 0, 0)
        assert run["completion_tokens"] == 16
        assert run["most_rows"] == run["rows"]
        assert 0 < run["first_token"]["p50"] < run["job"]["p50"] < run["seconds"]
        assert run["between_tokens"]["p95"] > 0
        assert run["peak_bytes"] > told["model"]["weight_bytes"]
        assert run["peak_kv_bytes"] > 0
    # No run found what another one had computed: only what its own jobs share was there.
    assert told["runs"][0]["cached_tokens"] == told["runs"][1]["cached_tokens"]
    assert len(list(ET.parse(picture).iter("{http://www.w3.org/2000/svg}circle"))) == 2 * 7
    assert list(PathSettings.load().cache_folder.glob("bench*")) == []
    assert not (PathSettings.load().cache_folder / "checkpoints").exists()
