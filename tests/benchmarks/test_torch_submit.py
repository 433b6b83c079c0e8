"""The row about `submit`: its ratios, its rates, and its profile."""

from __future__ import annotations

import pstats
from pathlib import Path

import pytest

from tests.benchmarks import report
from tests.benchmarks.rows import ROWS
from tests.benchmarks.runs import Runs
from tests.benchmarks.torch_submit import main, rates_compared


def test_rates_are_compared_by_the_medians_of_a_run() -> None:
    figures = rates_compared({"ours": [80.0, 90.0, 900.0], "switched": [100.0], "on_loop": [120.0, 60.0, 200.0]})
    assert figures == {"switched_per_s": 100.0, "on_loop_per_s": 120.0, "of_switched": 0.9, "of_on_loop": 0.75}


@pytest.mark.parametrize(("slowest", "met"), [(90.0, True), (89.0, False)])
def test_the_slowest_of_five_runs_decides(slowest: float, met: bool) -> None:
    runs = Runs()
    for ours in (95.0, slowest, 99.0, 99.0, 99.0):
        runs.add(rates_compared({"ours": [ours], "switched": [100.0], "on_loop": [100.0]}))
    figures = runs.medians() | runs.worst("higher", "of_switched")
    row = report.row_report(ROWS["torch_submit"], {"samples": [99.0], "baseline": [100.0], "figures": figures}, {})
    assert row["met"] is met


def test_profile_has_the_functions_of_a_submit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "submit.prof"
    assert main(["--profile", str(path), "--driver", "host", "--seconds", "0.01", "--lines", "1"]) == 0
    functions = {function for _, _, function in vars(pstats.Stats(str(path)))["stats"]}
    assert "_submit" in functions
    assert "requests/s" in capsys.readouterr().out
