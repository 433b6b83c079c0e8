"""Notifiers: a stream tells an event loop that an event is done, with no Python in between.

The host function of a notifier is libc's own ``fflush``. Its argument is a ``FILE`` over the port's pipe in whose
buffer the tag already lies; when the stream gets there, the driver's thread flushes it. No GIL, no compiler, and one
``write`` of 8 bytes, which a pipe takes whole. The stream is one of the notifier's own, behind ``cuStreamWaitEvent``,
because a host function in the user's stream costs each kernel 30 µs.

A ``FILE`` and its buffer are never freed: a driver thread may flush it at any later time. A forked child shares the
pipe, and would write its copy of an armed tag into it at exit: there the buffers are emptied.
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
from .._workers import Workers
from ._core import WAIT_DEFAULT, StreamInfo
from ._library import FORKED
from ._streams import CudaStreams

__all__ = ["CudaNotifier", "CudaNotify", "notifier_limit"]

_IOFBF: Final = 0  # glibc and musl alike

#: glibc writes through a buffer below 128 bytes when it is first used (it rounds what it may keep down to whole
#: blocks, and takes a small buffer for no block at all): the first tag would be in the pipe at once.
_BUFFER_BYTES: Final = 256

_TAG: Final = struct.Struct("=q")

_files: Final[list[tuple[int, Any]]] = []  # every FILE with its buffer, for good


class _Stdio:
    """The functions of libc's stdio that notifiers use, called with the GIL kept: they only touch memory."""

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
    """How many notifiers may be armed at once.

    A notifier holds a hardware queue while it waits, and what shares that queue waits with it: with 24 of 32 armed, 64
    and 128 streams lose nothing (31-32 ms of 30), with 32 armed they take 41. Of the default 8, 4. There is no
    ``fflush`` over a watched pipe on Windows.
    """
    if sys.platform == "win32":
        return 0
    return hardware_queues * 3 // 4 if hardware_queues >= 32 else hardware_queues // 2


class CudaNotifier:
    """`aiocuda.driver.protocol.Notifier`. Made by the driver, never destroyed."""

    __slots__ = ("_driver", "_file", "_info", "_stdio")

    def __init__(self, driver: CudaStreams, device: int, write_fd: int | None) -> None:
        if write_fd is None or notifier_limit(32) == 0:
            raise UnsupportedError("there are no notifiers where loops cannot watch pipes")
        self._driver: Final = driver
        self._stdio: Final = _stdio()
        driver.opened(device)  # raises where a stream cannot be made, before there is a FILE that stays for good
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
        """Put ``tag`` into the port when the event's last record is done."""
        driver, info, file = self._driver, self._info, self._file
        code = info.calls.cuStreamWaitEvent(info.word, driver.event_info(event).word, WAIT_DEFAULT)
        if code:
            driver.fail("cuStreamWaitEvent", code, info.device)
        if self._stdio.fwrite(_TAG.pack(tag), 8, 1, file) != 1:
            self._stdio.fpurge(file)
            raise DriverError(f"the notifier's buffer did not take tag {tag}", code=0, call="fwrite")
        code = info.calls.cuLaunchHostFunc(info.handle, self._stdio.fflush, file)
        if code:
            self._stdio.fpurge(file)  # else the next ring would send this tag as well
            driver.fail("cuLaunchHostFunc", code, info.device)
        driver.call_count += 1


class CudaNotify(CudaStreams):
    """`aiocuda.driver.protocol.Notify`. After a fault all but the notifiers work, so that waiters can be woken."""

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library)
        # None of them starts before it is needed.
        self._workers = Workers()
        self._notifiers = 0

    polls_freely: Final = True

    #: Seconds, monotonic: the clock itself, since every enqueue reads it.
    now = staticmethod(time.monotonic)

    def open_port(self, wake: Callable[[], None]) -> Port:
        """A port for one event loop."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        return open_port(wake)

    def offload(self, work: Callable[[], object], port: protocol.Port, tag: int) -> None:
        """Run ``work`` on one of 8 daemon threads; then put ``tag`` into the port."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        self._workers.submit(work, native_port(port), tag)

    def notifier_limit(self, device: int) -> int:
        """How many notifiers may be armed at once on a device: 24 of 32 hardware queues, 4 of 8."""
        return notifier_limit(self.opened(device).properties.hardware_queues)

    def notifier(self, device: int, port: protocol.Port) -> CudaNotifier:
        """A new notifier, with a stream of its own."""
        notifier = CudaNotifier(self, device, native_port(port).write_fd)
        self._notifiers += 1
        return notifier
