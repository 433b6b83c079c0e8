"""`find`: tests whether CUDA can be used."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Final

from ...errors import DriverNotAvailableError
from .._codes import MIG
from ._abi import CUDA_ERROR_NO_DEVICE
from ._library import Library

__all__ = ["find"]

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def find(library: str | None = None) -> str | None:
    """Return the reason why CUDA cannot be used, as a sentence without a full stop; None if it can be used.

    **May block**: ``cuInit`` takes 0.1 s to several seconds. No context is created.

    Parameters
    ----------
    library
        The libcuda to load instead of the system's. For tests.

    Raises
    ------
    DriverError, BusyError, …
        There is a GPU with a driver, and it does not work. The program should not continue without it.
    ForkedProcessError
        CUDA was initialised before ``fork()``.
    """
    if sys.platform == "darwin":
        return "there is no CUDA on macOS"
    if not _has_package():
        return 'cuda-pathfinder is not installed: pip install "cuda-pathfinder>=1.2.3"'
    try:
        count = Library(library).device_count()
    except DriverNotAvailableError as error:
        return f"{error}{_hidden()}" if getattr(error, "code", 0) == CUDA_ERROR_NO_DEVICE else str(error)
    return None if count else f"the NVIDIA driver finds no GPU; {MIG}{_hidden()}"


def _hidden() -> str:
    visible = os.environ.get(_VISIBLE)
    return "" if visible is None else f" ({_VISIBLE} is {visible!r})"


def _has_package() -> bool:
    try:
        return importlib.util.find_spec("cuda.pathfinder") is not None
    except ModuleNotFoundError:
        return False
