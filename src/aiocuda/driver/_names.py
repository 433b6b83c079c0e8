"""The names of the drivers."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

from .._base._clock import running_clock
from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["DriverName", "driver_name"]

DriverName: TypeAlias = Literal["auto", "cuda", "host", "simulated"]

_NAMES = ("auto", "cuda", "host", "simulated")

#: Names that other libraries use.
_MEANT = {"cpu": "host", "numpy": "host", "gpu": "cuda", "nvidia": "cuda"}


def driver_name(which: object) -> str:
    """Check a driver's name, and return it; ``"auto"`` becomes the name in ``AIOCUDA_DRIVER``, if that is set."""
    if not isinstance(which, str):
        raise InvalidTypeError(f"driver must be one of {', '.join(_NAMES)} or a Driver, not {type(which).__name__}")
    if which not in _NAMES:
        kind, _, number = which.partition(":")
        cure = f": use {_MEANT[kind]!r}" if kind in _MEANT else ""
        cure = f": use index={number}" if number else cure
        raise InvalidArgumentError(f"no driver is called {which!r}; there are {', '.join(_NAMES)}{cure}", driver=which)
    if which != "auto":
        return which
    wanted = os.environ.get("AIOCUDA_DRIVER", "auto") or "auto"
    if wanted == "auto" and running_clock() is not None:
        return "simulated"  # no other driver runs in virtual time
    if wanted not in _NAMES:
        raise InvalidArgumentError(f"AIOCUDA_DRIVER={wanted!r} names no driver; there are {', '.join(_NAMES)}")
    return wanted
