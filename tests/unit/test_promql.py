"""The check of alerts and panels finds what Prometheus would refuse, or show as nothing."""

from __future__ import annotations

import pytest

from tests.promql import UP, Series, Wrong, check

KNOWN = {
    **UP,
    "qsvc_jobs_total": Series("counter", {"ending": frozenset({"failed"})}),
    "qsvc_rows": Series("gauge"),
    "qsvc_wait_bucket": Series("bucket", {"le": frozenset()}),
    "qsvc_wait_count": Series("counter"),
}


@pytest.mark.parametrize(
    "expression",
    [
        'absent(up{job="qsvc-worker"} == 1)',
        "sum(rate(qsvc_jobs_total[5m])) * 60",
        'sum by (ending) (increase(qsvc_jobs_total{ending="failed"}[1h])) > 5',
        "max(deriv(qsvc_rows[15m])) > 0 and sum(qsvc_rows) / 2 > 0",
        "histogram_quantile(0.9, sum by (le) (rate(qsvc_wait_bucket[$__rate_interval])))",
        "resets(qsvc_jobs_total[1h]) > 1 or vector(0)",
    ],
)
def test_a_good_expression_passes(expression: str) -> None:
    check(expression, KNOWN)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("sum(rate(qsvc_jobs_total[5m])", "never closed"),
        ("sum(qsvc_rows))", "closes nothing"),
        ("sum(qsvc_rows}", "closes nothing"),
        ("sum(qsvc_rows) ; 1", "not understood"),
        ("sum(rate(qsvc_jobs[5m]))", "no metric"),
        ("qsvc_jobs_total > 5", "only grows"),
        ("sum(qsvc_jobs_total)", "only grows"),
        ("rate(sum(qsvc_jobs_total)[5m])", "only grows"),
        ("rate(qsvc_jobs_total)", "only grows"),
        ("rate(qsvc_rows[5m])", "a gauge"),
        ("max(qsvc_rows[5m])", "a gauge"),
        ("deriv(qsvc_rows)", "a gauge"),
        ("rate(5[5m])", "belongs to no series"),
        ("sum(rate(qsvc_wait_bucket[5m]))", "need each other"),
        ("histogram_quantile(0.9, sum by (le) (rate(qsvc_wait_count[5m])))", "need each other"),
        ("histogram_quantile(0.9, sum(rate(qsvc_wait_bucket[5m])))", "needs the label le"),
        ('rate(qsvc_jobs_total{end="failed"}[5m])', "no label end"),
        ('rate(qsvc_jobs_total{ending="fialed"}[5m])', "has never"),
        ("rate(qsvc_jobs_total{ending}[5m])", "malformed"),
        ("sum by (reason) (qsvc_rows)", "nothing has a label"),
        ("average(qsvc_rows)", "no function"),
        ("sum over qsvc_rows", "no function"),
    ],
)
def test_a_bad_expression_is_named_with_the_reason(expression: str, why: str) -> None:
    with pytest.raises(Wrong, match=why):
        check(expression, KNOWN)
