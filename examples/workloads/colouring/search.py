"""A search for a colouring: its memory on the device, its steps through a managed context, and what it finds."""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import numpy as np

from aiocuda import ManagedContext, StepConfig

from .kernels import THREADS, blocks, count, judge
from .philox import START, draw, scaled

__all__ = ["BATCH", "Found", "Search", "solve"]

#: Number of sweeps in one step of the context.
BATCH = 8


class Search:
    """Replicas of a colouring that all start with the same random colours.

    A workload defines additional arrays in `tables`, its sweep in `sweep`, and the uploads of a step in `inputs`.

    Attributes
    ----------
    state
        On the device: ``adjacency (n, n)``; for each replica ``counts (replicas, k, n)``, ``colours (replicas, n)`` and
        ``conflicts (replicas,)``; for all ``record (1,)``, the fewest conflicts ever, and ``best (n,)``, its colours.
    """

    def __init__(self, graph, colours, seed, replicas):
        self.graph, self.k, self.seed, self.replicas = graph, colours, seed, replicas
        self.n = graph.vertices
        self.initial = scaled(draw(seed, START, 0, 0, np.arange(self.n))[0], colours).astype(np.int32)
        self.state = {}

    def tables(self):
        """Arrays by name, to be uploaded at the start."""
        return {}

    def memory(self):
        """Additional arrays on the device, by name: shape and dtype. Kernels fill them."""
        return {"counts": ((self.replicas, self.k, self.n), np.int16)}

    def inputs(self, sweeps):
        """Return the arrays to upload for a step of that many sweeps, by name, with the same shapes each time."""
        return {}

    def sweep(self, slot, sweep, row):
        """Enqueue a sweep; ``row`` is its number in its step."""
        raise NotImplementedError

    def step(self, sweeps):
        """Return the configuration of the next step."""
        return StepConfig(self.inputs(sweeps), functools.partial(self.enqueue, sweeps), ["telemetry"])

    def enqueue(self, sweeps, slot):
        state, telemetry = self.state, slot.buffer("telemetry", (BATCH, self.replicas + 1), np.int32)
        results = state["record"], state["best"], telemetry
        for row, sweep in enumerate(sweeps):
            self.sweep(slot, sweep, row)
            last = slot.stream.launch(
                judge, 1, THREADS, state["colours"], state["conflicts"], *results, self.n, self.replicas, row
            )
        return last

    async def begin(self, context):
        """Bring the start to the device."""
        n, k, replicas = self.n, self.k, self.replicas
        conflicts = self.graph.conflicts(self.initial)
        arrays = {
            "adjacency": self.graph.adjacency,
            "colours": np.tile(self.initial, (replicas, 1)),
            "conflicts": np.full(replicas, conflicts, np.int32),
            "record": np.array([conflicts], np.int32),
            "best": self.initial,
            **self.tables(),
        }
        stream = context.stream("upload")
        self.state = state = {name: await stream.upload(array) for name, array in arrays.items()}
        for name, (shape, dtype) in self.memory().items():
            state[name] = stream.empty(shape, dtype)
        await stream.launch(
            count, blocks(n, replicas), THREADS, state["adjacency"], state["colours"], state["counts"], n, k
        )


class Found(NamedTuple):
    """The result of a search."""

    colouring: list[int]  #: the best of all sweeps and replicas
    conflicts: int  #: in it, counted in the graph
    history: list[int]  #: the fewest conflicts of a replica, after each sweep until there were none
    mean: list[float]  #: their mean
    seconds: float
    driver: str
    device: str
    streams_created: int  #: by the driver's own count


async def solve(search, sweeps, *, driver="auto", mode="async"):
    """Sweep until there is a colouring without conflicts, or for a number of sweeps.

    Three steps are in flight, so some steps start after the one that ends the search: they change nothing.
    """
    rows = []

    def solved(telemetry):
        rows.extend([] if telemetry is None else telemetry.outputs["telemetry"])
        return bool(rows) and rows[-1][0] == 0

    async with ManagedContext(driver=driver, asynchronous=mode == "async") as context:
        began = time.perf_counter()
        await search.begin(context)
        for first in range(0, sweeps, BATCH):
            step = search.step(range(first, min(first + BATCH, sweeps)))
            if solved(await context.triple_buffered_step(step)):
                break
        for telemetry in await context.flush():
            solved(telemetry)
        colouring = await context.stream("download").download(search.state["best"])
        seconds = time.perf_counter() - began
        where = context.device.driver.name, context.device.name, context.statistics().streams_created
    table = np.array(rows[:sweeps])
    ended = np.flatnonzero(table[:, 0] == 0)
    table = table[: ended[0] + 1] if ended.size else table
    conflicts = search.graph.conflicts(colouring)
    if conflicts != table[-1, 0]:
        raise RuntimeError(f"the device counts {table[-1, 0]} conflicts, and the colouring has {conflicts}")
    history, mean = table[:, 1:].min(axis=1), table[:, 1:].mean(axis=1)
    return Found(colouring.tolist(), conflicts, history.tolist(), mean.tolist(), seconds, *where)
