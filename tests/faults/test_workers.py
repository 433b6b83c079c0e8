"""Workers of a data loader, started by a program that has a device open and work held on it (P12)."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.faults.workers import BATCHES
from tests.project.tree import ROOT, SOURCE, python_path


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("start", multiprocessing.get_all_start_methods())
def test_workers_open_devices_of_their_own(driver: Any, start: str) -> None:
    """By `fork`, where they were forked after the import and before a device was opened."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.faults.workers", "--driver", driver, "--start", start],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(SOURCE), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    told = json.loads(finished.stdout)
    assert told == {"sums": [1000 * batch for batch in range(BATCHES)], "held": True, "parent": 1000}
