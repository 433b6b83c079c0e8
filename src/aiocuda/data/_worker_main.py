"""The program of a worker process: it decodes samples into memory that it shares with its parent.

It imports only NumPy, and the modules that the source and the decoder of the program need.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from .._base._thread_times import ThreadTimes, thread_times
from .._processes._failures import Failure, failure_from
from .._processes._messages import Buffer, Parts, Pickled, pickled, receive, send, unpickled
from .._processes._parent import InheritedFile, Start, end_with_parent, own_end
from ._fields import Layout, SampleDecoder

__all__ = ["NO_ROW", "Reply", "Request", "WorkerSetup", "main"]

#: In the status word of a worker: it is decoding no row.
NO_ROW = -1

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class WorkerSetup(NamedTuple):
    """What a worker process needs before its first request.

    Attributes
    ----------
    number
        Its place among the status words.
    payload, parts
        The pickled source and decoder, and the sizes of the pickle and of its buffers.
    memory, nbytes
        The shared memory: the status words, then the slots.
    slots_at, slot_bytes
        Where the first slot begins, and the distance between two slots.
    layout
        None if decoded samples are sent back.
    """

    number: int
    payload: InheritedFile
    parts: tuple[int, ...]
    memory: InheritedFile
    nbytes: int
    slots_at: int
    slot_bytes: int
    layout: Layout | None


class Request(NamedTuple):
    """Samples to decode: rows of the batch in a slot."""

    slot: int
    rows: tuple[int, ...]
    indices: tuple[int, ...]
    epoch: int
    positions: tuple[int, ...]  #: of the samples in the order of all ranks
    samples: tuple[Pickled, ...] | None  #: None if there is a source
    renewed: bytes | None  #: the pickled source and decoder, if they have changed


class Reply(NamedTuple):
    """The end of a request."""

    failures: dict[int, Failure]  #: by row
    results: dict[int, Pickled]  #: by row; empty where samples are written into the slot
    times: ThreadTimes  #: the time on a processor is that of all threads of the process


def main(pipe: InheritedFile, setup: WorkerSetup) -> None:
    """Answer the requests of the parent until it closes its end of the pipe, or ends."""
    _keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the parent ends the workers
    end_with_parent()
    with own_end(pipe) as parent, contextlib.suppress(EOFError, ConnectionError):
        with Start(parent):
            worker = _Worker(setup)
        while True:
            buffers: list[Buffer] = []
            request, rest = receive(parent)
            send(parent, worker.answer(request, rest, buffers), buffers)


def _keep_freed_memory() -> None:
    """Let malloc keep large arrays that a decoder frees, for its next sample.

    By default glibc gives them back to the system, and each page of the next ones faults: resizing an image by NumPy
    then takes three times as long. Variables of the environment have priority.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the highest value that glibc takes
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


class _Worker:
    def __init__(self, setup: WorkerSetup) -> None:
        memory = _mapped(setup.memory.fd, setup.nbytes)
        os.close(setup.memory.fd)
        self._status = np.frombuffer(memory, np.int64, 1, setup.number * 8)
        self._slots: dict[int, dict[Any, Any]] = {}  # the arrays of each slot
        self._bytes = np.frombuffer(memory, np.uint8)
        self._setup = setup
        self._decoder: SampleDecoder = _unpickled(setup)
        self._error: BaseException | None = None  # the decoder could not be loaded

    def answer(self, request: Request, rest: memoryview, buffers: list[Buffer]) -> Reply:
        """Decode samples. ``rest`` has the buffers of the request, and those of the reply are added to ``buffers``."""
        if request.renewed is not None:
            self._renew(request.renewed)
        failures: dict[int, Failure] = {}
        results: dict[int, Pickled] = {}
        arrays = self._arrays(request.slot)
        samples = None if request.samples is None else Parts(request.samples, rest)
        began = _times()
        for at, row in enumerate(request.rows):
            self._status[0] = row
            try:
                if self._error is not None:
                    raise self._error
                sample = None if samples is None else samples.load(at)
                index, place = request.indices[at], (request.epoch, request.positions[at])
                if arrays is None:
                    results[row] = pickled(self._decoder.result(index, sample, place), buffers)
                else:
                    self._decoder.write(index, sample, Layout.row(arrays, row), place)
            except BaseException as error:  # noqa: BLE001 - the parent raises it or skips the sample
                failures[row] = failure_from(error)
        self._status[0] = NO_ROW
        return Reply(failures, results, _times().minus(began))

    def _renew(self, pickle: bytes) -> None:
        """Load a source and a decoder in place of the present ones. If that fails, all samples fail."""
        try:
            self._decoder, self._error = unpickled(pickle), None
        except BaseException as error:  # noqa: BLE001 - the failure of each sample
            error.add_note("when a worker process of the loader loaded the changed source and decode=")
            self._error = error

    def _arrays(self, slot: int) -> dict[Any, Any] | None:
        layout = self._setup.layout
        if layout is None:
            return None
        found = self._slots.get(slot)
        if found is None:
            begin = self._setup.slots_at + slot * self._setup.slot_bytes
            found = self._slots[slot] = layout.arrays(self._bytes[begin : begin + layout.nbytes])
        return found


def _times() -> ThreadTimes:
    return thread_times()._replace(cpu=time.process_time())


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    """Map a shared file, all its pages at once: one by one, at the first write to each, takes three times as long."""
    if sys.platform != "linux":  # `SharedFile` has raised
        raise NotImplementedError
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _unpickled(setup: WorkerSetup) -> SampleDecoder:
    """Return the decoder. The arrays of its source lie in a private mapping: all workers share unchanged pages."""
    size = sum(setup.parts)
    if sys.platform == "win32":  # `SharedFile` has raised
        raise NotImplementedError
    view = memoryview(mmap.mmap(setup.payload.fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    os.close(setup.payload.fd)
    parts, at = [], 0
    for nbytes in setup.parts:
        parts.append(view[at : at + nbytes])
        at += nbytes
    decoder = unpickled(parts[0], parts[1:])
    assert isinstance(decoder, SampleDecoder)
    return decoder
