"""Libraries that are not in the development environment: their tests are collected, and skipped without them."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest


def is_installed(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that contains it
        return False


def requires(module: str) -> pytest.MarkDecorator:
    """Return the mark that skips the tests of a file if a module is not installed."""
    return pytest.mark.skipif(not is_installed(module), reason=f"{module} is not installed")


class _Lazy:
    """A module that is imported at its first use: PyTorch changes what other tests of the process see."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Numba's own, of newer versions of NumPy
            if "numba" in self._module and not hasattr(np, "row_stack"):  # which NumPy 2.5 has removed
                np.row_stack = np.vstack
            return getattr(importlib.import_module(self._module), name)


def library(module: str) -> Any:
    """Return a module that may not be installed."""
    return _Lazy(module)
