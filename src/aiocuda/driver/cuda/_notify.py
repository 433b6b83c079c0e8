"""The methods about time, threads and notification.

A notifier wakes an event loop when an event is done, without Python code on a CUDA thread. Its host function is libc's
``fflush``. The argument is a ``FILE`` that writes to the port's pipe, and the tag is already in its buffer. When the
stream reaches the host function, CUDA's thread flushes the buffer. This needs no GIL and no compiler. It is one
``write`` of 8 bytes, which a pipe never splits. The host function is enqueued in a side stream, after
``cuStreamWaitEvent``, because a host function in the user's stream costs each kernel 30 µs.

A ``FILE`` and its buffer are never freed, because a CUDA thread may flush it at any later time. A forked child has the
same pipe, and at exit it would write its copy of an armed tag. The buffers are therefore emptied in the child.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from ...errors import DriverError, ForkedProcessError, UnsupportedError
from .. import protocol
from .._port import Port, native_port, open_port
from .._workers import NativeWorkers, Workers
from ._core import WAIT_DEFAULT, StreamInfo
from ._library import FORKED
from ._streams import CudaStreams

__all__ = ["CudaNotifier", "CudaNotify", "notifier_limit"]

_IOFBF: Final = 0  # glibc and musl alike

#: With a buffer of less than 128 bytes, glibc writes the first data immediately: it rounds the size down to whole
#: blocks, and a small buffer has none.
_BUFFER_BYTES: Final = 256

_TAG: Final = struct.Struct("=q")

_files: Final[list[tuple[int, Any]]] = []  # every FILE with its buffer, forever


class _Stdio:
    """The functions of libc's stdio that notifiers use. They keep the GIL, because they only access memory."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        pointer, word, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

        def address(name: str) -> int:
            found = ctypes.cast(getattr(libc, name), pointer).value
            assert found is not None
            return found

        libc.fdopen.restype = pointer
        libc.fdopen.argtypes = [number, ctypes.c_char_p]
        self.fdopen = libc.fdopen
        self.setvbuf = ctypes.PYFUNCTYPE(number, pointer, pointer, number, word)(address("setvbuf"))
        self.fwrite = ctypes.PYFUNCTYPE(word, pointer, pointer, pointer, pointer)(address("fwrite"))
        self.fpurge = ctypes.PYFUNCTYPE(None, pointer)(address("__fpurge"))
        self.fflush: Final = address("fflush")


@functools.cache
def _stdio() -> _Stdio:
    stdio = _Stdio()

    def purge_all() -> None:
        for file, _ in _files:
            stdio.fpurge(file)

    os.register_at_fork(after_in_child=purge_all)
    return stdio


def notifier_limit(hardware_queues: int) -> int:
    """Return how many notifiers may be armed simultaneously: 24 of 32 hardware queues, 4 of 8.

    An armed notifier occupies a hardware queue, and streams that share the queue wait with it. With 24 of 32 queues
    occupied, 64 and 128 streams are as fast as without (31-32 ms instead of 30); with 32 they take 41 ms. Windows has
    no notifiers: event loops cannot watch pipes there.
    """
    if sys.platform == "win32":
        return 0
    return hardware_queues * 3 // 4 if hardware_queues >= 32 else hardware_queues // 2


class CudaNotifier:
    """`aiocuda.driver.protocol.Notifier`, with a side stream and a ``FILE`` on the port's pipe. Never destroyed."""

    __slots__ = ("_driver", "_file", "_info", "_stdio")

    def __init__(self, driver: CudaStreams, device: int, write_fd: int | None) -> None:
        if write_fd is None or notifier_limit(32) == 0:
            raise UnsupportedError("there are no notifiers where loops cannot watch pipes")
        self._driver: Final = driver
        self._stdio: Final = _stdio()
        driver.opened(device)  # raises if a stream cannot be created, before the FILE is, which is never freed
        file = self._stdio.fdopen(write_fd, b"w")
        if not file:
            reason = os.strerror(ctypes.get_errno())
            raise DriverError(f"fdopen of the port's pipe, descriptor {write_fd}: {reason}", code=0, call="fdopen")
        buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
        _files.append((file, buffer))
        self._stdio.setvbuf(file, buffer, _IOFBF, _BUFFER_BYTES)
        self._file: Final[int] = file
        self._info: Final[StreamInfo] = driver.make_stream(device, 0)

    def ring(self, event: int, tag: int) -> None:
        driver, info, file = self._driver, self._info, self._file
        code = info.calls.cuStreamWaitEvent(info.word, driver.event_info(event).word, WAIT_DEFAULT)
        if code:
            driver.fail("cuStreamWaitEvent", code, info.device)
        if self._stdio.fwrite(_TAG.pack(tag), 8, 1, file) != 1:
            self._stdio.fpurge(file)
            raise DriverError(f"the notifier's buffer did not take tag {tag}", code=0, call="fwrite")
        code = info.calls.cuLaunchHostFunc(info.handle, self._stdio.fflush, file)
        if code:
            self._stdio.fpurge(file)  # else the next `ring` would send this tag, too
            driver.fail("cuLaunchHostFunc", code, info.device)
        driver.call_count += 1


class CudaNotify(CudaStreams):
    """`aiocuda.driver.protocol.Notify`. After a fault, everything except notifiers works, to wake waiting tasks."""

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library)
        self._workers = Workers()
        self._notifiers = 0

    polls_freely: Final = True

    #: Return a monotonic time in seconds. This is the clock's own function, because every enqueue calls it.
    now = staticmethod(time.monotonic)

    def open_port(self, wake: Callable[[], None]) -> Port:
        if self._forked:
            raise ForkedProcessError(FORKED)
        return open_port(wake)

    def offload(self, work: Callable[[], object], port: protocol.Port, tag: int) -> None:
        """Run ``work`` on one of 4 to 8 daemon threads; then put ``tag`` into the port."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        self._workers.submit(work, native_port(port), tag)

    def worker_threads(
        self, threads: int, name: str, step: Callable[[], bool], port: protocol.Port, tag: int
    ) -> NativeWorkers:
        """Return new daemon threads. A fault does not end them."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        return NativeWorkers(threads, name, step, port, tag)

    def notifier_limit(self, device: int) -> int:
        """Return how many notifiers may be armed simultaneously on a device: 24 of 32 hardware queues, 4 of 8."""
        return notifier_limit(self.opened(device).properties.hardware_queues)

    def notifier(self, device: int, port: protocol.Port) -> CudaNotifier:
        notifier = CudaNotifier(self, device, native_port(port).write_fd)
        self._notifiers += 1
        return notifier
