"""A replica is killed under load: answered calls per second, in a run of two replicas on the host driver."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Self

import numpy as np

import aiocuda
from aiocuda.cluster import Cluster, ReplicaHandle, current_replica, open_cluster

from .svg import Axis, Page

__all__ = ["Model", "draw"]

REPLICAS, CALLERS = 2, 8
BEFORE_S, AFTER_S = 1.5, 1.5
BIN_S = 0.1
PAUSE_S = 0.02  #: of a caller between two calls, so that the callers leave time to the process that starts


class Model:
    """The class of the replicas."""

    async def __aenter__(self) -> Self:
        self._device = await aiocuda.open_device(driver="host")
        self._stream = self._device.stream()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._device.aclose()

    async def answer(self) -> tuple[int, int]:
        """Copy to the device and back, and return the index and the process of the replica."""
        await self._stream.download(await self._stream.upload(np.ones(1024, np.float32)))
        replica = current_replica()
        assert replica is not None
        return replica.index, os.getpid()


class _Run:
    """The moments of a run in seconds, and the answers of each replica."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.answers: list[tuple[float, int]] = []
        self.killed = self.restarted = self.ended = 0.0

    def now(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self.began

    async def call(self, handle: ReplicaHandle) -> None:
        """Call with short pauses, until the task is cancelled."""
        while True:
            index, _ = await handle.call("answer", retry=True)
            self.answers.append((self.now(), index))
            await asyncio.sleep(PAUSE_S)

    async def lose(self, cluster: Cluster, handle: ReplicaHandle) -> None:
        """Kill the replica with the index 0, and wait until it serves again."""
        index, process = REPLICAS, 0
        while index != 0:
            index, process = await handle.call("answer", retry=True)
        epoch = cluster.statistics().replicas[0].epoch
        os.kill(process, signal.SIGKILL)
        self.killed = self.now()
        while (now := cluster.statistics().replicas[0]).epoch == epoch or now.state != "running":
            await asyncio.sleep(0.01)
        self.restarted = self.now()


async def record() -> _Run:
    """Return the run."""
    async with open_cluster("local", replicas=REPLICAS) as cluster:
        handle = await cluster.spawn(Model)
        run = _Run()
        callers = [asyncio.create_task(run.call(handle)) for _ in range(CALLERS)]
        await asyncio.sleep(BEFORE_S)
        await run.lose(cluster, handle)
        await asyncio.sleep(AFTER_S)
        run.ended = run.now()
        for caller in callers:
            caller.cancel()
        for outcome in await asyncio.gather(*callers, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    return run


def draw() -> str:
    """Return the picture of a run."""
    run = asyncio.run(record())
    bins = [[0] * REPLICAS for _ in range(int(run.ended / BIN_S))]
    for moment, index in run.answers:
        if moment < len(bins) * BIN_S:
            bins[int(moment / BIN_S)][index] += 1
    page = Page(
        "A replica is killed under load",
        f"Answered calls per second of two replicas. One is killed at {run.killed:.1f} s; the other one goes on, and "
        f"the first one serves again at {run.restarted:.1f} s. No call failed.",
        440,
    )
    page.legend(20, 60, [("blue", "replica 1"), ("orange", "replica 0")])
    page.text(250, 60, f"answers per second of {CALLERS} callers", kind="note")
    across = Axis(0, len(bins) * BIN_S, 74, 694)
    most = max(map(sum, bins)) / BIN_S * 1.1
    down = Axis(0, most, 360, 110)
    for value in down.ticks(5):
        page.line((74, down.at(value)), (694, down.at(value)), width=1)
        page.text(66, down.at(value) + 5, f"{value:g}", size=14, anchor="end", kind="note")
    for number, counts in enumerate(bins):
        left, right = across.at(number * BIN_S), across.at((number + 1) * BIN_S)
        below = down.at(0)
        for index, colour in ((1, "blue"), (0, "orange")):
            above = below - (down.at(0) - down.at(counts[index] / BIN_S))
            if counts[index]:
                page.bar(left, above, right - left, below - above, "blue" if colour == "blue" else "orange")
            below = above
    page.axis(across, 110, 360, "time, s")
    for moment, label in (
        (run.killed, f"killed: {run.killed:.1f} s"),
        (run.restarted, f"serves again: {run.restarted:.1f} s"),
    ):
        x = across.at(moment)
        page.line((x, 96), (x, 360), colour="red", width=2)
        page.text(x, 90, label, anchor="middle", bold=True)
    page.text(
        20,
        430,
        f"{len(run.answers)} calls, none failed: a call of the killed replica is repeated on the other one",
        kind="note",
        size=14,
    )
    return page.svg()
