"""Children that lose their device, several at a time, each a process of its own under a hard limit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.faults.fault_child import DURING, EACH, LIMIT, STREAMS
from tests.faults.fault_kernels import FAULTS
from tests.project.tree import ROOT, SOURCE

#: (kind of the fault, what else is under way)
Case = tuple[str, str]

#: Each kind by itself, and as part of a graph; and each with whatever else may be under way.
ALONE: list[Case] = [*((kind, "nothing") for kind in FAULTS), ("trap", "graph")]
BESIDE: list[Case] = [(kind, during) for kind in FAULTS for during in DURING[2:]]


def child(case: Case, driver: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The report of one child, or the reason why there is none."""
    kind, during = case
    command = [sys.executable, "-m", "tests.faults.fault_child", "--driver", driver, "--kind", kind, "--during", during]
    command += ["--turn", os.path.join(environment["AIOCUDA_CACHE_DIR"], "turn")]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT + 10, check=False
        )
    except subprocess.TimeoutExpired:
        return {"kind": kind, "during": during, "failed": f"it was killed after {LIMIT + 10} s"}
    last = ended.stdout.strip().splitlines()[-1:]
    if ended.returncode != 0 or not last:
        return {"kind": kind, "during": during, "failed": f"exit code {ended.returncode}: {ended.stderr[-3000:]}"}
    return {**json.loads(last[0]), "process_s": round(time.monotonic() - began, 2)}


def children(
    cases: Iterable[Case], driver: str, at_once: int, seconds: float = math.inf, queues: int | None = None
) -> Iterator[dict[str, Any] | None]:
    """The reports of all children, in the order of the cases; None for cases that did not start in time.

    The kernels are compiled once, in advance. A child that starts early opens the device and waits for its turn.
    """
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="aiocuda-faults-") as cache:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]),
            "AIOCUDA_CACHE_DIR": cache,
            **({} if queues is None else {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}),
        }
        if driver == "cuda":
            build = [sys.executable, "-m", "tests.faults.fault_child", "--build"]
            subprocess.run(build, cwd=ROOT, env=environment, timeout=120, check=True)
        with ThreadPoolExecutor(at_once) as executor:
            yield from executor.map(
                lambda case: child(case, driver, environment) if time.monotonic() < until else None, cases
            )


def margin_ms(told: dict[str, Any]) -> float:
    """How long after the poller first saw the error the last of all waits ended, ms."""
    return float(max(told["last_raised_ms"].values()) - told["first_seen_ms"])


def complaints(told: dict[str, Any], driver: str, limit_ms: float = 100) -> list[str]:
    """What the promises P2, P3 and P4 do not allow, a line each. With a larger limit the close may take as long."""
    if "failed" in told:
        return [told["failed"]]
    code = told["code"]
    fault = f"DeviceFault {code}"
    expected = {
        "pending": STREAMS * EACH,
        "done_before": 0,
        "outcomes": ["DeviceFault"],
        "called_back": len(range(1, STREAMS * EACH, 3)),
        "refused": 3 * STREAMS,
        "no_driver_call": True,
        "in_flight": 0,
        "loop_errors": [],
    }
    found = [f"{name}: {told[name]}, not {value}" for name, value in expected.items() if told[name] != value]
    if driver == "cuda" and code not in FAULTS[told["kind"]][1]:
        found.append(f"the code is {code}")
    if not set(told["heard"]) <= {fault, f"skipped: {fault}"}:
        found.append(f"somebody heard {told['heard']}")
    if not {"before", "meanwhile", "after"} <= set(told["awaited"]):
        found.append(f"only these waited: {told['awaited']}")
    if margin_ms(told) > limit_ms:
        found.append(f"first seen after {told['first_seen_ms']} ms, raised after {told['last_raised_ms']} ms")
    if told["after_ms"] > limit_ms:
        found.append(f"awaited afterwards, they took {told['after_ms']} ms")
    if told["leaving_ms"] > max(1000, limit_ms):
        found.append(f"closing the device took {told['leaving_ms']} ms")
    return found


def line(told: dict[str, Any]) -> str:
    """Both times, and the error of the stream that faulted."""
    if "failed" in told:
        return f"{told['kind']} during {told['during']}: {told['failed']}"
    return (
        f"{told['kind']} during {told['during']}: code {told['code']}, first seen by an independent poller after "
        f"{told['first_seen_ms']} ms, last of {sum(told['awaited'].values())} waits ended after "
        f"{max(told['last_raised_ms'].values())} ms; the kernel itself: {told['culprit']}"
    )
