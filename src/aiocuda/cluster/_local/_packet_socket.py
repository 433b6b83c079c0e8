"""PacketSocket: sends and receives numbered packets over a socket pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ..._processes._message_socket import MessageSocket
from ..._processes._messages import Pipe
from .._messages import Packet

__all__ = ["PacketSocket"]


class PacketSocket:
    """Sends and receives numbered packets over a socket pair.

    Parameters
    ----------
    loop
    pipe
    received
        Called with this object, the number and the packet.
    lost
        Called once when the other end is closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pipe: Pipe,
        received: Callable[[PacketSocket, int, Packet], object],
        lost: Callable[[], object],
    ) -> None:
        self._received = received
        self._socket = MessageSocket(loop, pipe, self._unpack, lost)

    def send(self, number: int, packet: Packet) -> None:
        """Send a packet. Its buffers must not change until it is sent."""
        views = [view if isinstance(view, memoryview) else view.raw() for view in packet.buffers]
        self._socket.send((number, packet.message, tuple(view.nbytes for view in views)), views)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()

    def _unpack(self, value: tuple[int, Any, Sequence[int]], rest: memoryview) -> None:
        number, message, sizes = value
        buffers, at = [], 0
        for size in sizes:
            buffers.append(rest[at : at + size])
            at += size
        self._received(self, number, Packet(message, buffers))
