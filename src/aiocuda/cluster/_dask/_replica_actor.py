"""ReplicaActor: an actor of Dask that answers the requests of a cluster. What runs in a worker and in its nanny."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import distributed
import psutil
from distributed.protocol.pickle import dumps

from ..._processes._messages import PROTOCOL
from ...errors import InvalidArgumentError
from .._engine import VISIBLE
from .._messages import Leave, Packet, Reply
from .._served_object import ReplicaInfo
from .._server import ReplicaServer

__all__ = [
    "CURE", "Frames", "ReplicaActor", "ReplicaLease", "frames_of", "kill_process", "packet_of", "process_of",
    "replica_gpu", "starts_workers",
]  # fmt: skip

#: For the errors of a cluster whose workers another one uses.
CURE = "close that cluster first, start more workers, or use fewer replicas"

#: Seconds for a killed process to end.
END_SECONDS = 5.0

#: Seconds between two looks at it.
PAUSE = 0.005

#: The pickled message, and the bytes of its large buffers. Not a `Packet` or a `pickle.PickleBuffer`: a scheduler and
#: its workers agree on protocol 4 of pickle, which has no buffers. A memory view needs no pickle.
Frames = Sequence[bytes | memoryview]


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

    Raises
    ------
    InvalidArgumentError
        The worker has a replica of another cluster.
    """

    def __init__(self, info: ReplicaInfo, name: str, gpu: int) -> None:
        if replica_gpu() is not None:  # two clusters were opened at the same time
            raise InvalidArgumentError(f"a worker has a replica of another aiocuda cluster: {CURE}")
        os.environ.setdefault(VISIBLE, str(gpu))
        self.gpu = gpu
        self._info = info
        self._loop: asyncio.AbstractEventLoop | None = None  # until the first request
        self._server: ReplicaServer | None = None
        self._left: asyncio.Future[None] | None = None  # set when all objects are left
        _ACTORS[name] = self

    @property
    def has_left(self) -> bool:
        """True if it has left its objects."""
        return self._left is not None and self._left.done()

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


def replica_gpu() -> int | None:
    """Return the index of the GPU of the replica in this worker; None if there is no replica."""
    actors = [reference() for reference in _ACTORS.valuerefs()]
    return next((actor.gpu for actor in actors if actor is not None and not actor.has_left), None)


def frames_of(packet: Packet) -> Frames:
    """Return a packet as frames."""
    return [pickle.dumps(packet.message, PROTOCOL), *packet.buffers]


def packet_of(frames: Frames) -> Packet:
    """Return the packet of frames. Its buffers are those of the frames."""
    message, *buffers = frames
    return Packet(pickle.loads(message), [memoryview(buffer) for buffer in buffers])


def process_of(directory: str, dask_worker: distributed.Nanny) -> int | None:
    """Return the process id of the worker with this directory; None if the nanny has another worker, or none yet."""
    return dask_worker.pid if dask_worker.worker_dir == directory else None


def starts_workers(dask_worker: distributed.Nanny) -> bool:
    """Return whether the nanny has a worker, or starts another one after its end."""
    return dask_worker.status.name not in ("closing_gracefully", "closing", "closed", "failed")


async def kill_process(process: int, dask_worker: distributed.Nanny) -> bool:
    """Kill the worker if it is still this process. Return True when it has ended."""
    deadline = asyncio.get_running_loop().time() + END_SECONDS
    if dask_worker.pid == process:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            psutil.Process(process).kill()  # a stopped process ends, too
    while dask_worker.pid == process:
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(PAUSE)
    return True
