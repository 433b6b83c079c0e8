"""Messages between processes: a pickled object, then the bytes of large arrays."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "HEADER", "Buffer", "Parts", "Pickled", "Pipe", "message", "pickled", "pipe_of", "pipes", "receive", "send",
    "unpacked", "unpickled",
]  # fmt: skip

Buffer: TypeAlias = pickle.PickleBuffer
Pipe: TypeAlias = socket.socket

PROTOCOL = 5

#: The bytes of the whole message after the header, and those of the pickled object.
HEADER = struct.Struct("<QQ")


class Pickled(NamedTuple):
    """A sample as it is sent: pickled, without the bytes of its large arrays, which follow the message's object."""

    data: bytes
    sizes: tuple[int, ...]  #: the bytes of each array


def pickled(value: Any, buffers: list[Buffer] | None) -> Pickled:
    """Return the pickled value, and add the memory of its large arrays to ``buffers``; None pickles that, too."""
    if buffers is None:
        return Pickled(pickle.dumps(value, PROTOCOL), ())
    own: list[Buffer] = []
    data = pickle.dumps(value, PROTOCOL, buffer_callback=own.append)
    sizes = tuple(buffer.raw().nbytes for buffer in own)
    buffers += own
    return Pickled(data, sizes)


def unpickled(data: bytes | memoryview, buffers: Sequence[memoryview] = ()) -> Any:
    """Return a pickled value. Its large arrays refer to the buffers."""
    return pickle.loads(data, buffers=buffers)


class Parts:
    """The samples of a message: ``rest`` has their arrays, one after the other."""

    def __init__(self, parts: Sequence[Pickled], rest: memoryview) -> None:
        self._parts = parts
        self._rest = rest
        self._at = 0
        self._begins: list[int] = []
        for part in parts:
            self._begins.append(self._at)
            self._at += sum(part.sizes)

    def load(self, number: int) -> Any:
        """Return a sample. Its large arrays refer to the memory of the message."""
        data, sizes = self._parts[number]
        buffers, at = [], self._begins[number]
        for size in sizes:
            buffers.append(self._rest[at : at + size])
            at += size
        return unpickled(data, buffers)


def message(value: Any, buffers: Sequence[Buffer | memoryview]) -> list[bytes | memoryview]:
    """Return a message as byte strings, to be sent one after the other."""
    data = pickle.dumps(value, PROTOCOL)
    views = [buffer if isinstance(buffer, memoryview) else buffer.raw() for buffer in buffers]
    return [HEADER.pack(len(data) + sum(view.nbytes for view in views), len(data)) + data, *views]


def unpacked(body: memoryview, nbytes: int) -> tuple[Any, memoryview]:
    """Return the object of a message, and the bytes after it. ``nbytes`` are those of the pickled object."""
    return unpickled(body[:nbytes]), body[nbytes:]


def pipes() -> tuple[Pipe, Pipe]:
    """Return the two ends of a pipe. They block, whatever default the program has set for its sockets."""
    ends = socket.socketpair()
    for each in ends:
        each.settimeout(None)
    return ends


def pipe_of(fd: int) -> Pipe:
    """Return the end of a pipe that a process has inherited. It blocks."""
    pipe = socket.socket(fileno=fd)
    pipe.settimeout(None)
    return pipe


def send(pipe: Pipe, value: Any, buffers: Sequence[Buffer]) -> None:
    """Send a message. **May block.**"""
    for part in message(value, buffers):
        pipe.sendall(part)


def receive(pipe: Pipe) -> tuple[Any, memoryview]:
    """Return the object of the next message, and the bytes after it. **May block.**

    Raises
    ------
    EOFError
        The other process has ended, or has closed its end.
    """
    total, nbytes = HEADER.unpack(_exactly(pipe, HEADER.size))
    return unpacked(_exactly(pipe, total), nbytes)


def _exactly(pipe: Pipe, nbytes: int) -> memoryview:
    view = memoryview(bytearray(nbytes))
    at = 0
    while at < nbytes:
        count = pipe.recv_into(view[at:])
        if not count:
            raise EOFError("the other process has closed its end of the pipe")
        at += count
    return view
