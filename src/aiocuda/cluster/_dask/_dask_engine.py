"""DaskEngine: an actor on one worker of a Dask cluster for each replica; the workers that its scheduler lists."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import itertools
import weakref
from typing import Any, ClassVar, NamedTuple

import distributed
from distributed.protocol.pickle import dumps

from ..._base._tasks import start_task
from ..._processes._failures import text_of
from ...errors import ClosedError, InvalidArgumentError, InvalidTypeError, ReplicaLostError
from .._engine import LostListener, unanswered
from .._messages import Packet, Pickler
from .._served_object import ReplicaInfo
from ._dask_replica import DaskReplica, DaskWorker
from ._replica_actor import CURE, process_of, replica_gpu, starts_workers

__all__ = ["DaskEngine", "check_address", "workers_of"]

#: Seconds for the nanny of a lost worker to start another one, and for the actor to be made there.
START_SECONDS = 30.0

#: Seconds after which an unused worker takes the place of one that its nanny has not started again.
SPARE_SECONDS = 10.0

#: Seconds for nannies to start the workers again that were lost just before.
RESTART_SECONDS = 30.0

#: Seconds in which a nanny answers. Dask itself tries for 30 s to reach one that has ended.
ANSWER_SECONDS = 2.0

#: Seconds between two questions for the workers.
PAUSE = 0.05

#: The nannies of the workers that a client has seen: the scheduler forgets the nanny of a worker that is lost.
_nannies: weakref.WeakKeyDictionary[distributed.Client, set[str]] = weakref.WeakKeyDictionary()


class DaskEngine:
    """An actor on one worker of a Dask cluster for each replica. Dask starts, restarts and reaches the processes.

    A loss is noticed by the connection of a request that the replica answers only at its end: the operating system
    closes it with the process.
    """

    dumps: Pickler = staticmethod(dumps)

    #: The engines of this process that are open. A worker that is started again has no replica for a while.
    opened: ClassVar[weakref.WeakSet[DaskEngine]] = weakref.WeakSet()

    def __init__(self, client: distributed.Client) -> None:
        _check_client(client)
        self._client = client
        self._lost: LostListener
        self.places: list[_Place] = []  #: of the replicas
        self._others: list[_Place] = []  # of replicas of other clusters, when this one was opened
        self._last: dict[int, str] = {}  # the directory of the last worker of a replica
        self._replicas: dict[int, DaskReplica] = {}

    async def start(self, replicas: int, lost: LostListener) -> None:
        """Choose a worker for each replica."""
        self._lost = lost
        workers, self._others = await _checked_workers(self._client, replicas)
        self.opened.add(self)  # without an await after the check
        for worker in workers:
            self.places.append(_place(worker, self.places + self._others))

    async def spawn(self, replica: int, epoch: int) -> None:
        """Wait for the worker of a replica, and make the actor there."""
        info = ReplicaInfo(replica, len(self.places), epoch)
        try:
            async with asyncio.timeout(START_SECONDS):
                worker, process = await self._find(replica, epoch)
                lost = functools.partial(self._lost, replica, epoch)
                spawned = self._replicas[replica] = DaskReplica(self._client, info, worker, process, lost)
                self._last[replica] = worker.directory
                await spawned.start(self.places[replica].gpu)
        except InvalidArgumentError:  # the worker is that of another cluster: it is not killed
            self._replicas.pop(replica).disconnect()
            raise
        except (TimeoutError, OSError) as error:
            reason = f"its worker has not started within {START_SECONDS:g} s"
            if not isinstance(error, TimeoutError):
                reason = f"Dask cannot reach its scheduler or worker: {text_of(error)}"
            raise ReplicaLostError(
                f"replica {replica} was lost: {reason}", replica=replica, epoch=epoch, reason=reason
            ) from error

    async def _find(self, replica: int, epoch: int) -> tuple[DaskWorker, int]:
        """Wait until the nanny of a replica has a new worker. Return it and its process id."""
        loop = asyncio.get_running_loop()
        spare_at = loop.time() + SPARE_SECONDS
        while True:
            workers = await workers_of(self._client)
            found = [worker for worker in workers if worker.nanny == self.places[replica].nanny]
            if not found and loop.time() >= spare_at:
                used = {place.nanny for engine in self.opened for place in engine.places}
                found = [worker for worker in workers if worker.nanny and worker.nanny not in used]
            for worker in found:
                if worker.directory == self._last.get(replica):
                    continue  # the scheduler has not noticed its end
                check_address(worker.address, "a worker")
                check_address(worker.nanny, "a nanny")
                answers = await self._client.run(process_of, worker.directory, workers=[worker.nanny])
                process: int | None = answers[worker.nanny]
                # `start` has asked at the first epoch. Another cluster may be opened while a worker is away.
                if process is None or (epoch > 1 and await _place_of_replica(self._client, worker) is not None):
                    continue
                others = self.places[:replica] + self.places[replica + 1 :]
                self.places[replica] = _place(worker, others + self._others)
                return worker, process
            await asyncio.sleep(PAUSE)

    def call(self, replica: int, request: Packet) -> asyncio.Future[Packet]:
        """Send a request to a replica, and return the future of its reply."""
        spawned = self._replicas.get(replica)
        return unanswered("the replica has no worker") if spawned is None else spawned.call(request)

    def broadcast(self, request: Packet) -> list[asyncio.Future[Packet]]:
        """Send a request to all replicas that have an actor."""
        return [replica.call(request) for replica in self._replicas.values() if replica.has_actor]

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
        self.opened.discard(self)
        replicas = list(self._replicas.values())
        self._replicas.clear()
        stuck = [each for each in replicas if each.is_stuck]
        for each in replicas:
            each.disconnect()
        await asyncio.gather(*(start_task(each.kill) for each in stuck))
        await asyncio.gather(*(start_task(each.ended) for each in replicas))


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


async def workers_of(client: distributed.Client) -> list[DaskWorker]:
    """Ask the scheduler for its workers. They are sorted by their host and nanny."""
    scheduler: Any = client.scheduler
    if scheduler is None:
        raise ClosedError("the client of Dask is closed: close the cluster first")
    identity = await scheduler.identity(n_workers=-1)
    found = [
        DaskWorker(address, worker["nanny"] or "", worker["host"], worker["local_directory"])
        for address, worker in identity["workers"].items()
        if worker["status"] == "running"
    ]
    _nannies.setdefault(client, set()).update(worker.nanny for worker in found if worker.nanny)
    return sorted(found, key=lambda worker: (worker.host, worker.nanny, worker.address))


async def _enough_workers(client: distributed.Client, replicas: int) -> list[DaskWorker]:
    """Ask for the workers until there is one for each replica, or no nanny is starting one again."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + RESTART_SECONDS
    while True:
        workers = await workers_of(client)
        without = _nannies[client] - {worker.nanny for worker in workers}
        if len(workers) >= replicas or not without or loop.time() >= give_up_at:
            return workers
        starts = await asyncio.gather(*(start_task(_starts_workers, client, nanny) for nanny in without))
        _nannies[client] -= {nanny for nanny, will in zip(without, starts, strict=True) if not will}
        await asyncio.sleep(PAUSE)


