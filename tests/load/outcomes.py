"""`Outcome`: the end of one request, and `Figures`: the statistics of many."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tests.benchmarks.figures import percentile

__all__ = ["MOST_LATE_S", "REFUSALS", "Figures", "Outcome", "summarise"]

#: The statuses of a service that refuses a request: too many requests, overloaded, deadline.
REFUSALS = frozenset({429, 503, 504})

#: Those of them that come with ``Retry-After``. 504 is about the deadline of the request, not about the server.
COME_BACK = frozenset({429, 503})

#: Seconds. A client whose 99th percentile of lateness is above this did not keep its schedule.
MOST_LATE_S = 0.005


@dataclasses.dataclass(slots=True)
class Outcome:
    """One request. Times are in seconds since the begin of the run.

    Attributes
    ----------
    number
        Of the request in its run.
    scheduled
        The time at which it should be sent. Its latency counts from here.
    attempt
        0; 1 for the retry of a refused request.
    reached
        The time at which the client came to it, or None if the run ended before.
    sent
        The time at which a connection took it, or None. Later than ``reached`` if all connections were in use.
    answered
        The time of the complete response, or None.
    status
        Of the response; 0 without one.
    retry_after
        The response's ``Retry-After`` in seconds, or None.
    problem
        The reason why there is no right response.
    """

    number: int
    scheduled: float
    attempt: int = 0
    reached: float | None = None
    sent: float | None = None
    answered: float | None = None
    status: int = 0
    retry_after: float | None = None
    problem: str = ""

    @property
    def latency(self) -> float:
        """Seconds from the scheduled time to the response; infinite without one."""
        return float("inf") if self.answered is None else self.answered - self.scheduled

    @property
    def is_accepted(self) -> bool:
        """True if the right result came, in time or late."""
        return self.status == 200 and not self.problem

    @property
    def is_refused(self) -> bool:
        """True if the server refused it."""
        return self.status in REFUSALS


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Statistics of requests of one run.

    Attributes
    ----------
    sent
        Requests that were scheduled in the measured time.
    seconds
        The measured time.
    statuses
        Number of requests by status. Key 0: without response.
    problems
        Number of requests by problem.
    offered
        Requests per second.
    goodput
        Right results within the deadline, per second.
    refused
        Share of the requests that the server refused.
    with_retry_after
        Share of the refusals with status 429 or 503 that have ``Retry-After``; None without one.
    p50_ms, p99_ms, p999_ms
        Percentiles of the latency of right results, counted from the scheduled time; None without a result.
    late_p99_ms, late_most_ms
        Lateness of the client: from the scheduled time until it came to the request.
    held
        Share of the requests that waited for a connection, a new one or one in use.
    """

    sent: int
    seconds: float
    statuses: dict[int, int]
    problems: dict[str, int]
    offered: float
    goodput: float
    refused: float
    with_retry_after: float | None
    p50_ms: float | None
    p99_ms: float | None
    p999_ms: float | None
    late_p99_ms: float
    late_most_ms: float
    held: float

    @property
    def kept_schedule(self) -> bool:
        """True if the client sent its requests in time. Otherwise the figures are those of the client."""
        return self.late_p99_ms <= MOST_LATE_S * 1e3


def summarise(outcomes: Iterable[Outcome], deadline_s: float, begin: float, end: float) -> Figures:
    """Return the statistics of the requests that were scheduled from ``begin`` until before ``end``.

    Raises
    ------
    ValueError
        No request was scheduled then.
    """
    chosen = [outcome for outcome in outcomes if begin <= outcome.scheduled < end]
    if not chosen:
        raise ValueError(f"no request was scheduled between {begin} and {end} s: measure longer, or at a higher rate")
    accepted = [outcome.latency for outcome in chosen if outcome.is_accepted]
    refused = [outcome for outcome in chosen if outcome.is_refused]
    later = [outcome for outcome in refused if outcome.status in COME_BACK]
    late = [outcome.reached - outcome.scheduled for outcome in chosen if outcome.reached is not None]
    seconds = end - begin
    return Figures(
        sent=len(chosen),
        seconds=seconds,
        statuses=dict(sorted(Counter(outcome.status for outcome in chosen).items())),
        problems=dict(sorted(Counter(outcome.problem for outcome in chosen if outcome.problem).items())),
        offered=len(chosen) / seconds,
        goodput=sum(latency <= deadline_s for latency in accepted) / seconds,
        refused=len(refused) / len(chosen),
        with_retry_after=_share(later, lambda outcome: outcome.retry_after is not None),
        p50_ms=_percentile_ms(accepted, 50),
        p99_ms=_percentile_ms(accepted, 99),
        p999_ms=_percentile_ms(accepted, 99.9),
        late_p99_ms=_percentile_ms(late, 99) or 0.0,
        late_most_ms=max(late, default=0.0) * 1e3,
        held=_share(chosen, lambda outcome: outcome.sent is None or outcome.sent != outcome.reached) or 0.0,
    )


def _percentile_ms(seconds: Sequence[float], q: float) -> float | None:
    return percentile(seconds, q) * 1e3 if seconds else None


def _share(outcomes: Sequence[Outcome], holds: Callable[[Outcome], bool]) -> float | None:
    """Return the share of the outcomes for which something holds, or None without any."""
    return sum(map(holds, outcomes)) / len(outcomes) if outcomes else None
