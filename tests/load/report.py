"""The report of a run: rows as `tests.benchmarks.report` describes, and the points of the picture, ``curves``.

A row has the medians of all repetitions. ``p99`` of a row about a rate or a share is the worst repetition; of a row
about latency it is the 99th percentile of the requests, the median of the repetitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from tests.benchmarks import machine, report
from tests.benchmarks.figures import Bound

from .measure import LOADS, Retries
from .outcomes import MOST_LATE_S, Figures
from .servers import SERVERS
from .setting import Setting

__all__ = ["ALL_OURS", "OURS", "Measured", "make_report"]

OURS = "ours"

#: Our servers: they are no peers.
ALL_OURS = ("ours", "ours_one")
_DEADLINE_MS = Setting().client_deadline_s * 1e3


@dataclasses.dataclass(slots=True)
class Measured:
    """All repetitions of one server.

    Attributes
    ----------
    capacities
        Requests per second.
    figures
        By load.
    retries
        Of the measurements of ``Retry-After``.
    error
        The reason why something is missing.
    """

    capacities: list[float] = dataclasses.field(default_factory=list)
    figures: dict[float, list[Figures]] = dataclasses.field(default_factory=dict)
    retries: list[Retries] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def is_complete(self) -> bool:
        """True if there are figures of each load."""
        return bool(self.capacities) and all(self.figures.get(load) for load in LOADS)

    def median_at(self, load: float, value: Callable[[Figures], float | None]) -> float | None:
        """Return the median of a figure at a load, or None without one."""
        values = [found for figures in self.figures.get(load, []) if (found := value(figures)) is not None]
        return median(values) if values else None


def make_report(
    measured: Mapping[str, Measured],
    *,
    found: Mapping[str, Any],
    command: str,
    seconds: float,
    quick: bool,
    peers: Mapping[str, str],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """Return the report.

    Parameters
    ----------
    measured
        By server.
    found
        The machine, from `tests.benchmarks.machine.describe`.
    command, seconds
        The command line, and how long it ran.
    quick
        True holds the rows to no bounds.
    peers
        Versions of the peers' packages.
    skipped
        By server: the reason why it was not measured.
    """
    complete = {name: one for name, one in measured.items() if one.is_complete}
    rows = _rows(complete, skipped) if OURS in complete else []
    for row in rows:
        checks = [] if quick else [Bound(**bound).check(row) for bound in row.pop("bounds")]
        row.pop("bounds", None)
        row.update(checks=checks, met=all(check["met"] for check in checks) if checks else None)
        if checks:
            row["bound"] = checks[0].get("at_least", checks[0].get("at_most"))
    return {
        "schema": report.SCHEMA,
        **machine.tree(),
        "command": command,
        "driver": "host",
        "small": quick,
        "machine": dict(found),
        "versions": {**machine.versions(), **peers},
        "seconds": seconds,
        "errors": {name: one.error for name, one in measured.items() if one.error},
        "rows": rows,
        "curves": [_curve(name, one) for name, one in complete.items()],
    }


def _curve(name: str, one: Measured) -> dict[str, Any]:
    """Return the medians of one server at each load."""
    fields = ("offered", "goodput", "refused", "with_retry_after", "p50_ms", "p99_ms", "p999_ms", "late_p99_ms", "held")
    points = []
    for load in LOADS:
        point: dict[str, Any] = {"load": load, "sent": sum(figures.sent for figures in one.figures[load])}
        for field in fields:
            point[field] = one.median_at(load, lambda figures, field=field: getattr(figures, field))  # type: ignore[misc]
        points.append(point)
    return {"server": name, "label": SERVERS[name].label, "capacity": median(one.capacities), "points": points}


def _rows(measured: Mapping[str, Measured], skipped: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = [_capacity_row(measured), _goodput_row(measured)]
    rows += [_latency_row(measured, load) for load in LOADS if load != 1.0]
    if any(one.sent for one in measured[OURS].retries):
        rows.append(_retry_row(measured[OURS]))
    late = max(figures.late_p99_ms for one in measured.values() for each in one.figures.values() for figures in each)
    if late > MOST_LATE_S * 1e3:
        rows[0]["notes"].append(f"the client was late: p99 {late:.1f} ms, so its core was not free")
    for row in rows[:1]:
        row["peers"].update({name: {"label": SERVERS[name].label, "skipped": why} for name, why in skipped.items()})
    return rows


def _row(name: str, title: str, unit: str, better: str, values: Sequence[float]) -> dict[str, Any]:
    """Return a row about the medians of repetitions, without baseline, peers and bounds."""
    return {
        "name": name,
        "title": title,
        "unit": unit,
        "better": better,
        "p50": median(values),
        "p99": min(values) if better == "higher" else max(values),
        "n": len(values),
        "ratio": None,
        "baseline": None,
        "figures": {},
        "peers": {},
        "notes": [],
        "bounds": [],
    }


def _set_baseline(row: dict[str, Any], label: str, value: float, n: int) -> None:
    row.update(baseline={"label": label, "p50": value, "n": n}, ratio=row["p50"] / value)


def _others(measured: Mapping[str, Measured], value: Callable[[Measured], float | None]) -> dict[str, dict[str, Any]]:
    """Return the figures of the peers, by name."""
    return {
        name: {"label": SERVERS[name].label, "p50": found, "n": len(one.capacities)}
        for name, one in measured.items()
        if name != OURS and (found := value(one)) is not None
    }


def _capacity_row(measured: Mapping[str, Measured]) -> dict[str, Any]:
    title = "capacity of a service: right results, as many requests in flight as saturate it"
    row = _row("serving_capacity", title, "requests/s", "higher", measured[OURS].capacities)
    _set_baseline(row, "the device with full batches, one directly after the other", Setting().bound, 1)
    row["peers"] = _others(measured, lambda one: median(one.capacities))
    best = [peer["p50"] for name, peer in row["peers"].items() if name not in ALL_OURS]
    if best:
        row["figures"]["times_best"] = row["p50"] / max(best)
        row["bounds"] = [{"figure": "times_best", "at_least": 1.0}]
    return row


def _goodput_row(measured: Mapping[str, Measured]) -> dict[str, Any]:
    title = f"right results within {_DEADLINE_MS:g} ms, at 150 % of the capacity"
    ours = measured[OURS]
    values = [figures.goodput for figures in ours.figures[1.5]]
    row = _row("serving_goodput_150", title, "requests/s", "higher", values)
    at_capacity = ours.median_at(1.0, lambda figures: figures.goodput) or 0.0
    _set_baseline(row, "the same at 100 %", at_capacity, len(values))
    row["figures"]["refused"] = ours.median_at(1.5, lambda figures: figures.refused)
    row["peers"] = _others(measured, lambda one: one.median_at(1.5, lambda figures: figures.goodput))
    row["bounds"] = [{"figure": "ratio", "at_least": 0.95}]
    return row


def _latency_row(measured: Mapping[str, Measured], load: float) -> dict[str, Any]:
    percent = round(load * 100)
    title = f"latency of accepted requests from their scheduled time, at {percent} % of the server's own capacity"
    ours = measured[OURS]
    values = [figures.p50_ms for figures in ours.figures[load] if figures.p50_ms is not None]
    row = _row(f"serving_latency_{percent}", title, "ms", "lower", values)
    row["p99"] = ours.median_at(load, lambda figures: figures.p99_ms)
    row["figures"] = {
        "p999_ms": ours.median_at(load, lambda figures: figures.p999_ms),
        "refused": ours.median_at(load, lambda figures: figures.refused),
    }
    row["peers"] = _others(measured, lambda one: one.median_at(load, lambda figures: figures.p50_ms))
    for name, peer in row["peers"].items():
        peer["p99"] = measured[name].median_at(load, lambda figures: figures.p99_ms)
    row["bounds"] = [{"figure": "p99", "at_most": _DEADLINE_MS}]
    return row


def _retry_row(ours: Measured) -> dict[str, Any]:
    title = "refused requests that are served when they retry after Retry-After, once the load is 80 % again"
    values = [one.held for one in ours.retries if one.held is not None]
    row = _row("serving_retry_after", title, "of the retries", "higher", values)
    row["figures"] = {
        "retries": float(sum(one.sent for one in ours.retries)),
        "with_retry_after": ours.median_at(1.5, lambda figures: figures.with_retry_after),
    }
    row["bounds"] = [{"figure": "p50", "at_least": 0.9}, {"figure": "with_retry_after", "at_least": 1.0}]
    return row
