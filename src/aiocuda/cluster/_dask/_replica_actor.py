"""ReplicaActor: an actor of Dask that answers the requests of a cluster."""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import Any

from distributed.protocol.pickle import dumps

from .._local._gpus import VISIBLE
from .._messages import Leave, Packet, Reply
from .._replica_info import ReplicaInfo
from .._server import ReplicaServer
from ._frames import Frames, frames_of, packet_of

__all__ = ["ReplicaActor", "ReplicaLease"]


class ReplicaActor:
    """An actor of Dask that answers the requests of a cluster.

    Dask makes it in a thread of the worker, and runs `answer` on the worker's loop, any number of times at once.

    Parameters
    ----------
    info
    name
        The name of its `ReplicaLease`.
    gpu
        The index of its GPU among those of the host. The worker's ``CUDA_VISIBLE_DEVICES`` is set to it if it is not
        set: dask-cuda sets it for each worker.
    """

    def __init__(self, info: ReplicaInfo, name: str, gpu: int) -> None:
        os.environ.setdefault(VISIBLE, str(gpu))
        self._info = info
        self._loop: asyncio.AbstractEventLoop | None = None  # until the first request
        self._server: ReplicaServer | None = None
        self._left: asyncio.Future[None] | None = None  # set when all objects are left
        _ACTORS[name] = self

    async def answer(self, *frames: bytes | memoryview) -> Frames:
        """Answer a request. The reply to a `Watch` of a replica that has left its objects is not accepted."""
        server, left = self._serve()
        request = packet_of(frames)
        reply = server.submit(request)
        if isinstance(request.message.body, Leave):
            reply.add_done_callback(self._end)
        either: set[asyncio.Future[Any]] = {reply, left}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)  # its cancellation cancels neither
        if reply.done() and not reply.cancelled():
            return frames_of(reply.result())
        return frames_of(Packet(Reply(self._info.epoch, accepted=False)))

    def _serve(self) -> tuple[ReplicaServer, asyncio.Future[None]]:
        if self._server is None or self._left is None:
            self._loop = asyncio.get_running_loop()
            self._left = self._loop.create_future()
            self._server = ReplicaServer(self._info, dumps)
        return self._server, self._left

    def leave(self) -> None:
        """Cancel all methods and leave all objects. May be called by any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        server, _ = self._serve()
        server.leave().add_done_callback(self._end)

    def _end(self, reply: asyncio.Future[Packet]) -> None:
        if self._left is not None and not self._left.done():
            self._left.set_result(None)


class ReplicaLease:
    """An actor that the scheduler drops when the client is closed, or lost. Then the replica leaves its objects.

    The `ReplicaActor` cannot notice this by itself: the requests that it is answering keep it alive.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        actor = _ACTORS.get(self.name)
        if actor is not None:
            actor.leave()


#: The actors of this process, by the name of their leases.
_ACTORS: weakref.WeakValueDictionary[str, ReplicaActor] = weakref.WeakValueDictionary()
