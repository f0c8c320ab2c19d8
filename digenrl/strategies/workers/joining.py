"""Joining what the ranks of one worker report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from digenrl.metrics import MetricAccumulator, MetricValue
from digenrl.strategies.span import Span
from digenrl.strategies.workers.reports import GenerateReport, ScoreReport


def even_shares(num_rows: int, num_ranks: int) -> list[tuple[int, int]]:
    """Cut rows into consecutive shares [start, stop), one for each rank, which differ by one row at most."""
    return [(rank * num_rows // num_ranks, (rank + 1) * num_rows // num_ranks) for rank in range(num_ranks)]


def join_spans(spans: Sequence[Span]) -> Span:
    """Give the time from the first rank's begin to the last one's end."""
    return Span(min(span.start_s for span in spans), max(span.end_s for span in spans))


def join_score_reports(reports: Sequence[ScoreReport]) -> ScoreReport:
    """Put the ranks' rewards one after another."""
    return ScoreReport(
        tuple(reward for report in reports for reward in report.rewards),
        _join_metrics(report.metrics for report in reports),
        join_spans([report.span for report in reports]),
    )


def join_generate_reports(reports: Sequence[GenerateReport]) -> GenerateReport:
    """Put the ranks' samples one after another; ranks that only followed have none."""
    scores = [report.score for report in reports if report.score is not None]
    return GenerateReport(
        tuple(ref for report in reports for ref in report.trajectories),
        _join_metrics(report.metrics for report in reports),
        join_spans([report.span for report in reports]),
        join_score_reports(scores) if scores else None,
    )


def _join_metrics(parts: Iterable[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    metrics = MetricAccumulator()
    for part in parts:
        metrics.join(part)
    return metrics.take()
