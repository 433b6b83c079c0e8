"""The processes and descriptors of this process."""

from __future__ import annotations

import os
from typing import Any

import pytest

__all__ = ["children", "open_files", "psutil"]


psutil: Any = pytest.importorskip("psutil")  # the tests of a module that imports this one are skipped


def open_files() -> int:
    """Return the number of open descriptors."""
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    """Return the process ids of this process's children, without multiprocessing's resource tracker."""
    found = psutil.Process().children(recursive=True)
    return {each.pid for each in found if "resource_tracker" not in " ".join(each.cmdline())}
