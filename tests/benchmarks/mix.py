"""The mix of work that compares the strategies of a stream pool. The same seed gives the same mix.

There are twice as many tasks as streams, each with Poisson arrivals of its own. A task waits until an item is due,
leases a stream, enqueues the item and awaits it; items that become due in this time start later. One item in four
copies 8 MB to the device. The others are kernels: 70 % of 100 µs, 25 % of 1 ms, 5 % of 10 ms. One in ten of the
shortest is critical.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import aiocuda

SEED = 2025
KERNELS = ((0.70, 100e-6), (0.25, 1e-3), (0.05, 10e-3))
COPY_BYTES = 8_000_000
COPIES = 0.25  #: of all items
CRITICAL = 0.1  #: of the shortest kernels
GAP = 1.5e-3  #: seconds between two items of a task, on average: what keeps half of the streams busy


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A kernel of so many seconds, or a copy, which has none."""

    at: float  #: seconds after the beginning
    seconds: float
    critical: bool = False


def mix(
    streams: int, items: int, gap: float = GAP, copies: float = COPIES, seed: int = SEED, critical: float = CRITICAL
) -> list[list[Item]]:
    """Items of each task, in order; the mean time between two of a task's is ``gap`` seconds."""
    chance = random.Random(f"mix {seed}")
    tasks = []
    for _ in range(2 * streams):
        at, own = 0.0, []
        for _ in range(items):
            at += chance.expovariate(1 / gap)
            if chance.random() < copies:
                own.append(Item(at, 0.0))
                continue
            (seconds,) = chance.choices([seconds for _, seconds in KERNELS], [share for share, _ in KERNELS])
            own.append(Item(at, seconds, chance.random() < critical and seconds == KERNELS[0][1]))
        tasks.append(own)
    return tasks


@dataclasses.dataclass(slots=True)
class Played:
    """Seconds from asking for a stream to the end of the item; and of the whole."""

    all: list[float] = dataclasses.field(default_factory=list)
    critical: list[float] = dataclasses.field(default_factory=list)
    makespan: float = 0.0


async def play(
    pool: aiocuda.StreamPool,
    tasks: Sequence[Sequence[Item]],
    do: Callable[[aiocuda.Stream, Item], aiocuda.Operation[Any]],
) -> Played:
    """Give the mix to a pool."""
    loop = asyncio.get_running_loop()
    played, began = Played(), loop.time()

    async def task(items: Sequence[Item]) -> None:
        for item in items:
            await asyncio.sleep(began + item.at - loop.time())
            asked = loop.time()
            workload = "compute" if item.seconds else "memory"
            async with pool.stream(workload, priority="high" if item.critical else "normal") as stream:
                await do(stream, item)
            took = loop.time() - asked
            played.all.append(took)
            if item.critical:
                played.critical.append(took)

    async with asyncio.TaskGroup() as group:
        for items in tasks:
            group.create_task(task(items))
    played.makespan = loop.time() - began
    return played
