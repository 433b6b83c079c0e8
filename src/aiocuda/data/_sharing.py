"""What worker processes share with this process: the pickled source and decoder, and the memory of the slots.

The memory is a file without a name, which ends with the last process that uses it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .._processes._fork_server import order_of, server_of
from .._processes._imports import Order
from .._processes._main_guard import check_main_guard, check_pickle
from .._processes._messages import Buffer, pickled
from ..errors import AiocudaError, InvalidTypeError, UnsupportedError
from ._fields import Layout, SampleDecoder
from ._worker_main import NO_ROW, main

__all__ = ["Payload", "SharedFile", "SharedMemoryError", "SharedSlots", "available_bytes"]


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


#: The program of a worker process, which needs NumPy.
_WORKER: Final = main.__module__

#: The largest pickle of a source and its decoder that is compared before each epoch, in bytes: it takes a millisecond.
MOST_COMPARED = 1 << 20


class Payload:
    """The pickled source and decoder of the program, for all worker processes. Starts the server that forks these.

    Attributes
    ----------
    known : bytes or None
        The whole pickle that the processes have; None if it is too large to be compared before each epoch.
    order : Order
        The packages that the server imports.

    Raises
    ------
    InvalidTypeError
        They cannot be pickled.
    InvalidArgumentError
        A worker process would run the program's main module again.
    """

    def __init__(self, decoder: SampleDecoder, functions: dict[str, Any]) -> None:
        user = "executor='process'", ", or use executor='thread'"
        check_main_guard(functions, *user)
        self._decoder = decoder
        self.known: bytes | None = None
        self._buffers: list[Buffer] = []
        try:
            self._pickled, sizes = pickled(decoder, self._buffers)
            if len(self._pickled) + sum(sizes) <= MOST_COMPARED:
                self.known = pickled(decoder, None).data
        except Exception as error:
            raise InvalidTypeError(
                f"executor='process' sends the source and decode= to other processes, and they cannot be pickled: "
                f"{type(error).__name__}: {error}. Define functions and classes at the top of a module instead of "
                "lambdas and local functions, open files in the worker, or use executor='thread'"
            ) from error
        check_pickle(self._pickled, *user)
        self.order: Order = order_of([_WORKER], functions.values())
        server_of(self.order)

    def present(self) -> bytes | None:
        """Return the present pickle; None if there is none any more, as with an open file. **May block.**"""
        try:
            return pickled(self._decoder, None).data
        except Exception:  # noqa: BLE001 - it could be pickled before: the processes keep that
            return None

    def file(self) -> tuple[SharedFile, tuple[int, ...]]:
        """Return the pickle and its buffers as a shared file, and their sizes. **May block.**"""
        parts = [memoryview(self._pickled), *(buffer.raw() for buffer in self._buffers)]
        file = SharedFile("aiocuda-loader-source", max(1, sum(part.nbytes for part in parts)))
        try:
            with file.map() as mapped:
                for part in parts:
                    mapped.write(part)
        except BaseException:
            file.close()
            raise
        return file, tuple(part.nbytes for part in parts)


class SharedSlots:
    """Memory that worker processes share with this process: a status word for each, then the slots.

    Attributes
    ----------
    file
    slots_at, slot_bytes
        Where the first slot begins, and the distance between two slots: multiples of a page, so that each slot is
        page-locked on its own.
    """

    def __init__(self, layout: Layout | None, slots: int, workers: int) -> None:
        self.slots_at = _pages(8 * workers)
        self.slot_bytes = 0 if layout is None else _pages(layout.nbytes)
        self.file = SharedFile("aiocuda-loader", self.slots_at + slots * self.slot_bytes)
        self._slots = slots
        self._layout = layout
        try:
            self._map = self.file.map()
        except BaseException:
            self.file.close()
            raise
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._status = self._bytes[: 8 * workers].view(np.int64)
        self._status[:] = NO_ROW

    def slots(self) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of each slot; an empty list if decoded samples are sent back."""
        if self._layout is None or not self._layout.nbytes:
            return []
        begins = range(self.slots_at, self.slots_at + self._slots * self.slot_bytes, self.slot_bytes)
        return [self._bytes[begin : begin + self._layout.nbytes] for begin in begins]

    def close(self) -> None:
        """Give back the memory of the slots, which nothing uses any more. The status words stay. **May block.**"""
        self.file.shrink(self.slots_at)
        self.file.close()
        self._status = self._status.copy()
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a traceback has a view of a slot: the map ends with it
            self._map.close()  # it has a descriptor of its own

    def row_of(self, worker: int) -> int | None:
        """Return the row that a worker is decoding, or was decoding when it ended; None if it was decoding none."""
        row = int(self._status[worker])
        return None if row == NO_ROW else row

    def reset(self, worker: int) -> None:
        """Note that a worker is decoding no row, before another process takes its place."""
        self._status[worker] = NO_ROW


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


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
