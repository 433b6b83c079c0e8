"""Facts about the host's processor."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

__all__ = ["last_level_cache", "processors"]

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@functools.cache
def last_level_cache(directory: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Return the bytes of the processor's largest cache; None if the system does not list it, as outside of Linux."""
    sizes: list[int] = []
    for file in directory.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = file.read_text(encoding="ascii").strip()
            sizes.append(int(text[:-1]) * _UNITS[text[-1]] if text[-1:].isalpha() else int(text))
    return max(sizes, default=None)


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
