"""Decoders that take a known time, at the top of a module: worker processes import it."""

from __future__ import annotations

import ctypes
import time
import zlib
from typing import Any

import numpy as np

FIELDS: dict[str, Any] = {"x": ((4,), np.float32)}

_BYTES = bytes(range(256)) * 1000

#: A `ctypes.PyDLL` keeps the GIL in its calls.
_sleep_with_gil = ctypes.PyDLL(None).usleep


def waits(sample: Any, out: Any) -> None:
    """Wait for 2 ms, as for a file or the network."""
    time.sleep(2e-3)  # noqa: TID251 - it stands for a file
    out["x"][...] = sample


def computes_in_python(sample: Any, out: Any, loops: int = 20_000) -> None:
    """Compute for about a millisecond."""
    total = 0
    for number in range(loops):
        total += number * number
    out["x"][...] = sample


def keeps_gil(sample: Any, out: Any) -> None:
    """Keep the GIL for 2 ms, as a library that does not release it. It uses little of the processor."""
    computes_in_python(sample, out, 8_000)
    _sleep_with_gil(1500)


def computes_natively(sample: Any, out: Any) -> None:
    """Compute for about a millisecond without the GIL."""
    zlib.compress(_BYTES, 9)
    out["x"][...] = sample
