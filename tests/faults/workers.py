"""Processes that a program with a device starts: workers of a data loader, by each of multiprocessing's methods.

``python -m tests.faults.workers --driver host --start spawn`` prints what the workers made of their batches, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
from typing import Any

import numpy as np

import aiocuda
from aiocuda.testing import Latch

BATCHES, WORKERS = 6, 2

_driver: Any = "host"


def begin(driver: str) -> None:
    """What a worker does first."""
    global _driver
    _driver = driver


def load(batch: int) -> int:
    """One batch, through a device of the worker's own."""
    return asyncio.run(_load(batch))


async def _load(batch: int) -> int:
    async with aiocuda.open_device(driver=_driver) as device, device.stream() as stream:
        buffer = await stream.upload(np.full(1000, batch, np.uint32))
        return int((await stream.download(buffer)).sum())


async def main(driver: Any, start: str) -> dict[str, Any]:
    """The parent works on while the workers come, work and go."""
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["aiocuda"])
    early = context.Pool(WORKERS, begin, (driver,)) if start == "fork" else None
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        latch = Latch(device, seconds=120)
        hold = latch.hold(stream)
        await latch.held()
        # By `fork` only what was forked before a device was opened can open one of its own.
        with early or context.Pool(WORKERS, begin, (driver,)) as pool:
            sums = await asyncio.to_thread(pool.map, load, range(BATCHES), 1)
        held = not hold.done()
        latch.release()
        await hold
        buffer = await stream.upload(np.ones(1000, np.uint32))
        return {"sums": sums, "held": held, "parent": int((await stream.download(buffer)).sum())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", default="host")
    parser.add_argument("--start", default="spawn", choices=multiprocessing.get_all_start_methods())
    arguments = parser.parse_args()
    sys.stdout.write(json.dumps(asyncio.run(main(arguments.driver, arguments.start))) + "\n")
