"""The programs of `examples/workloads`, as modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tests.project.tree import ROOT

PLACE = ROOT / "examples" / "workloads"


def load(name: str) -> ModuleType:
    """One of them. They import their neighbours, as a program does that is run by its path."""
    sys.path.insert(0, str(PLACE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(PLACE))
