"""Where one event loop hears of things: tags put by any thread, drained by the loop.

Tags put by Python wait in a deque; the pipe only says that there is something. So a burst costs one write per drain
and not one per tag, and a pipe that is full loses nothing. Native code that cannot reach the deque writes its tag
into the pipe itself, as 8 bytes in native order, through `Port.write_fd`: whole or not at all, since 8 is below
``PIPE_BUF``.

Where a loop cannot watch descriptors (Windows), ``wake`` stands in for the pipe.
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

#: Says "look into the deque". Tags have 63 bits, so this is none.
_NUDGE = (2**64 - 1).to_bytes(8, sys.byteorder)
_NUDGE_TAG = 2**64 - 1

# Ports are immortal: a notifier or a thread may put a tag long after its loop has gone, and a descriptor number that
# was closed would by then belong to somebody else.
_ports: list[Port] = []
_free: dict[bool, deque[Port]] = {True: deque(), False: deque()}


class Port:
    """A mailbox of tags. Made by `open_port`, never destroyed.

    `put` is for any thread, `drain` and `close` are for the loop's.
    """

    __slots__ = ("_is_open", "_nudged", "_read_fd", "_tags", "_wake", "_write_fd")

    def __init__(self, watchable: bool) -> None:
        self._tags: deque[int] = deque()
        self._wake: Callable[[], None] | None = None
        self._nudged = False  # the loop has been told, and has not looked yet
        self._is_open = False
        self._read_fd: int | None = None
        self._write_fd: int | None = None
        if watchable and sys.platform != "win32":  # whose loops watch no pipes
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)

    def fileno(self) -> int | None:
        """Readable whenever there is a tag. None where loops cannot watch descriptors."""
        return self._read_fd

    @property
    def write_fd(self) -> int | None:
        """Where native code writes its tags, 8 bytes each. Non-blocking, and never closed."""
        return self._write_fd

    def put(self, tag: int) -> None:
        """Leave a tag for the loop. Never blocks. A closed port swallows it."""
        if not self._is_open:
            return
        self._tags.append(tag)
        if not self._nudged:
            self._nudged = True
            if self._write_fd is not None:
                # A full pipe is readable: the loop looks anyway.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write_fd, _NUDGE)
            elif (wake := self._wake) is not None:
                wake()

    def drain(self) -> list[int]:
        """The tags that have come. Never blocks. More than 512 in the pipe take several calls."""
        if not self._is_open:
            return []
        tags = self._read() if self._read_fd is not None else []
        # After the read and before the deque: who puts a tag after this nudges again, who put it before is seen below.
        self._nudged = False
        waiting = self._tags
        while waiting:
            tags.append(waiting.popleft())
        return tags

    def close(self) -> None:
        """The loop has gone: swallow what still comes, and be ready for the next loop. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._wake = None
            _free[self._read_fd is not None].append(self)

    def _open(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._is_open = True
        while self.drain():  # what came for the loop before
            continue

    def _read(self) -> list[int]:
        assert self._read_fd is not None
        try:
            words = array("Q", os.read(self._read_fd, 4096))
        except BlockingIOError:
            return []
        return [word for word in words if word != _NUDGE_TAG]

    def __repr__(self) -> str:
        return f"<port {'open' if self._is_open else 'closed'}, fd {self._read_fd}>"


def open_port(wake: Callable[[], None], *, watchable: bool = _WATCHABLE) -> Port:
    """A port for one event loop: one that an earlier loop has closed, or a new one.

    Parameters
    ----------
    wake
        Called from any thread when there is a tag and the loop has not been told since it last looked. Only where
        `Port.fileno` is None; it must not raise.
    watchable
        Can loops on this platform watch pipes?
    """
    _watch_forks()
    try:
        port = _free[watchable].popleft()
    except IndexError:
        port = Port(watchable)
        _ports.append(port)
    port._open(wake)
    return port


def native_port(port: object) -> Port:
    """The port itself, if it is one of these, which it is when it came from a driver here."""
    if not isinstance(port, Port):
        raise InvalidTypeError(f"{port!r} is no port of this driver; take one from its open_port()")
    return port


@functools.cache
def _watch_forks() -> None:
    """Keep a forked child off its parent's pipes: it shares them, and would read and write there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_orphan_all)


def _orphan_all() -> None:
    for port in _ports:
        port._is_open = False  # and never opened again: what is closed already is not given back once more
    _ports.clear()
    for free in _free.values():
        free.clear()
