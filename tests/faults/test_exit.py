"""The process ends with a thousand operations pending, in every way in which processes end (P10)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from tests.faults.exits import CASES, LIMIT, PENDING
from tests.project.tree import ROOT, SOURCE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")


def ends(driver: str, runs: int, at_once: int, cases: Iterable[str] = CASES) -> dict[str, list[dict[str, Any]]]:
    """What became of each run of each case."""
    server = subprocess.run(
        [
            *(sys.executable, "-W", "ignore::ResourceWarning", "-m", "tests.faults.exits"),
            *("--driver", driver, "--runs", str(runs), "--at-once", str(at_once), "--cases", *cases),
        ],
        cwd=ROOT,
        # One thread: NumPy's own are no reason to warn of a fork.
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=runs * LIMIT * len(CASES),
        check=False,
    )
    assert (server.returncode, server.stderr) == (0, "")
    told: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in server.stdout.splitlines():
        run = json.loads(line)
        told[run["case"]].append(run)
    return told


def check(told: dict[str, list[dict[str, Any]]], runs: dict[str, int]) -> None:
    """No crash, the expected exit code, and no other output. A child that hangs is killed: it has another exit code."""
    assert {case: len(each) for case, each in told.items()} == runs
    for case in runs:
        status, last = CASES[case]
        seconds = [run["seconds"] for run in told[case]]
        print(f"{case}: exit status {status}, {min(seconds):.2f} to {max(seconds):.2f} s")  # noqa: T201 - the figure
        for run in told[case]:
            assert run["status"] == status, run
            assert (run["stderr"].splitlines() or [""])[-1] == last, run
            assert "aiocuda: " not in run["stderr"], run
            assert "Exception ignored" not in run["stderr"], run
            if case == "one SIGINT":
                assert run["said"][-1] == f"left, {PENDING} told ['abandoned', 'done'], 0 in flight", run


#: The cases that wait for their own deadline or for a second signal, in addition to the start of a process.
LONG = ["SIGINT at exit", "held for longer"]
SHORT = [case for case in CASES if case not in LONG]


#: Leaves two devices open with a running kernel, after a third was closed. Each kernel says when it ends.
TWO_DEVICES = """
import asyncio, time, aiocuda

def slow(seconds):
    time.sleep(seconds)
    print(seconds, flush=True)

async def main():
    async with aiocuda.open_device(driver="host"):
        pass
    kernel = aiocuda.Kernel("slow", source='extern "C" __global__ void slow(double seconds) {}', host=slow)
    for seconds in (0.1, 0.4):
        device = await aiocuda.open_device(driver="host")
        device.drain_timeout = 600
        await device.load(kernel)  # a launch that waits for it on the host is lost with the loop
        stream = device.stream()
        kept.extend((device, stream, stream.launch(kernel, 1, 1, seconds)))

kept = []
asyncio.run(main())
"""


@pytest.mark.slow
def test_exit_waits_for_all_devices_that_are_open() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", TWO_DEVICES],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["0.1", "0.4"], "")


@pytest.mark.slow
def test_one_of_each_short_case() -> None:
    check(ends("host", 1, 3, SHORT), dict.fromkeys(SHORT, 1))


@pytest.mark.heavy
@pytest.mark.slow
def test_ten_of_each() -> None:
    check(
        {**ends("host", 10, 3, SHORT), **ends("host", 2, 3, LONG)},
        dict.fromkeys(SHORT, 10) | dict.fromkeys(LONG, 2),
    )


@pytest.mark.soak
def test_two_hundred_of_each() -> None:
    check(ends("host", 200, 3), dict.fromkeys(CASES, 200))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runs", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_some_of_each_on_a_gpu(runs: int) -> None:
    check(ends("cuda", runs, 4), dict.fromkeys(CASES, runs))  # more processes would wait for each other in the driver
