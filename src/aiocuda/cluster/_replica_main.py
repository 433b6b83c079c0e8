"""The program of a replica's process, and the form in which it exchanges packets with its parent."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._base._wakeups import wake_future
from .._processes._message_socket import MessageSocket
from .._processes._messages import Pipe
from .._processes._parent import InheritedFile, Start, end_with_parent, own_end
from ..lowlevel import has_gpu
from ._engine import VISIBLE
from ._messages import Packet
from ._served_object import ReplicaInfo
from ._server import ReplicaServer

__all__ = ["IGNORED", "ReplicaSetup", "main", "packet_of", "send_packet"]

#: Seconds to leave the objects when the parent has closed its sockets without a `Leave`.
LEAVE_SECONDS = 5.0

#: Signals that a replica ignores. They are blocked when its process starts, until it has set its handlers.
IGNORED = (signal.SIGINT, signal.SIGTERM)


class ReplicaSetup(NamedTuple):
    """What the process of a replica needs."""

    info: ReplicaInfo
    visible: str  #: the value of ``CUDA_VISIBLE_DEVICES``


def send_packet(socket: MessageSocket, number: int, packet: Packet) -> None:
    """Send a numbered packet. Its buffers must not change until it is sent."""
    socket.send((number, packet.message, [view.nbytes for view in packet.buffers]), packet.buffers)


def packet_of(value: tuple[int, Any, Sequence[int]], rest: memoryview) -> tuple[int, Packet]:
    """Return the number of a packet, and the packet, from a received message."""
    number, message, sizes = value
    ends = itertools.accumulate(sizes)
    return number, Packet(message, [rest[end - size : end] for size, end in zip(sizes, ends, strict=True)])


def main(control: InheritedFile, calls: InheritedFile, setup: ReplicaSetup) -> None:
    """Answer the requests of the parent until it closes its ends of the sockets, or ends.

    Probes and cancellations have a socket of their own: they do not wait for the bytes of large arrays.
    """
    if sys.platform == "win32":  # `LocalEngine.start` has raised
        raise NotImplementedError
    end_with_parent(at_once=True)
    # Ctrl-C and SIGTERM often reach the whole group. The parent completes its calls first, then ends its replicas. Not
    # SIG_IGN, which programs that the replica starts would inherit.
    for number in IGNORED:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    os.environ[VISIBLE] = setup.visible
    asyncio.run(_serve(setup.info, own_end(control), own_end(calls)))


async def _serve(info: ReplicaInfo, control: Pipe, calls: Pipe) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    server = ReplicaServer(info, pickle.dumps)

    def connected(pipe: Pipe) -> MessageSocket:
        def received(value: Any, rest: memoryview) -> None:
            number, packet = packet_of(value, rest)

            def reply(answer: asyncio.Future[Packet]) -> None:
                if not answer.cancelled():
                    send_packet(socket, number, answer.result())

            server.submit(packet).add_done_callback(reply)

        socket = MessageSocket(loop, pipe, received, functools.partial(wake_future, ended))
        return socket

    with Start(control) as start:
        start.result = await has_gpu()
    sockets = [connected(control), connected(calls)]
    try:
        await ended
        await asyncio.wait({server.leave()}, timeout=LEAVE_SECONDS)
    finally:
        # If the program has ended this loop, its calls are lost: a reply would report that they were cancelled.
        for each in sockets:
            each.close()
