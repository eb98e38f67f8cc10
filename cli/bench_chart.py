"""Draws a benchmark as one SVG file: rates and latencies against row counts, for light and dark.

Nothing but this file is needed to show it: no font, no script, no style sheet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from workers.bench_figures import RunFigures, Spread

_WIDTH: Final = 860
_HEIGHT: Final = 640
_TOP: Final = 84
_PANEL_WIDTH: Final = 400
_PANEL_HEIGHT: Final = 258
# Inside a panel: room for its title, its scale and the row counts.
_LEFT, _RIGHT, _ABOVE, _BELOW = 62, 22, 42, 46
_NUM_TICKS: Final = 4
_LONGEST_TITLE: Final = 100
# XML has no place for these, escaped or not.
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLE: Final = """
  svg { color-scheme: light dark; font: 13px system-ui, sans-serif; }
  .ground { fill: #ffffff; } .text { fill: #1f2328; } .dim { fill: #59636e; }
  .grid { stroke: #d1d9e0; } .first { stroke: #0969da; fill: none; stroke-width: 2; }
  .second { stroke: #bc4c00; fill: none; stroke-width: 2; stroke-dasharray: 6 4; }
  .first-mark { fill: #0969da; } .second-mark { fill: #bc4c00; }
  .title { font-size: 17px; font-weight: 600; } .panel { font-weight: 600; }
  .label { stroke: #ffffff; stroke-width: 4px; paint-order: stroke; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; } .text { fill: #f0f6fc; } .dim { fill: #9198a1; }
    .grid { stroke: #3d444d; } .first { stroke: #4493f8; } .second { stroke: #f0883e; }
    .label { stroke: #0d1117; } .first-mark { fill: #4493f8; } .second-mark { fill: #f0883e; }
  }
"""


@dataclass(frozen=True, slots=True)
class _Series:
    """A line of a panel; None where a run has no such figure."""

    name: str
    values: Sequence[float | None]
    css: str


@dataclass(frozen=True, slots=True)
class _Panel:
    """A picture of its own with a scale of its own, from 0 on."""

    title: str
    unit: str
    series: Sequence[_Series]


def chart(runs: Sequence[RunFigures], *, title: str, subtitle: str) -> str:
    """Return the picture of some runs, at least one.

    Row counts are set at equal distances: they mostly double.
    """
    counts = [run.rows for run in runs]
    panels = [
        _Panel("Generated tokens a second", "tokens/s", [_rates(runs)]),
        _latency("Whole job", runs, lambda run: run.job),
        _latency("First token", runs, lambda run: run.first_token),
        _latency("Between tokens", runs, lambda run: run.between_tokens),
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-labelledby="title about">',
        f'<title id="title">{_clean(title)}</title>',
        f'<desc id="about">{_clean(_description(runs))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}"/>',
        _text(24, 34, _shortened(title), "text title"),
        _text(24, 56, _shortened(subtitle), "dim"),
        *_legend(_WIDTH - 190, 56),
    ]
    for place, panel in enumerate(panels):
        x = 20 + place % 2 * (_PANEL_WIDTH + 20)
        y = _TOP + place // 2 * (_PANEL_HEIGHT + 12)
        parts += _draw(panel, counts, x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rates(runs: Sequence[RunFigures]) -> _Series:
    return _Series("", [run.tokens_per_second for run in runs], "first")


def _latency(
    title: str, runs: Sequence[RunFigures], spread_of: Callable[[RunFigures], Spread | None]
) -> _Panel:
    spreads = [spread_of(run) for run in runs]
    most = max((spread.p95 for spread in spreads if spread is not None), default=1.0)
    factor, unit = (1.0, "seconds") if most >= 1 else (1000.0, "milliseconds")
    return _Panel(
        title,
        unit,
        [
            _Series("p50", [None if s is None else factor * s.p50 for s in spreads], "first"),
            _Series("p95", [None if s is None else factor * s.p95 for s in spreads], "second"),
        ],
    )


def _draw(panel: _Panel, counts: Sequence[int], x: float, y: float) -> Iterable[str]:
    left, right = x + _LEFT, x + _PANEL_WIDTH - _RIGHT
    top, bottom = y + _ABOVE, y + _PANEL_HEIGHT - _BELOW
    known = [value for one in panel.series for value in one.values if value is not None]
    step = tick_step(max(known, default=0.0))
    num_steps = max(1, math.ceil(max(known, default=0.0) / step - 1e-9))

    def across(place: int) -> float:
        return left + (place + 0.5) * (right - left) / len(counts)

    def up(value: float) -> float:
        return bottom - value / (step * num_steps) * (bottom - top)

    yield _text(x, y + 20, panel.title, "text panel")
    yield _text(x + _PANEL_WIDTH - _RIGHT, y + 20, panel.unit, "dim", "end")
    for tick in range(num_steps + 1):
        height = up(tick * step)
        yield (
            f'<line class="grid" x1="{left:.1f}" y1="{height:.1f}" '
            f'x2="{right:.1f}" y2="{height:.1f}"/>'
        )
        yield _text(left - 8, height + 4, _number(tick * step), "dim", "end")
    for place, count in enumerate(counts):
        yield _text(across(place), bottom + 38, f"{count:,}", "dim", "middle")
    yield _text(left - 8, bottom + 38, "rows", "dim", "end")
    for one in panel.series:
        spots = [(across(p), up(v), v) for p, v in enumerate(one.values) if v is not None]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in spots)
        yield f'<polyline class="{one.css}" points="{points}"/>'
        for a, b, value in spots:
            said = f"{one.name} {_number(value)} {panel.unit}".strip()
            yield (
                f'<circle class="{one.css}-mark" cx="{a:.1f}" cy="{b:.1f}" r="4">'
                f"<title>{_clean(said)}</title></circle>"
            )
    # The upper line has its numbers above it, the lower one below.
    for one, shift in zip(reversed(panel.series), (-10, 20), strict=False):
        for place, figure in enumerate(one.values):
            if figure is not None:
                yield _text(
                    across(place), up(figure) + shift, _number(figure), "text label", "middle"
                )


def _legend(x: float, y: float) -> Iterable[str]:
    for place, (name, css) in enumerate((("p50", "first"), ("p95", "second"))):
        at = x + 90 * place
        yield f'<line class="{css}" x1="{at}" y1="{y - 4}" x2="{at + 34}" y2="{y - 4}"/>'
        yield _text(at + 40, y, name, "text")


def tick_step(most: float) -> float:
    """Return the distance of a scale's lines: 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return 1.0
    wanted = most / _NUM_TICKS
    power: float = 10.0 ** math.floor(math.log10(wanted))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * 0.999)


def _description(runs: Sequence[RunFigures]) -> str:
    told = (f"{run.rows} rows: {run.tokens_per_second:,.1f} tokens/s" for run in runs)
    return "; ".join(told)


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _text(x: float, y: float, text: str, css: str, anchor: str = "start") -> str:
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_clean(text)}</text>'
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TITLE else f"{text[: _LONGEST_TITLE - 1]}…"


def _clean(text: str) -> str:
    """Return a text as XML may hold it."""
    return escape(_NOT_XML.sub("\ufffd", text))
