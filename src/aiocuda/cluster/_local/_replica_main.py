"""The program of a replica's process, and the form in which it exchanges packets with its parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..._processes._failures import Failure, failure_from
from ..._processes._inherited_file import InheritedFile
from ..._processes._message_socket import MessageSocket
from ..._processes._messages import Pipe, pipe_of
from ..._processes._parent_watch import end_with_parent
from ...lowlevel import has_gpu
from .._engine import VISIBLE
from .._messages import Packet
from .._served_object import ReplicaInfo
from .._server import ReplicaServer

__all__ = ["IGNORED", "Hello", "PacketSocket", "ReplicaSetup", "main"]

#: Seconds to leave the objects when the parent has closed its sockets without a `Leave`.
LEAVE_SECONDS = 5.0

#: Signals that a replica ignores. They are blocked when its process starts, until it has set its handlers.
IGNORED = (signal.SIGINT, signal.SIGTERM)

_PR_SET_PDEATHSIG = 1  # of sys/prctl.h


class ReplicaSetup(NamedTuple):
    """What the process of a replica needs.

    Attributes
    ----------
    info
    visible
        The value of ``CUDA_VISIBLE_DEVICES``.
    parent
        The process id of the parent.
    calls, control
        The ends of two socket pairs. Probes and cancellations do not wait for the bytes of large arrays.
    """

    info: ReplicaInfo
    visible: str
    parent: int
    calls: InheritedFile
    control: InheritedFile


class Hello(NamedTuple):
    """The first message of a process."""

    has_gpu: bool | None = None  #: None if no GPU was looked for
    failure: Failure | None = None  #: a GPU is there and does not work


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
        sizes = tuple(view.nbytes for view in packet.buffers)
        self._socket.send((number, packet.message, sizes), packet.buffers)

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


def main(setup: ReplicaSetup) -> None:
    """Answer the requests of the parent until it closes its ends of the sockets, or ends."""
    if sys.platform == "win32":  # `LocalEngine.start` has raised
        raise NotImplementedError
    _die_with(setup.parent)
    # Ctrl-C and SIGTERM often reach the whole group. The parent completes its calls first, then ends its replicas. Not
    # SIG_IGN, which programs that the replica starts would inherit.
    for number in IGNORED:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    end_with_parent()
    os.environ[VISIBLE] = setup.visible
    asyncio.run(_serve(setup))


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, also if it is stopped or holds the GIL."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before the call
        os._exit(1)


async def _serve(setup: ReplicaSetup) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    server = ReplicaServer(setup.info, pickle.dumps)

    def lost() -> None:
        if not ended.done():
            ended.set_result(None)

    def received(socket: PacketSocket, number: int, packet: Packet) -> None:
        def reply(answer: asyncio.Future[Packet]) -> None:
            if not answer.cancelled():
                socket.send(number, answer.result())

        server.submit(packet).add_done_callback(reply)

    calls = PacketSocket(loop, _own_pipe(setup.calls), received, lost)
    control = PacketSocket(loop, _own_pipe(setup.control), received, lost)
    try:
        hello = Hello(await has_gpu())
    except Exception as error:  # noqa: BLE001 - the parent raises it
        hello = Hello(failure=failure_from(error))
    control.send(0, Packet(hello))
    try:
        await ended
        await asyncio.wait({server.leave()}, timeout=LEAVE_SECONDS)
    finally:
        # If the program has ended this loop, its calls are lost: a reply would report that they were cancelled.
        calls.close()
        control.close()


def _own_pipe(file: InheritedFile) -> Pipe:
    """Return the end of a pipe. Processes that the replica starts do not keep it open after the replica has ended."""
    if sys.platform == "win32":  # `LocalEngine.start` has raised
        raise NotImplementedError
    os.set_inheritable(file.fd, False)
    pipe = pipe_of(file.fd)
    os.register_at_fork(after_in_child=pipe.close)
    return pipe
