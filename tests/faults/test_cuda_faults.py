"""A fault of a real device reaches every waiter. Each case is a process of its own: CUDA does not come back in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: Of `cuda_child`, which imports what only a machine with a GPU needs to have.
FAULTS = ("illegal", "misaligned", "trap", "assert", "graph")
STREAMS = 8
EACH = 40

CHILD = Path(__file__).with_name("cuda_child.py")


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """What the children told, all of them at work at once."""
    children = {
        kind: subprocess.Popen([sys.executable, str(CHILD), kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for kind in FAULTS
    }
    told: dict[str, Any] = {}
    for kind, child in children.items():
        try:
            out, err = child.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
        last = out.decode().strip().splitlines()[-1:]
        whole = child.returncode == 0 and last
        told[kind] = json.loads(last[0]) if whole else f"exit code {child.returncode}: {err.decode()[-4000:]}"
    return told


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_fault_reaches_every_operation(reports: dict[str, Any], kind: str) -> None:
    """L3, P3, P4: awaited before, during or after, and not awaited at all."""
    report = reports[kind]
    assert isinstance(report, dict), report
    print(  # noqa: T201 - both times are to be seen, not only their difference
        f"{kind}: code {report['code']}, first seen by an independent poller after {report['first_seen_ms']:.1f} ms, "
        f"last of {report['awaited']} awaits raised after {report['last_raised_ms']:.1f} ms"
    )
    assert report["succeeded"] == 0
    assert report["outcomes"] == ["DeviceFault"]
    assert report["pending"] == STREAMS * EACH
    assert report["codes"] == [report["code"]]
    assert report["last_raised_ms"] - report["first_seen_ms"] <= 100
    assert report["refused"] == 3 * STREAMS
    assert report["no_driver_call"]
    assert report["leaving_ms"] < 1000
    assert report["in_flight"] == 0
