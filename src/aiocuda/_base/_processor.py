"""Facts about the host's processors, and the part of them that this process may use."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from pathlib import Path

from ._thread_times import pread

__all__ = ["last_level_cache", "processors", "processors_within_quota", "throttled_periods"]

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
    """Return the number of processors that this process may use, by its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors_within_quota(root: Path = Path("/")) -> int:
    """Return the number of processors that this process may use, by its affinity and by the quota of its group.

    The first call reads files, and may block.
    """
    return max(1, min([processors(), *map(int, _quotas(root).values())]))


def throttled_periods(root: Path = Path("/")) -> tuple[int, int]:
    """Return the periods of the group with a quota, and those in which it was used up; (0, 0) without a quota.

    The first call opens a file, and may block.
    """
    file = _statistics_of_quota(root)
    found = {"nr_periods": 0, "nr_throttled": 0}
    if file is not None:
        buffer = ctypes.create_string_buffer(1024)
        with contextlib.suppress(ValueError):  # other code has closed the descriptor, and opened a file
            pread(file, buffer, 1023, 0)
            for line in buffer.value.decode("ascii").splitlines():
                name, number = line.split()
                found[name] = int(number)
    return found["nr_periods"], found["nr_throttled"]


@functools.cache
def _statistics_of_quota(root: Path) -> int | None:
    """Return the open file of the group with the smallest quota, kept until the process ends; None without a quota."""
    quotas = _quotas(root)
    with contextlib.suppress(OSError, ValueError):
        return os.open(min(quotas, key=quotas.__getitem__) / "cpu.stat", os.O_RDONLY)
    return None


@functools.cache
def _quotas(root: Path) -> dict[Path, float]:
    """Return the quotas of processors, by the directory of the control group. Groups of both versions, and above."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top, path = root / "sys/fs/cgroup" / ("cpu" if controllers else ""), Path(name.lstrip("/"))
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            for group in (path, *path.parents):
                with contextlib.suppress(OSError, ValueError):  # no such group; or "max", no quota
                    numbers = "".join((top / group / file).read_text(encoding="ascii") for file in files)
                    quota, period = map(int, numbers.split())
                    if quota > 0:
                        found[top / group] = quota / period
    return found
