"""Percentiles, bounds, and the report of a row."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import machine, report
from tests.benchmarks.figures import Bound, percentile, tail
from tests.benchmarks.peers import PEERS
from tests.benchmarks.rows import ROWS
from tests.helpers import git


@pytest.mark.parametrize(
    ("q", "value"),
    [(0, 1.0), (1, 1.0), (50, 5.0), (51, 6.0), (90, 9.0), (99, 10.0), (100, 10.0)],
)
def test_percentile_is_the_nearest_rank(q: float, value: float) -> None:
    assert percentile([7.0, 1.0, 10.0, 3.0, 5.0, 2.0, 9.0, 4.0, 8.0, 6.0], q) == value


@pytest.mark.parametrize("seed", range(20))
def test_percentile_is_the_smallest_sample_that_q_percent_do_not_exceed(seed: int) -> None:
    choice = random.Random(seed)
    samples = [choice.choice([-1.0, 0.0, 0.5, 2.0, math.inf]) for _ in range(choice.randint(1, 40))]
    q = choice.uniform(0, 100)
    value = percentile(samples, q)
    assert value in samples
    assert sum(sample <= value for sample in samples) >= q / 100 * len(samples)
    assert sum(sample < value for sample in samples) < max(1, q / 100 * len(samples))


@pytest.mark.parametrize(("samples", "q"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0], math.nan)])
def test_percentile_of_nothing_or_beyond_the_scale_is_refused(samples: list[float], q: float) -> None:
    with pytest.raises(ValueError, match=r"no samples|not (-1|101|nan)"):
        percentile(samples, q)


def test_the_tail_lies_on_the_bad_side() -> None:
    samples = [float(number) for number in range(1, 201)]
    assert tail(samples, "lower") == 198.0
    assert tail(samples, "higher") == 3.0


@pytest.mark.parametrize(
    ("bound", "value", "met"),
    [
        (Bound("ratio", at_most=1.4), 1.4, True),
        (Bound("ratio", at_most=1.4), 1.41, False),
        (Bound("share", at_least=0.97), 0.97, True),
        (Bound("share", at_least=0.97), 0.96, False),
        (Bound("share", at_least=0.97), None, None),
    ],
)
def test_bound_is_met_missed_or_not_checked(bound: Bound, value: float | None, met: bool | None) -> None:
    row = {"ratio": value, "figures": {"share": value}}
    assert bound.check(row)["met"] is met


def measured(*samples: float, baseline: tuple[float, ...] = (), **figures: float) -> dict[str, Any]:
    return {"samples": list(samples), "baseline": list(baseline), "figures": figures, "seconds": 1.0}


def test_a_row_compares_with_its_baseline_and_its_peers() -> None:
    row = report.row_report(
        ROWS["await_empty_kernel"],
        measured(12.0, 10.0, 11.0, baseline=(8.0, 10.0, 9.0)),
        {"cupy_host_function": measured(44.0), "torch_to_thread": {"skipped": "torch is not installed"}},
    )
    assert (row["p50"], row["p99"], row["n"]) == (11.0, 12.0, 3)
    assert row["ratio"] == 11.0 / 9.0
    assert row["bound"] == 1.4
    assert row["met"] is True
    assert row["peers"]["cupy_host_function"]["times"] == 4.0
    assert row["peers"]["cupy_host_function"]["ratio"] == 44.0 / 9.0
    assert row["peers"]["torch_to_thread"]["skipped"] == "torch is not installed"


def test_larger_is_better_for_rows_of_that_kind() -> None:
    ours = measured(160_000.0, baseline=(250_000.0,))
    row = report.row_report(ROWS["ops_8x16"], ours, {"cupy_host_function": measured(32_000.0)})
    assert row["figures"]["times_cupy_host_function"] == 5.0
    assert row["met"] is True


def test_a_bound_on_a_peer_that_is_missing_is_not_checked() -> None:
    row = report.row_report(ROWS["ops_8x16"], measured(160_000.0), {"cupy_host_function": {"skipped": "no GPU"}})
    assert [check["met"] for check in row["checks"]] == [True, None]
    assert row["met"] is None


def test_small_sizes_are_held_to_no_bound() -> None:
    row = report.row_report(ROWS["chain_500"], measured(9.0, baseline=(1.0,)), {}, small=True)
    assert (row["ratio"], row["met"], row["checks"]) == (9.0, None, [])
    assert "MISSED" not in report.line(row)


def test_a_row_that_failed_after_it_was_measured_keeps_its_figures() -> None:
    result = {**measured(9.0, baseline=(9.0,)), "error": "exit code 134"}
    row = report.row_report(ROWS["chain_500"], result, {})
    assert (row["p50"], row["met"], row["error"]) == (9.0, True, "exit code 134")
    assert "ERROR exit code 134" in report.line(row)


def test_a_row_that_failed_keeps_its_name_its_error_and_no_figures() -> None:
    row = report.row_report(ROWS["busy_loop"], {"error": "exit code 1", "output": "Timeout", "seconds": 3.0}, {})
    assert (row["name"], row["error"], row["output"]) == ("busy_loop", "exit code 1", "Timeout")
    assert (row["p50"], row["n"], row["met"]) == (None, 0, None)
    assert "exit code 1" in report.line(row)


def test_what_is_written_is_json_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    report.write({"rows": [{"p50": math.nan, "ratio": 1.23456789, "title": "µs"}]}, path)
    assert json.loads(path.read_text("utf-8")) == {"rows": [{"p50": None, "ratio": 1.23457, "title": "µs"}]}
    assert list(path.parent.iterdir()) == [path]


def test_every_row_has_its_function_its_peers_and_limits() -> None:
    for row in ROWS.values():
        module = importlib.import_module(f"tests.benchmarks.{row.module}")
        peers = importlib.import_module("tests.benchmarks.peers.rows")
        assert getattr(module, row.function or row.name).__doc__
        assert set(row.peers) <= set(PEERS)
        assert all(hasattr(peers, row.function or row.name) for peer in row.peers if not PEERS[peer].ours)
        assert [bound.limit for bound in row.bounds]
        assert set(row.small) <= set(row.sizes)


def test_the_commit_is_gits_and_only_changed_code_makes_the_tree_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIOCUDA_COMMIT", raising=False)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.tree() == {"commit": None, "dirty": None}
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "code.py").write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = machine.tree()
    assert re.fullmatch("[0-9a-f]{40}", clean["commit"])
    assert clean["dirty"] is False
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "h200.json").write_text("figures of the run before")
    assert machine.tree() == clean
    (tmp_path / "src" / "code.py").write_text("2")
    assert machine.tree() == {**clean, "dirty": True}


def test_the_environment_goes_before_the_git_around_an_exported_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_COMMIT", "0123abc")
    assert machine.tree() == {"commit": "0123abc", "dirty": False}
    monkeypatch.setenv("AIOCUDA_COMMIT", "0123abc-dirty")
    assert machine.tree() == {"commit": "0123abc", "dirty": True}
