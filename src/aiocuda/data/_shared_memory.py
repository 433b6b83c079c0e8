"""Shared memory: files without a name, which end with the last process that uses them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from pathlib import Path

from ..errors import AiocudaError, UnsupportedError

__all__ = ["SharedFile", "SharedMemoryError", "available_bytes"]


class SharedMemoryError(AiocudaError, MemoryError):
    """There is too little memory for the slots that a loader shares with its worker processes."""

    requested: int  #: bytes
    free: int | None  #: bytes; None if unknown


class SharedFile:
    """Memory that processes share by its file descriptor. ``memfd_create``: it has no name, and nothing is left of it.

    Attributes
    ----------
    fd, nbytes

    Raises
    ------
    SharedMemoryError
        There is too little memory. Without this check, the first write to a missing page would end the process.
    UnsupportedError
        The system has no such files.
    """

    fd: int
    nbytes: int

    def __init__(self, name: str, nbytes: int) -> None:
        if sys.platform != "linux":
            raise UnsupportedError("worker processes need Linux, for memfd_create: use executor='thread'")
        free = available_bytes()
        if free is not None and nbytes > free:
            raise _too_little(nbytes, free)
        self.nbytes = nbytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)  # takes all pages now
        except OSError as error:
            os.close(self.fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise _too_little(nbytes, free) from error
            raise

    def map(self) -> mmap.mmap:
        """Return a mapping of the whole file."""
        return mmap.mmap(self.fd, self.nbytes)

    def shrink(self, nbytes: int) -> None:
        """Give back the memory after the first ``nbytes``. **May block.** An access to it ends the process.

        An unmapping gives it back, too, but with the GIL held: 670 MB took 90 ms.
        """
        if self.fd >= 0:
            os.ftruncate(self.fd, nbytes)

    def close(self) -> None:
        """Close the descriptor. Mappings stay valid. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _too_little(nbytes: int, free: int | None) -> SharedMemoryError:
    known = "" if free is None else f", and {free / 1e6:.3g} MB are available"
    return SharedMemoryError(
        f"the loader's slots take {nbytes / 1e6:.3g} MB of shared memory{known}: reduce batch_size= or prefetch=, or "
        "give the container more memory",
        requested=nbytes,
        free=free,
    )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that this process may still take: of the machine and of its control group. None if unknown."""
    found = []
    machine = _numbers(root / "proc/meminfo", scale=1024).get("MemAvailable:")
    if machine is not None:
        found.append(machine)
    groups = root / "sys/fs/cgroup"
    for limit, used, details, files in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such group; or "max", no limit
            left = int((groups / limit).read_text(encoding="ascii")) - int((groups / used).read_text(encoding="ascii"))
            # The cache of files counts as used, and makes room.
            found.append(max(0, left + _numbers(groups / details).get(files, 0)))
    return min(found, default=None)


def _numbers(file: Path, scale: int = 1) -> dict[str, int]:
    """Return the numbers of a file of lines ``name number``."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="ascii").splitlines():
            name, number, *_ = line.split()
            found[name] = int(number) * scale
    return found
