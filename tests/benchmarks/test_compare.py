"""The comparison of two checkouts: its ratios, its processes, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

import aiocuda
from tests.benchmarks.compare import SCHEMA, compared, line, main
from tests.benchmarks.machine import ROOT
from tests.benchmarks.rows import ROWS
from tests.benchmarks.slices import SLICES


def taken(values: Sequence[float], cores: float = 0.5) -> list[dict[str, float]]:
    return [{"value": value, "cores": cores} for value in values]


def test_ratio_is_that_of_the_medians() -> None:
    row = compared("launch", taken([4.0, 5.0, 50.0], cores=0.2), taken([6.0, 10.0, 10.0], cores=0.4))
    assert (row["old"], row["new"], row["ratio"]) == (5.0, 10.0, 2.0)
    assert (row["pair_ratio_p25"], row["pair_ratio_p50"], row["pair_ratio_p75"]) == (0.2, 1.5, 2.0)
    assert (row["old_cores"], row["new_cores"]) == (0.2, 0.4)
    assert (row["pairs"], row["unit"], row["better"]) == (3, "µs", "lower")
    assert "2.000 × old" in line(row)


def test_ratio_to_nothing_is_no_number() -> None:
    assert math.isnan(compared("idle_64_streams", taken([0.0]), taken([1.0]))["ratio"])


def test_slice_has_the_unit_of_its_row() -> None:
    both = (SLICES.keys() & ROWS.keys()) - {
        "idle_64_streams"
    }  # a row that repeats it tells milliseconds of each second
    assert len(both) >= 7
    assert {name: (SLICES[name].unit, SLICES[name].better) for name in both} == {
        name: (ROWS[name].unit, ROWS[name].better) for name in both
    }


@pytest.mark.parametrize("name", SLICES)
def test_slice_measures_on_the_host_driver(name: str) -> None:
    async def run() -> float:
        async with aiocuda.open_device(driver="host") as device, SLICES[name].open(device) as work:
            await work(1e-3)
            return await work(1e-3)

    value = asyncio.run(run())
    assert math.isfinite(value)
    assert value >= 0


@pytest.mark.slow
def test_two_checkouts_are_compared_in_alternating_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "compared.json"
    arguments = ["--rows", "launch", "idle_64_streams", "--driver", "host", "--quick", "--json", str(path)]
    assert main([str(ROOT), str(ROOT), *arguments]) == 0
    written = json.loads(path.read_text("utf-8"))
    assert written["schema"] == SCHEMA
    assert written["old"]["file"] == str(ROOT / "src" / "aiocuda" / "__init__.py")
    assert [row["name"] for row in written["rows"]] == ["launch", "idle_64_streams"]
    assert all(len(row["new_values"]) == row["pairs"] == 3 for row in written["rows"])
    assert "launch" in capsys.readouterr().out


def test_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no checkout"):
        main([str(tmp_path), str(ROOT), "--driver", "host"])


def test_one_checkout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(ROOT)])
    assert "OLD NEW" in capsys.readouterr().err
