"""L7 with the libraries themselves, on a GPU. Each case is a process of its own: the order of the libraries varies."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.project.tree import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LIBRARIES = [name for name in ("cupy", "torch") if importlib.util.find_spec(name) is not None]
ORDERS = ("before", "imported", "after")


def child(library: str, order: str) -> dict[str, Any]:
    """The report of `interchange_child`."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    finished = subprocess.run(
        [sys.executable, "-m", "tests.memory.interchange_child", library, order],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-6000:]
    told: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return told


@pytest.mark.timeout(150)
@pytest.mark.parametrize("order", ORDERS)
def test_arrays_cross_in_both_directions(order: str) -> None:
    """L7: values, order on the device, ownership; and how many hardware queues there are is found, not assumed.

    With whichever of CuPy and PyTorch there is. `ALONE_ON_A_GPU` lists this file: the last line compares a time.
    """
    for library in LIBRARIES:
        told = child(library, order)
        assert {what: passed for what, passed in told["checks"].items() if not passed} == {}, library
        assert len(told["checks"]) >= 25, library
        assert (told["queues"], told["warnings"]) == (8 if order == "before" else 32, []), library
        assert told["times as long side by side"] < 1.5, library  # 1, and 2 with a quarter of the queues
