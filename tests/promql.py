"""Checks Prometheus expressions against a worker's metrics: brackets, names, labels, types.

It is no parser of the whole language: what our alerts and panels do not use is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

_TOKEN = re.compile(
    r"""\s*(?: (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])
      | (?P<number>\d+(?:\.\d+)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<operator>=~|!~|!=|==|>=|<=|[-+*/%<>=,])
      | (?P<bracket>[(){}])
    )""",
    re.VERBOSE,
)
_OF_COUNTERS = {"rate", "increase", "resets"}
_OF_GAUGES = {"deriv", "max_over_time", "min_over_time"}
_AGGREGATIONS = {"sum", "max", "min", "count"}
_OTHERS = {"histogram_quantile", "absent", "vector"}
_WORDS = {"and", "or", "unless"}


class Wrong(Exception):
    """An expression that Prometheus would refuse, or that would show nothing or nonsense."""


@dataclass(frozen=True)
class Series:
    """What is known of one metric's samples: its type, its labels, their values where fixed."""

    kind: str
    labels: Mapping[str, frozenset[str]] = field(default_factory=dict)


# Every target has these two labels, and this series tells whether it answers.
_TARGET: Mapping[str, frozenset[str]] = {"job": frozenset({"qsvc-worker"}), "instance": frozenset()}
UP = {"up": Series("gauge", _TARGET)}


def series_of(metrics: Iterator[Metric]) -> dict[str, Series]:
    """Return every sample name of these metrics."""
    found: dict[str, Series] = dict(UP)
    for metric in metrics:
        for sample in metric.samples:
            kind = metric.type if not sample.name.endswith("_bucket") else "bucket"
            if metric.type == "histogram" and sample.name.endswith(("_sum", "_count")):
                kind = "counter"
            known = found.get(sample.name, Series(kind)).labels
            told = {
                name: known.get(name, frozenset()) | {value}
                for name, value in sample.labels.items()
            }
            found[sample.name] = Series(kind, {**_TARGET, **told})
    return found


def names_in(expression: str) -> set[str]:
    """Return the series that an expression asks for."""
    return set(re.findall(r"\bqsvc_\w+\b|\bup\b", expression))


def check(expression: str, known: Mapping[str, Series]) -> None:
    """Raise Wrong unless an expression is fit for these series."""
    tokens = list(_tokens(expression))
    open_brackets: list[tuple[str, str]] = []  # the bracket, and what stands before it
    last = ""
    i = 0
    while i < len(tokens):
        kind, text = tokens[i]
        following = tokens[i + 1][1] if i + 1 < len(tokens) else ""
        if text in ("(", "{"):
            open_brackets.append((text, last))
        elif text in (")", "}"):
            if not open_brackets or {"(": ")", "{": "}"}[open_brackets.pop()[0]] != text:
                raise Wrong(f"{text} closes nothing: {expression}")
        elif kind == "range":
            raise Wrong(f"{text} belongs to no series: {expression}")
        elif kind == "name" and open_brackets and open_brackets[-1][1] == "by":
            if not any(text in series.labels for series in known.values()):
                raise Wrong(f"nothing has a label {text}: {expression}")
        elif kind == "name" and text in known:
            i = _check_series(text, known[text], tokens, i, open_brackets, expression)
            last = text
            continue
        elif kind == "name":
            _check_word(text, following, expression)
        last = text
        i += 1
    if open_brackets:
        raise Wrong(f"{open_brackets[-1][0]} is never closed: {expression}")


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    position, end = 0, len(expression.rstrip())
    while position < end:
        match = _TOKEN.match(expression, position)
        if match is None:
            raise Wrong(f"not understood: {expression[position:]}")
        position = match.end()
        assert match.lastgroup is not None
        yield match.lastgroup, match[match.lastgroup]


def _check_word(word: str, following: str, expression: str) -> None:
    functions = _OF_COUNTERS | _OF_GAUGES | _OTHERS
    if word in functions and following == "(":
        return
    if word in _AGGREGATIONS and following in ("(", "by"):
        return
    if (word == "by" and following == "(") or word in _WORDS:
        return
    raise Wrong(f"{word} is no metric and no function that is known here: {expression}")


def _check_series(
    name: str,
    series: Series,
    tokens: list[tuple[str, str]],
    i: int,
    open_brackets: list[tuple[str, str]],
    expression: str,
) -> int:
    """Check one series, its matchers and its range; return where what follows them begins."""
    i += 1
    if i < len(tokens) and tokens[i][1] == "{":
        i = _check_matchers(name, series, tokens, i + 1, expression)
    has_range = i < len(tokens) and tokens[i][0] == "range"
    function = open_brackets[-1][1] if open_brackets else ""
    if series.kind in ("counter", "bucket"):
        if not has_range or function not in _OF_COUNTERS:
            raise Wrong(f"{name} only grows: it needs rate, increase or resets: {expression}")
    elif has_range != (function in _OF_GAUGES) or function in _OF_COUNTERS:
        raise Wrong(f"{name} is a gauge: {expression}")
    functions = {before for _, before in open_brackets}
    if (series.kind == "bucket") != ("histogram_quantile" in functions):
        raise Wrong(f"histogram_quantile and buckets need each other: {expression}")
    if series.kind == "bucket" and not re.search(r"by \([^)]*\ble\b", expression):
        raise Wrong(f"a quantile needs the label le: {expression}")
    return i + 1 if has_range else i


def _check_matchers(
    name: str, series: Series, tokens: list[tuple[str, str]], i: int, expression: str
) -> int:
    while True:
        shape = [kind for kind, _ in tokens[i : i + 4]]
        if shape[:3] != ["name", "operator", "string"]:
            raise Wrong(f"the labels of {name} are malformed: {expression}")
        (_, label), (_, operator), (_, value), (_, after) = tokens[i : i + 4]
        if label not in series.labels:
            raise Wrong(f"{name} has no label {label}: {expression}")
        values = series.labels[label]
        if operator == "=" and values and value.strip('"') not in values:
            raise Wrong(f"{name} has never {label}={value}: {expression}")
        i += 4
        if after == "}":
            return i
