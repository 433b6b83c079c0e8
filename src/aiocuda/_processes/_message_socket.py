"""MessageSocket: one end of a socket pair, which sends and receives messages on an event loop."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._base._mistakes import add_reader
from ._messages import HEADER, Buffer, Pipe, message, unpacked

__all__ = ["MessageSocket"]

#: A message of this size is received into memory of its own.
SMALL = 1 << 16

#: Parts that one system call sends; Linux takes 1 024.
MOST_PARTS = 64

#: Bytes of a large message that one iteration of the loop receives or sends: less than a millisecond.
CHUNK = 1 << 20


class MessageSocket:
    """One end of a socket pair, on an event loop.

    The bytes of large arrays are sent from the arrays' own memory, and received into the memory of the new arrays.

    Parameters
    ----------
    loop
    pipe
        A connected stream socket. This object closes it.
    received
        Called with the object of each message and the bytes after it. The memory is the callee's.
    lost
        Called once when the other end is closed, or the socket fails; not after `close`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pipe: Pipe,
        received: Callable[[Any, memoryview], object],
        lost: Callable[[], object],
    ) -> None:
        pipe.setblocking(False)
        self._loop = loop
        self._pipe = pipe
        self._received = received
        self._lost = lost
        self._closed = False
        self._unsent: deque[memoryview] = deque()
        self._small = memoryview(bytearray(SMALL))
        self._count = 0  # bytes in `_small`
        self._large: memoryview | None = None  # of the message that is being received, without its header
        self._filled = 0  # bytes in `_large`
        self._nbytes = 0  # of its pickled object
        add_reader(loop, pipe.fileno(), self._receive)

    @property
    def closed(self) -> bool:
        """True after `close`, and when the other end is closed."""
        return self._closed

    def send(self, value: Any, buffers: Sequence[Buffer | memoryview] = ()) -> None:
        """Send a message, as soon as the socket takes it. The buffers must not change until then."""
        if self._closed:
            return
        if not (buffers or self._unsent) and self._send_small(*message(value, ())):
            return
        parts = [memoryview(part) for part in message(value, buffers)]
        was_idle = not self._unsent
        self._unsent.extend(part for part in parts if part.nbytes)
        if was_idle:
            self._send()
            if self._unsent and not self._closed:
                self._loop.add_writer(self._pipe.fileno(), self._send)

    def _send_small(self, data: bytes | memoryview) -> bool:
        """Send a message without buffers. False if the socket takes nothing of it now."""
        if sys.platform == "win32":  # there, a socket pair is not inherited
            raise NotImplementedError
        try:
            count = self._pipe.send(data)
        except OSError:
            return False  # `_send` gets the same error
        if count < len(data):
            self._unsent.append(memoryview(data)[count:])
            self._loop.add_writer(self._pipe.fileno(), self._send)
        return True

    def close(self) -> None:
        """Close this end. Messages that were not sent are dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pipe.fileno())
            self._loop.remove_writer(self._pipe.fileno())
        self._pipe.close()
        self._unsent.clear()
        self._large = None

    def _fail(self) -> None:
        if not self._closed:
            self.close()
            self._lost()

    def _send(self) -> None:
        if sys.platform == "win32":  # there, a socket pair is not inherited
            raise NotImplementedError
        unsent, left = self._unsent, CHUNK
        while unsent and left > 0:
            parts = [unsent[at] for at in range(min(len(unsent), MOST_PARTS))]
            try:
                count = self._pipe.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._loop.call_soon(self._fail)  # not inside of a caller of `send`
                unsent.clear()
                break
            left -= count
            while count:
                if count < unsent[0].nbytes:
                    unsent[0] = unsent[0][count:]
                    break
                count -= unsent.popleft().nbytes
        if not unsent:
            self._loop.remove_writer(self._pipe.fileno())

    def _receive(self) -> None:
        left = CHUNK
        while left > 0 and not self._closed:
            target = self._small[self._count :] if self._large is None else self._large[self._filled :]
            try:
                count = self._pipe.recv_into(target)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                count = 0
            if not count:
                self._fail()
                return
            left -= count
            if self._large is None:
                self._count += count
                self._take()
                if self._large is None:
                    return
            else:
                self._filled += count
                if self._filled == self._large.nbytes:
                    body, self._large = self._large, None
                    self._received(*unpacked(body, self._nbytes))
                    return

    def _take(self) -> None:
        """Pass on the messages in the small buffer, and begin with a large one."""
        small, at, count = self._small, 0, self._count
        while count - at >= HEADER.size:
            total, nbytes = HEADER.unpack_from(small, at)
            begin, end = at + HEADER.size, at + HEADER.size + total
            if end <= count:
                at = end
                # The caller may keep the arrays of the message, and the small buffer is used again.
                self._received(*unpacked(memoryview(bytearray(small[begin:end])), nbytes))
                if self._closed:
                    return
            elif HEADER.size + total > SMALL:
                self._nbytes = nbytes
                self._large = np.empty(total, np.uint8).data  # zeroing it would take a second for each 10 GB
                self._filled = count - begin
                self._large[: self._filled] = small[begin:count]
                at = count
            else:
                break
        self._count = count - at
        if at and self._count:
            small[: self._count] = bytes(small[at:count])