async def _starts_workers(client: distributed.Client, nanny: str) -> bool:
    """Return whether a nanny answers that it starts its worker again."""
    check_address(nanny, "a nanny")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return bool((await client.run(starts_workers, workers=[nanny]))[nanny])
    except Exception:  # noqa: BLE001 - the nanny or its host is gone
        return False


async def _place_of_replica(client: distributed.Client, worker: DaskWorker) -> _Place | None:
    """Return the place of the replica that a worker has; None if it has none, or does not answer."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            gpu: int | None = (await client.run(replica_gpu, workers=[worker.address]))[worker.address]
    except Exception:  # noqa: BLE001 - the worker is gone, or is busy
        return None
    return None if gpu is None else _Place(worker.nanny, worker.host, gpu)


async def _free_workers(
    client: distributed.Client, workers: list[DaskWorker], replicas: int
) -> tuple[list[DaskWorker], list[_Place]]:
    """Return the workers without a replica, and the places of the replicas of the others.

    If there are too few, it asks them again for some time: a cluster that was not opened leaves its workers soon.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + ANSWER_SECONDS
    while True:
        found = await asyncio.gather(*(start_task(_place_of_replica, client, worker) for worker in workers))
        others = {place.nanny: place for place in found if place is not None}
        others |= {place.nanny: place for engine in DaskEngine.opened for place in engine.places}
        free = [worker for worker in workers if worker.nanny not in others]
        if len(free) >= replicas or loop.time() >= give_up_at:
            return free, list(others.values())
        await asyncio.sleep(PAUSE)


async def _checked_workers(client: distributed.Client, replicas: int) -> tuple[list[DaskWorker], list[_Place]]:
    """Return one worker for each replica, and the places of replicas of other clusters.

    Workers that were lost just before are waited for.

    Raises
    ------
    InvalidArgumentError
        There are too few workers, or other clusters use them; a worker has no nanny, or an address is neither of TLS
        nor of this machine.
    """
    scheduler: Any = client.scheduler
    check_address(scheduler.address, "the scheduler")
    identity = await scheduler.identity(n_workers=0)
    check_address(identity["address"], "the scheduler")
    workers = await _enough_workers(client, replicas)
    for worker in workers:
        check_address(worker.address, "a worker")
        if not worker.nanny:
            raise InvalidArgumentError(
                f"the worker {worker.address} has no nanny, which kills it and starts it again: start it without "
                "--no-nanny, or by LocalCluster(processes=True)",
                address=worker.address,
            )
        check_address(worker.nanny, "a nanny")
    if len(workers) < replicas:
        raise InvalidArgumentError(
            f"replicas={replicas}, but the Dask cluster has {len(workers)} running workers: use fewer replicas, start "
            "more workers, or await client.wait_for_workers(n) first",
            argument="replicas",
        )
    free, others = await _free_workers(client, workers, replicas)
    if len(free) < replicas:
        raise InvalidArgumentError(
            f"replicas={replicas}, but only {len(free)} of the {len(workers)} workers of the Dask cluster have no "
            f"replica of another aiocuda cluster: {CURE}",
            argument="replicas",
        )
    return free[:replicas], others


def check_address(address: str, what: str) -> None:
    """Raise `InvalidArgumentError` unless an address is of TLS, or of this machine.

    Parameters
    ----------
    address
        As Dask writes it: ``tcp://127.0.0.1:8786``.
    what
        The process with this address, for the error: "the scheduler".
    """
    scheme, _, rest = address.partition("://")
    if scheme == "tls" or (scheme == "tcp" and _is_loopback(rest)):
        return
    if scheme == "inproc":
        raise InvalidArgumentError(
            f"{what} has the address {address}: it is in this process, which cannot be killed and started again. Use "
            "LocalCluster(processes=True, asynchronous=True)",
            address=address,
        )
    raise InvalidArgumentError(
        f"{what} has the address {address}: everything that Dask receives there is trusted and can run code. Use TLS: "
        "pass distributed.security.Security(require_encryption=True, tls_ca_file=…, …) to the cluster and the Client. "
        "On one machine, use tcp://127.0.0.1",
        address=address,
    )


def _is_loopback(rest: str) -> bool:
    host = rest.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which may have more than one address
        return False
