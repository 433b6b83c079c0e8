"""Functions that run in the nanny of a worker: `Client.run` with the nanny's address."""

from __future__ import annotations

import asyncio
import contextlib

import distributed
import psutil

__all__ = ["kill_process", "process_of", "starts_workers"]

#: Seconds for a killed process to end.
END_SECONDS = 5.0

#: Seconds between two looks at it.
PAUSE = 0.005


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
