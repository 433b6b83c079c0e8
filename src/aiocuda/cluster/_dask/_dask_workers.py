"""DaskWorker: a worker of a Dask cluster, as its scheduler lists it."""

from __future__ import annotations

from typing import Any, NamedTuple

import distributed

from ...errors import ClosedError, InvalidArgumentError
from ._addresses import check_address

__all__ = ["DaskWorker", "checked_workers", "workers_of"]


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
    return sorted(found, key=lambda worker: (worker.host, worker.nanny, worker.address))


async def checked_workers(client: distributed.Client, replicas: int) -> list[DaskWorker]:
    """Return one worker for each replica.

    Raises
    ------
    InvalidArgumentError
        There are too few workers, a worker has no nanny, or an address is neither of TLS nor of this machine.
    """
    scheduler: Any = client.scheduler
    check_address(scheduler.address, "the scheduler")
    identity = await scheduler.identity(n_workers=0)
    check_address(identity["address"], "the scheduler")
    workers = await workers_of(client)
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
