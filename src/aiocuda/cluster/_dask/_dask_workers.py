"""DaskWorker: a worker of a Dask cluster, as its scheduler lists it."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, NamedTuple

import distributed

from ...errors import ClosedError, InvalidArgumentError
from ._addresses import check_address
from ._in_nanny import starts_workers

__all__ = ["DaskWorker", "checked_workers", "workers_of"]

#: Seconds for nannies to start the workers again that were lost just before.
RESTART_SECONDS = 30.0

#: Seconds in which a nanny answers. Dask itself tries for 30 s to reach one that has ended.
ANSWER_SECONDS = 2.0

#: Seconds between two questions for the workers.
PAUSE = 0.05

#: The nannies of the workers that a client has seen: the scheduler forgets the nanny of a worker that is lost.
_nannies: weakref.WeakKeyDictionary[distributed.Client, set[str]] = weakref.WeakKeyDictionary()


class DaskWorker(NamedTuple):
    """A process of a worker. Its nanny starts another one, with another directory, when it has ended."""

    address: str
    nanny: str  #: the address of its nanny, which is the same for the next process; empty without a nanny
    host: str
    directory: str  #: is unique: an address may be that of an earlier process


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
        starts = await asyncio.gather(*(_starts_workers(client, nanny) for nanny in without))
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


async def checked_workers(client: distributed.Client, replicas: int) -> list[DaskWorker]:
    """Return one worker for each replica. Workers that were lost just before are waited for.

    Raises
    ------
    InvalidArgumentError
        There are too few workers, a worker has no nanny, or an address is neither of TLS nor of this machine.
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
    return workers[:replicas]
