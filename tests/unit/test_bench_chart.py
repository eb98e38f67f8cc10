"""The picture of a benchmark is one well-formed SVG that needs nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest

from cli.bench_chart import chart, tick_step
from tests.bench_samples import ended_job, failed_job, run_at, run_of
from workers.bench_figures import RunFigures

SVG = "{http://www.w3.org/2000/svg}"
RUNS = (run_at(1, 10, wait=1.0), run_at(8, 60, wait=2.0), run_at(32, 90, wait=8.0))


def drawn(
    runs: Sequence[RunFigures] = RUNS, *, title: str = "a model", subtitle: str = "here"
) -> str:
    return chart(runs, title=title, subtitle=subtitle)


def texts(svg: str) -> list[str]:
    return ["".join(one.itertext()) for one in ET.fromstring(svg).iter(f"{SVG}text")]


def test_it_is_well_formed_and_has_titles_units_and_row_counts() -> None:
    found = texts(drawn())
    assert {"a model", "here", "p50", "p95", "rows", "1", "8", "32"} <= set(found)
    assert "Generated tokens a second" in found
    assert "tokens/s" in found
    assert {"Whole job", "First token", "Between tokens"} <= set(found)
    assert "seconds" in found
    assert "milliseconds" in found


def test_every_rate_is_written_at_its_point() -> None:
    found = texts(drawn())
    assert {"10", "60", "90"} <= set(found)
    circles = list(ET.fromstring(drawn()).iter(f"{SVG}circle"))
    assert len(circles) == 3 * (1 + 2 + 2 + 2)


def test_higher_rates_are_higher_up() -> None:
    circles = list(ET.fromstring(drawn()).iter(f"{SVG}circle"))[:3]
    heights = [float(circle.attrib["cy"]) for circle in circles]
    assert heights == sorted(heights, reverse=True)
    places = [float(circle.attrib["cx"]) for circle in circles]
    assert places == sorted(places)


def test_nothing_is_drawn_outside() -> None:
    root = ET.fromstring(drawn())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(one.attrib.get(name, 0)) <= width
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(one.attrib.get(name, 0)) <= height


def test_it_refers_to_nothing_outside_and_runs_nothing() -> None:
    svg = drawn().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//|url\(|@import|href|<script|<image|<use|foreignObject", svg)
    assert not re.search(r"\son\w+=", svg)


def test_it_has_colours_for_light_and_dark() -> None:
    assert "prefers-color-scheme: dark" in drawn()


@pytest.mark.parametrize(
    "text", ['</title><script>alert("1")</script>', "a & b < c", "\x00\x1b[31m\ud800"]
)
def test_texts_are_escaped(text: str) -> None:
    svg = drawn(title=text, subtitle=text)
    root = ET.fromstring(svg.encode())
    assert not list(root.iter(f"{SVG}script"))
    readable = re.sub("[\x00\x1b\ud800]", "\ufffd", text)
    assert texts(svg)[:2] == [readable, readable]


def test_a_long_title_is_cut() -> None:
    assert texts(drawn(title="m" * 500))[0] == "m" * 99 + "…"


def test_a_run_without_a_figure_leaves_a_gap() -> None:
    assert "Between tokens" in texts(drawn([run_of(1, ended_job(tokens=1)), run_of(2)]))
    ET.fromstring(drawn([run_of(1, failed_job())]))


@pytest.mark.parametrize(
    ("most", "step"),
    [(0.0, 1.0), (4.0, 1.0), (7.0, 2.0), (90.0, 50.0), (0.04, 0.01), (1000.0, 500.0), (80.0, 20.0)],
)
def test_a_scale_has_round_steps(most: float, step: float) -> None:
    assert tick_step(most) == pytest.approx(step)
