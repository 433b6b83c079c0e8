"""`collect` runs pytest with this module as a plugin, and returns the tests that it collects."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.project.tree import ROOT

_RESULT_FILE = "AIOCUDA_COLLECTED"
_found: dict[str, bool] = {}


def collect(files: Iterable[str]) -> dict[str, bool]:
    """Return the ids of all tests in these files, without parameters; True for each test that runs somewhere.

    A test runs if it is neither skipped nor expected to fail, with some of its parameters. Tests that need a GPU, and
    tests of the soak, run, too.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "collected.json")
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "-p", __name__, *files],
            cwd=ROOT,
            env={**os.environ, "AIOCUDA_CORE": "python", _RESULT_FILE: str(result)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        found: dict[str, bool] = json.loads(result.read_text(encoding="utf-8"))
        return found


def _runs(item: Any) -> bool:
    """True if no mark and no call in its source skips the test or expects it to fail."""
    if any(True for _ in item.iter_markers("skip")) or any(True for _ in item.iter_markers("xfail")):
        return False
    if any(mark.args and mark.args[0] for mark in item.iter_markers("skipif")):
        return False
    source = inspect.getsource(item.function)
    return not any(call in source for call in ("pytest.skip(", "pytest.xfail(", "pytest.importorskip("))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note a test. pytest calls this before it deselects tests."""
    name = item.nodeid.partition("[")[0]
    _found[name] = _found.get(name, False) or _runs(item)


def pytest_collection_finish() -> None:
    """Write the result for `collect`."""
    Path(os.environ[_RESULT_FILE]).write_text(json.dumps(_found), encoding="utf-8")
