"""What the rows about waits compute: durations, the figures of a run, the worst of all runs."""

from __future__ import annotations

from itertools import islice
from statistics import fmean
from typing import Any

import pytest

from tests.benchmarks import report
from tests.benchmarks.__main__ import main
from tests.benchmarks.durations import PATTERNS, REPEATING, SURPRISING, durations, mean
from tests.benchmarks.lateness import POLICIES, RAW, Cell, described, limited
from tests.benchmarks.rows import GROUPS, ROWS, size
from tests.benchmarks.runs import Runs
from tests.benchmarks.streams_bound import compared
from tests.benchmarks.waits_report import table


@pytest.mark.parametrize("pattern", PATTERNS)
def test_durations_have_their_mean_and_depend_on_the_seed(pattern: str) -> None:
    drawn = list(islice(durations(pattern, 1), 20_000))
    assert fmean(drawn) == pytest.approx(mean(pattern), rel=0.03)
    assert drawn == list(islice(durations(pattern, 1), 20_000))
    if pattern not in ("constant", "in_turn"):
        assert drawn != list(islice(durations(pattern, 2), 20_000))
    assert list(islice(durations(pattern, 1, scale=0.5), 9)) == pytest.approx([seconds / 2 for seconds in drawn[:9]])


def test_each_pattern_repeats_or_surprises() -> None:
    assert sorted([*REPEATING, *SURPRISING]) == sorted(PATTERNS)


def cells(**late: list[float]) -> dict[str, dict[str, Cell]]:
    """The same µs and half a core for each pattern; a raw callback is late by 100 µs and takes 0.1 cores."""
    given = {policy: late.get(policy, [100.0] * 10) for policy in POLICIES}
    found = {way: {pattern: Cell(list(us), 0.5) for pattern in PATTERNS} for way, us in given.items()}
    return {**found, RAW: {pattern: Cell([100.0] * 10, 0.1) for pattern in PATTERNS}}


def test_limits_of_lateness_are_of_all_patterns_together() -> None:
    measured = cells(balanced=[150.0] * 199 + [1150.0], latency=[180.0] * 200)
    measured["balanced"]["uniform"].late_us[0] = 5100.0  # one of 1 200 is no p99
    limits = limited(measured)
    assert limits["p99_beyond_raw_ms"] == pytest.approx(0.05)
    assert limits["longest_beyond_raw_ms"] == pytest.approx(5.0)
    assert limits["latency_p99_beyond_raw_ms"] == pytest.approx(0.08)


def test_a_slow_pattern_is_seen_in_its_p50_and_its_cores() -> None:
    measured = cells()
    measured["balanced"]["constant"] = Cell([700.0] * 10, 0.4)
    measured["balanced"]["uniform"] = Cell([700.0] * 10, 0.2)
    limits = limited(measured)
    assert limits["constant_p50_ms"] == pytest.approx(0.7)
    assert limits["longer_p50_ms"] == pytest.approx(0.1)
    assert limits["uniform_p50_beyond_raw_ms"] == pytest.approx(0.6)
    assert limits["in_turn_p50_beyond_raw_ms"] == 0.0
    assert limits["constant_cores"] == 0.4
    assert limits["uniform_cores_beyond_raw"] == pytest.approx(0.2 - 1.8 * 0.1)
    assert limits["lognormal_cores_beyond_raw"] == pytest.approx(0.5 - 1.8 * 0.1)


def test_each_way_and_pattern_has_its_figures() -> None:
    figures = described(cells(efficient=[float(us) for us in range(1, 201)]))
    assert len(figures) == 4 * 4 * len(PATTERNS)
    assert figures["efficient_uniform_p50_us"] == 100.0
    assert figures["efficient_uniform_p99_us"] == 198.0
    assert figures["efficient_uniform_max_us"] == 200.0
    assert figures["raw_uniform_cores"] == 0.1


def test_runs_have_a_median_and_a_worst_value() -> None:
    runs = Runs()
    for value in (3.0, 1.0, 9.0, 2.0, 4.0):
        runs.add({"late": value, "share": value})
    assert runs.medians() == {"late": 3.0, "share": 3.0}
    assert runs.worst("lower", "late") == {"worst_late": 9.0}
    assert runs.worst("higher", "share") == {"worst_share": 1.0}


def test_one_slow_run_of_five_misses_a_limit() -> None:
    runs = Runs()
    for late in (100.0, 100.0, 900.0, 100.0, 100.0):
        runs.add(limited(cells(balanced=[late] * 10)))
    worst = runs.worst("lower", *runs.medians())
    result: dict[str, Any] = {"samples": [100.0], "baseline": [100.0], "figures": runs.medians() | worst}
    row = report.row_report(ROWS["lateness_16"], result, {})
    checks = {check["figure"]: check["met"] for check in row["checks"]}
    assert checks["worst_p99_beyond_raw_ms"] is False
    assert checks["worst_longest_beyond_raw_ms"] is True
    assert row["figures"]["p99_beyond_raw_ms"] == 0.0
    assert row["met"] is False


def test_streams_are_compared_by_the_medians_of_a_run() -> None:
    figures = compared(
        {"raw": [30.0, 31.0, 90.0], "gather": [31.0, 32.0, 31.0], "tasks": [33.0], "callbacks": [32.0, 33.0, 34.0]}
    )
    assert figures["gather_of_raw"] == 1.0
    assert figures["tasks_of_callbacks"] == 1.0
    assert (figures["raw_ms"], figures["callbacks_ms"]) == (31.0, 33.0)


def test_sizes_are_replaced_by_name() -> None:
    row = ROWS["stuck_host_function"]
    other = dict([size("runs=1"), size("launches=7")])
    assert row.size(False, other) == {**row.sizes, "runs": 1.0}
    assert row.size(True, other)["slice"] == row.small["slice"]
    with pytest.raises(ValueError, match="no row has a size 'run'"):
        size("run=1")


def test_command_refuses_a_size_that_no_row_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["waits", "--size", "run=1"])
    assert "run=1" in capsys.readouterr().err


def test_groups_have_the_rows_that_a_run_of_all_leaves_out() -> None:
    assert {name for names in GROUPS.values() for name in names} == {name for name, row in ROWS.items() if row.group}
    assert not GROUPS.keys() & ROWS.keys()


def test_table_has_a_line_for_each_pattern_of_a_row_about_lateness() -> None:
    figures = described(cells(latency=[180.0] * 10))
    rows = [{"name": "lateness_16", "figures": figures}, {"name": "lateness_1", "figures": {}}]
    lines = table({"rows": rows}).splitlines()
    assert len(lines) == 2 + len(PATTERNS)
    assert "| lateness_16, uniform | 100, 100, 100; 0.50 | 180, 180, 180; 0.50 |" in lines[4]
    assert {line.count("|") for line in lines} == {6}
