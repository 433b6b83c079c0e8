"""DaskEngine: an actor on one worker of a Dask cluster for each replica."""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import Any, NamedTuple

import distributed
from distributed.protocol.pickle import dumps

from ..._processes._failures import text_of
from ...errors import ClosedError, InvalidArgumentError, InvalidTypeError
from .._engine import LostListener
from .._errors import ReplicaLostError
from .._messages import Packet, Pickler
from .._replica_info import ReplicaInfo
from ._addresses import check_address
from ._dask_replica import DaskReplica
from ._dask_workers import DaskWorker, checked_workers, workers_of
from ._in_nanny import process_of

__all__ = ["DaskEngine"]

#: Seconds for the nanny of a lost worker to start another one, and for the actor to be made there.
START_SECONDS = 30.0

#: Seconds after which an unused worker takes the place of one that its nanny has not started again.
SPARE_SECONDS = 10.0

#: Seconds between two questions whether a worker is there.
PAUSE = 0.05


class DaskEngine:
    """An actor on one worker of a Dask cluster for each replica. Dask starts, restarts and reaches the processes.

    A loss is noticed by the connection of a request that the replica answers only at its end: the operating system
    closes it with the process.
    """

    dumps: Pickler = staticmethod(dumps)

    def __init__(self, client: distributed.Client) -> None:
        _check_client(client)
        self._client = client
        self._listeners: list[LostListener] = []
        self._places: list[_Place] = []  # of the replicas
        self._last: dict[int, str] = {}  # the directory of the last worker of a replica
        self._replicas: dict[int, DaskReplica] = {}

    async def start(self, replicas: int) -> None:
        """Choose a worker for each replica."""
        for worker in await checked_workers(self._client, replicas):
            self._places.append(_place(worker, self._places))

    async def spawn(self, replica: int, epoch: int) -> None:
        """Wait for the worker of a replica, and make the actor there."""
        info = ReplicaInfo(replica, len(self._places), epoch)
        try:
            async with asyncio.timeout(START_SECONDS):
                worker, process = await self._find(replica)
                lost = functools.partial(self._report, replica, epoch)
                spawned = self._replicas[replica] = DaskReplica(self._client, info, worker, process, lost)
                self._last[replica] = worker.directory
                await spawned.start(self._places[replica].gpu)
        except (TimeoutError, OSError) as error:
            reason = f"its worker has not started within {START_SECONDS:g} s"
            if not isinstance(error, TimeoutError):
                reason = f"Dask cannot reach its scheduler or worker: {text_of(error)}"
            raise ReplicaLostError(
                f"replica {replica} was lost: {reason}", replica=replica, epoch=epoch, reason=reason
            ) from error

    async def _find(self, replica: int) -> tuple[DaskWorker, int]:
        """Wait until the nanny of a replica has a new worker. Return it and its process id."""
        loop = asyncio.get_running_loop()
        spare_at = loop.time() + SPARE_SECONDS
        while True:
            workers = await workers_of(self._client)
            found = [worker for worker in workers if worker.nanny == self._places[replica].nanny]
            if not found and loop.time() >= spare_at:
                used = {place.nanny for place in self._places}
                found = [worker for worker in workers if worker.nanny and worker.nanny not in used]
            for worker in found:
                if worker.directory == self._last.get(replica):
                    continue  # the scheduler has not noticed its end
                check_address(worker.address, "a worker")
                check_address(worker.nanny, "a nanny")
                answers = await self._client.run(process_of, worker.directory, workers=[worker.nanny])
                process: int | None = answers[worker.nanny]
                if process is not None:
                    others = self._places[:replica] + self._places[replica + 1 :]
                    self._places[replica] = _place(worker, others)
                    return worker, process
            await asyncio.sleep(PAUSE)

    def _report(self, replica: int, epoch: int, reason: str) -> None:
        for listener in self._listeners:
            listener(replica, epoch, reason)

    def call(self, replica: int, request: Packet) -> asyncio.Future[Packet]:
        """Send a request to a replica, and return the future of its reply."""
        spawned = self._replicas.get(replica)
        if spawned is None:
            reply: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
            reply.set_exception(ConnectionResetError("the replica has no worker"))
            return reply
        return spawned.call(request)

    def broadcast(self, request: Packet) -> list[asyncio.Future[Packet]]:
        """Send a request to all replicas that have an actor."""
        return [replica.call(request) for replica in self._replicas.values() if replica.has_actor]

    def on_lost(self, listener: LostListener) -> None:
        """Call a function when the worker of a replica has ended by itself."""
        self._listeners.append(listener)

    async def close(self, replica: int | None = None) -> None:
        """Kill the worker of one replica; without an argument, release all. Their workers go on.

        A worker that was asked to leave its objects, and has not answered, is killed.
        """
        if replica is not None:
            spawned = self._replicas.get(replica)
            if spawned is not None:
                spawned.disconnect()
                await spawned.kill()
                self._replicas.pop(replica, None)  # not before: `close` of all kills it if this is cancelled
            return
        replicas = list(self._replicas.values())
        self._replicas.clear()
        stuck = [each for each in replicas if each.is_stuck]
        for each in replicas:
            each.disconnect()
        await asyncio.gather(*(each.kill() for each in stuck))
        await asyncio.gather(*(each.ended() for each in replicas))


class _Place(NamedTuple):
    """Where the processes of a replica are."""

    nanny: str
    host: str
    gpu: int  #: its index among the replicas of the host


def _place(worker: DaskWorker, others: list[_Place]) -> _Place:
    """Return the place of a replica on a worker, with the first GPU that no other replica of the host has."""
    used = {place.gpu for place in others if place.host == worker.host}
    return _Place(worker.nanny, worker.host, next(gpu for gpu in itertools.count() if gpu not in used))


def _check_client(client: Any) -> None:
    cure = "`async with distributed.Client(address, asynchronous=True) as client`"
    if not isinstance(client, distributed.Client):
        raise InvalidTypeError(f"client is a distributed.Client, not {client!r}: use {cure}")
    if client.status in ("closed", "closing"):
        raise ClosedError(f"the client is closed: use {cure}")
    if not client.asynchronous:
        raise InvalidArgumentError(f"the client is not asynchronous, or of another event loop: use {cure} in this loop")
    if client.status != "running":
        raise InvalidArgumentError(f"the client is {client.status}: enter or await it first: {cure}")
