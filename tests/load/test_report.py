"""The report of a run, and its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import readme
from tests.benchmarks.report import write
from tests.load.measure import LOADS, Retries
from tests.load.outcomes import Figures
from tests.load.report import Measured, make_report
from tests.load.setting import Setting

MACHINE = {"cpus": 2, "cpu": "a processor", "platform": "Linux", "gpu": None, "reason": "no driver"}


def figures(load: float, capacity: float, *, p99_ms: float | None = 60.0, late_ms: float = 0.1) -> Figures:
    offered = load * capacity
    refused = max(0.0, 1 - 1 / load)
    return Figures(
        sent=round(offered),
        seconds=1.0,
        statuses={200: round(offered * (1 - refused))},
        problems={},
        offered=offered,
        goodput=min(offered, capacity),
        refused=refused,
        with_retry_after=1.0 if refused else None,
        p50_ms=20.0 * load,
        p99_ms=p99_ms,
        p999_ms=p99_ms,
        late_p99_ms=late_ms,
        late_most_ms=late_ms,
        held=0.0,
    )


def measured(*capacities: float, **fields: Any) -> Measured:
    each = {load: [figures(load, capacity, **fields) for capacity in capacities] for load in LOADS}
    return Measured(list(capacities), each, [Retries(200, 0.97)])


def reported(*, quick: bool = False, **servers: Any) -> dict[str, Any]:
    return make_report(
        servers,
        found=MACHINE,
        command="python -m tests.load",
        seconds=1.0,
        quick=quick,
        peers={"mosec": "1.0"},
        skipped={"with_litserve": "litserve not installed"},
    )


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["rows"]}


def test_rows_have_medians_bounds_and_peers() -> None:
    found = rows(reported(ours=measured(1350, 1340, 1300), with_mosec=measured(1250, 1260, 1270)))
    capacity = found["serving_capacity"]
    assert (capacity["p50"], capacity["p99"], capacity["n"]) == (1340, 1300, 3)
    assert capacity["ratio"] == 1340 / Setting().bound
    assert capacity["peers"]["with_mosec"] == {"label": "mosec", "p50": 1260, "n": 3}
    assert capacity["peers"]["with_litserve"]["skipped"] == "litserve not installed"
    assert capacity["figures"]["times_best"] == 1340 / 1260
    assert capacity["met"] is True
    assert found["serving_goodput_150"]["ratio"] == 1.0
    assert found["serving_latency_95"]["p50"] == 19.0
    assert found["serving_latency_95"]["p99"] == 60.0
    assert found["serving_retry_after"]["p50"] == 0.97
    assert {row["met"] for row in found.values()} == {True}


@pytest.mark.parametrize(
    ("name", "servers"),
    [
        ("serving_capacity", {"ours": measured(1200), "with_mosec": measured(1250)}),
        ("serving_latency_150", {"ours": measured(1300, p99_ms=101.0)}),
        ("serving_latency_50", {"ours": measured(1300, p99_ms=101.0)}),
    ],
)
def test_missed_bound_is_seen(name: str, servers: dict[str, Any]) -> None:
    assert rows(reported(**servers))[name]["met"] is False


def test_retries_that_are_refused_again_and_lost_goodput_miss_their_bounds() -> None:
    ours = measured(1300)
    ours.retries = [Retries(100, 0.89)]
    ours.figures[1.5] = [figures(1.5, 1300 * 0.94)]
    found = rows(reported(ours=ours))
    assert found["serving_retry_after"]["met"] is False
    assert found["serving_goodput_150"]["met"] is False


def test_late_client_is_noted() -> None:
    assert rows(reported(ours=measured(1300)))["serving_capacity"]["notes"] == []
    (note,) = rows(reported(ours=measured(1300, late_ms=7.0)))["serving_capacity"]["notes"]
    assert "the client was late: p99 7.0 ms" in note


def test_quick_run_is_held_to_no_bound() -> None:
    report = reported(quick=True, ours=measured(1200), with_mosec=measured(1250))
    assert report["small"] is True
    assert all(row["met"] is None and row["checks"] == [] for row in report["rows"])


def test_server_that_failed_has_an_error_and_no_curve() -> None:
    broken = Measured([1200.0], {0.5: [figures(0.5, 1200)]}, error="it has ended")
    report = reported(ours=measured(1300), with_mosec=broken)
    assert report["errors"] == {"with_mosec": "it has ended"}
    assert [curve["server"] for curve in report["curves"]] == ["ours"]
    assert reported(ours=broken)["rows"] == []


def test_tables_of_the_documentation_show_all_servers_and_loads(tmp_path: Path) -> None:
    write(reported(ours=measured(1350), with_mosec=measured(1250, p99_ms=None)), tmp_path / "host-serving.json")
    table = readme.section(tmp_path)
    assert "| capacity of a service" in table
    assert "1.08 × the best of the others (≥ 1)" in readme.limits(tmp_path)
    assert "| aiocuda | 1 350 | 10 / 60 / 60 | 16 / 60 / 60 | 19 / 60 / 60 | 20 / 60 / 60 | 30 / 60 / 60 |" in table
    assert "| mosec | 1 250 | 10 / – / – |" in table
