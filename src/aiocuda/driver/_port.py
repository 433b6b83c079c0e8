"""`Port`: the wake-up descriptor of one event loop. Any thread puts tags into it, and the loop drains them.

Python code appends tags to a deque, and writes one wake-up word to the pipe per drain instead of one per tag. A full
pipe therefore loses no tag. Native code, which cannot use the deque, writes its tag to the pipe through
`Port.write_fd`, as 8 bytes in native order. Such a write is atomic, because 8 is less than ``PIPE_BUF``.

Where a loop cannot watch descriptors (Windows), the function ``wake`` is called instead of a write to the pipe.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from array import array
from collections import deque
from collections.abc import Callable

from ..errors import InvalidTypeError

__all__ = ["Port", "native_port", "open_port"]

_WATCHABLE = sys.platform != "win32"

#: The word that wakes the loop without a tag. Tags have 63 bits, so it is not a tag.
_WAKE_TAG = 2**64 - 1
_WAKE_WORD = _WAKE_TAG.to_bytes(8, sys.byteorder)

# Ports are never destroyed: a notifier or a thread may put a tag long after its loop has closed, and the number of a
# closed descriptor may then belong to another file.
_ports: list[Port] = []
_free: dict[bool, deque[Port]] = {True: deque(), False: deque()}


class Port:
    """A queue of tags. Created by `open_port`, never destroyed.

    Any thread may call `put`. Only the loop's thread may call `drain` and `close`.
    """

    __slots__ = ("_is_open", "_read_fd", "_tags", "_wake", "_wake_pending", "_write_fd")

    def __init__(self, watchable: bool) -> None:
        self._tags: deque[int] = deque()
        self._wake: Callable[[], None] | None = None
        self._wake_pending = False  # the loop was woken, and has not drained yet
        self._is_open = False
        self._read_fd: int | None = None
        self._write_fd: int | None = None
        if watchable and sys.platform != "win32":  # where loops cannot watch pipes
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)

    def fileno(self) -> int | None:
        """Return a descriptor that is readable whenever there is a tag. None where loops cannot watch descriptors."""
        return self._read_fd

    @property
    def write_fd(self) -> int | None:
        """The descriptor to which native code writes its tags, 8 bytes each. Non-blocking, and never closed."""
        return self._write_fd

    def put(self, tag: int) -> None:
        """Put a tag into the port. Never blocks. A closed port discards it."""
        if not self._is_open:
            return
        self._tags.append(tag)
        if not self._wake_pending:
            self._wake_pending = True
            if self._write_fd is not None:
                # If the pipe is full, it is readable, and the loop drains anyway.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write_fd, _WAKE_WORD)
            elif (wake := self._wake) is not None:
                wake()

    def drain(self) -> list[int]:
        """Return and remove the tags that have arrived. Never blocks. One call reads at most 512 from the pipe."""
        if not self._is_open:
            return []
        tags = self._read() if self._read_fd is not None else []
        # After the read, and before the deque is emptied: a later `put` wakes the loop again, an earlier one is found
        # below.
        self._wake_pending = False
        waiting = self._tags
        while waiting:
            tags.append(waiting.popleft())
        return tags

    def close(self) -> None:
        """Discard the tags that arrive from now on, and offer the port to the next loop. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._wake = None
            _free[self._read_fd is not None].append(self)

    def open(self, wake: Callable[[], None]) -> None:
        """Use the port for a loop. Only `open_port` calls this."""
        self._wake = wake
        self._is_open = True
        while self.drain():  # tags of the previous loop
            continue

    def disable(self) -> None:
        """Discard all tags from now on, in a forked child. The port is not offered to another loop."""
        self._is_open = False

    def _read(self) -> list[int]:
        assert self._read_fd is not None
        try:
            words = array("Q", os.read(self._read_fd, 4096))
        except BlockingIOError:
            return []
        return [word for word in words if word != _WAKE_TAG]

    def __repr__(self) -> str:
        return f"<port {'open' if self._is_open else 'closed'}, fd {self._read_fd}>"


def open_port(wake: Callable[[], None], *, watchable: bool = _WATCHABLE) -> Port:
    """Return a port for one event loop: one that an earlier loop has closed, or a new one.

    Parameters
    ----------
    wake
        Called from any thread at the first tag after a drain. Only where `Port.fileno` is None. It must not raise.
    watchable
        True if loops on this platform can watch pipes.
    """
    _watch_forks()
    try:
        port = _free[watchable].popleft()
    except IndexError:
        port = Port(watchable)
        _ports.append(port)
    port.open(wake)
    return port


def native_port(port: object) -> Port:
    """Return the port, or raise if it does not come from `open_port`."""
    if not isinstance(port, Port):
        raise InvalidTypeError(f"{port!r} is no port of this driver; take one from its open_port()")
    return port


@functools.cache
def _watch_forks() -> None:
    """Prevent a forked child from reading and writing the pipes that it shares with its parent."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_disable_all)


def _disable_all() -> None:
    for port in _ports:
        port.disable()
    _ports.clear()
    for free in _free.values():
        free.clear()
