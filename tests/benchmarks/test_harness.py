"""The harness: its processes, what it does when one goes wrong, and the meter of the loop's turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from time import perf_counter

import pytest

from tests.benchmarks import report
from tests.benchmarks.__main__ import main
from tests.benchmarks.harness import Options, Run, spawn
from tests.benchmarks.peers import PeerInfo, missing
from tests.benchmarks.turns import TurnMeter, metered_loop


def test_peer_without_its_package_or_gpu_is_skipped_with_the_reason() -> None:
    absent = PeerInfo("absent", "Absent", "no_such_package")
    assert missing(absent, gpu=True) == "no_such_package is not installed"
    assert missing(PeerInfo("here", "Here", "json"), gpu=False) == "no GPU"
    assert missing(PeerInfo("here", "Here", "json"), gpu=True) is None
    assert missing(PeerInfo("loop", "Loop", "json", ours=True), gpu=False) is None


def test_a_long_callback_is_a_long_turn() -> None:
    def hold(seconds: float) -> None:
        end = perf_counter() + seconds
        while perf_counter() < end:
            pass

    async def run(turns: TurnMeter) -> float:
        turns.reset()
        asyncio.get_running_loop().call_soon(hold, 0.03)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return turns.longest()

    loop, turns = metered_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(run(turns)) >= 0.03
    assert turns.turns >= 2


def test_the_wait_of_an_idle_loop_is_in_no_turn() -> None:
    with TurnMeter() as turns:
        began = perf_counter()
        turns.reset()
        turns.select(0.1)
        assert turns.longest() <= perf_counter() - began - 0.1


@pytest.mark.slow
def test_command_writes_the_report_of_a_row_and_its_peers(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert main(["ops_8x16", "--driver", "host", "--json", str(path)]) == 0
    written = json.loads(path.read_text("utf-8"))
    assert written["schema"] == report.SCHEMA
    assert written["driver"] == "host"
    assert written["small"] is True
    assert written["command"] == f"python -m tests.benchmarks ops_8x16 --driver host --json {path}"
    assert written["machine"]["cpus"] >= 1
    assert {"python", "numpy", "aiocuda"} <= set(written["versions"])
    (row,) = written["rows"]
    assert {"name", "p50", "p99", "n", "unit", "bound", "ratio", "peers"} <= set(row)
    assert (row["name"], row["unit"], row["n"]) == ("ops_8x16", "ops/s", 2)
    assert row["p50"] > 0
    assert row["statistics"]["submitted"] > 0
    for peer in ("cupy_host_function", "torch_to_thread"):
        assert row["peers"][peer]["skipped"]


@pytest.mark.slow
def test_a_process_that_outlives_its_limit_becomes_an_error_that_shows_where_it_was() -> None:
    for limit in (1.0, 3.0, 9.0):  # a process that has not begun cannot show where it is
        result = spawn(["row", "pipeline_100us", "--driver", "host"], limit=limit)  # full size: many seconds
        assert result["error"] == f"did not end within {limit:g} s"
        assert "samples" not in result
        if "most recent call first" in result["output"]:
            break
    assert "most recent call first" in result["output"]


@pytest.mark.slow
def test_rows_beyond_the_budget_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    told: list[str] = []
    run = Run(Options(names=["chain_500"], driver="host", path=path, budget=0.0), told.append)
    (row,) = run.run()["rows"]
    assert row["error"].startswith("not run: the 0 s")
    assert json.loads(path.read_text("utf-8"))["rows"][0]["error"] == row["error"]
    assert told[0].startswith("chain_500")


@pytest.mark.parametrize("arguments", [["chain_501"], ["--driver", "gpu"], ["--limit", "soon"]])
def test_unknown_names_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[-1] in capsys.readouterr().err
