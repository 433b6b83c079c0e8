"""What pytest collects, and whether it would run: `collect` asks, this module as a plugin of pytest's answers."""

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

_TELL = "AIOCUDA_COLLECTED"
_found: dict[str, bool] = {}


def collect(files: Iterable[str]) -> dict[str, bool]:
    """The ids of all tests in these files, parameters left out. Does each run somewhere: is it neither left out nor
    expected to fail, with some of its parameters?

    One that needs a GPU does, on one; one of the soak does, in the soak.
    """
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory, "collected.json")
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "-p", __name__, *files],
            cwd=ROOT,
            env={**os.environ, _TELL: str(told)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        found: dict[str, bool] = json.loads(told.read_text(encoding="utf-8"))
        return found


def _runs(item: Any) -> bool:
    """Nothing says that it does not."""
    if any(True for _ in item.iter_markers("skip")) or any(True for _ in item.iter_markers("xfail")):
        return False
    if any(mark.args and mark.args[0] for mark in item.iter_markers("skipif")):
        return False
    source = inspect.getsource(item.function)
    return not any(call in source for call in ("pytest.skip(", "pytest.xfail(", "pytest.importorskip("))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Before anything is deselected."""
    name = item.nodeid.partition("[")[0]
    _found[name] = _found.get(name, False) or _runs(item)


def pytest_collection_finish() -> None:
    """Tell who asked."""
    Path(os.environ[_TELL]).write_text(json.dumps(_found), encoding="utf-8")
