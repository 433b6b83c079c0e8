"""What worker processes share with this process: the pickled source and decoder, and the memory of the slots."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from .._processes._main_guard import check_main_guard
from .._processes._messages import Buffer, pickled
from ..errors import InvalidTypeError
from ._decoding import SampleDecoder
from ._fields import Layout
from ._shared_memory import SharedFile
from ._worker_main import NO_ROW

__all__ = ["Payload", "SharedSlots"]


class Payload:
    """The pickled source and decoder of the program, for all worker processes.

    Raises
    ------
    InvalidTypeError
        They cannot be pickled.
    InvalidArgumentError
        A worker process would run the program's main module again.
    """

    def __init__(self, decoder: SampleDecoder, functions: dict[str, Any]) -> None:
        check_main_guard(functions, "executor='process'", ", or use executor='thread'")
        self._buffers: list[Buffer] = []
        try:
            self._pickled = pickled(decoder, self._buffers).data
        except Exception as error:
            raise InvalidTypeError(
                f"executor='process' sends the source and decode= to other processes, and they cannot be pickled: "
                f"{type(error).__name__}: {error}. Define functions and classes at the top of a module instead of "
                "lambdas and local functions, open files in the worker, or use executor='thread'"
            ) from error

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


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
