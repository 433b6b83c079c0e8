"""The statistics of a run."""

from __future__ import annotations

import pytest

from tests.load.outcomes import Outcome, summarise


def answered(scheduled: float, latency: float, status: int = 200, **fields: object) -> Outcome:
    outcome = Outcome(0, scheduled, reached=scheduled, sent=scheduled, answered=scheduled + latency, status=status)
    for name, value in fields.items():
        setattr(outcome, name, value)
    return outcome


def test_latency_counts_from_the_scheduled_time() -> None:
    late = answered(1.0, 0.05, reached=1.03, sent=1.04)
    figures = summarise([late], 0.1, 0.0, 2.0)
    assert late.latency == pytest.approx(0.05)
    assert figures.p50_ms == pytest.approx(50)
    assert figures.late_p99_ms == figures.late_most_ms == pytest.approx(30)
    assert not figures.kept_schedule
    assert figures.held == 1.0


def test_percentiles_are_those_of_right_results() -> None:
    outcomes = [answered(0.0, number * 1e-3) for number in range(1, 1001)]
    outcomes += [answered(0.0, 9.0, status=503), answered(0.0, 9.0, problem="wrong result"), Outcome(0, 0.0)]
    figures = summarise(outcomes, 0.1, 0.0, 1.0)
    assert (figures.p50_ms, figures.p99_ms, figures.p999_ms) == pytest.approx((500, 990, 999), rel=2e-3)
    assert figures.kept_schedule
    assert figures.held == pytest.approx(1 / 1003)


def test_goodput_counts_right_results_within_the_deadline() -> None:
    outcomes = [
        *(answered(0.5, 0.1) for _ in range(6)),
        answered(0.5, 0.11),
        answered(0.5, 0.01, problem="wrong result"),
        answered(0.5, 0.01, status=429),
        Outcome(0, 0.5, problem="disconnected"),
    ]
    for outcome in outcomes[:6]:
        outcome.answered = 0.6
    figures = summarise(outcomes, 0.1, 0.0, 2.0)
    assert figures.goodput == 3.0
    assert figures.offered == 5.0
    assert figures.sent == 10
    assert figures.statuses == {0: 1, 200: 8, 429: 1}
    assert figures.problems == {"disconnected": 1, "wrong result": 1}


def test_refusals_with_and_without_retry_after() -> None:
    outcomes = [
        answered(0.0, 0.01),
        answered(0.0, 0.01, status=429, retry_after=1.0),
        answered(0.0, 0.01, status=503, retry_after=2.0),
        answered(0.0, 0.01, status=503),
        answered(0.0, 0.01, status=504),
        answered(0.0, 0.01, status=500),
    ]
    figures = summarise(outcomes, 0.1, 0.0, 1.0)
    assert figures.refused == pytest.approx(4 / 6)
    assert figures.with_retry_after == pytest.approx(2 / 3)
    assert summarise(outcomes[:1], 0.1, 0.0, 1.0).with_retry_after is None


def test_only_requests_of_the_measured_time_count() -> None:
    outcomes = [answered(at, 0.01) for at in (0.0, 0.49, 0.5, 0.99, 1.0, 1.7)]
    figures = summarise(outcomes, 0.1, 0.5, 1.0)
    assert figures.sent == 2
    assert figures.offered == 4.0
    with pytest.raises(ValueError, match="measure longer"):
        summarise(outcomes, 0.1, 5.0, 6.0)


def test_no_result_has_no_latency() -> None:
    figures = summarise([Outcome(0, 0.0, problem="no connection")], 0.1, 0.0, 1.0)
    assert (figures.p50_ms, figures.p99_ms, figures.p999_ms) == (None, None, None)
    assert figures.goodput == 0.0
