"""Rows about the programs of `examples/workloads`: what their asynchronous mode gains, with the same results."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Any

from tests.examples.workloads import load

from .figures import Measured
from .setting import Setting

#: Runs a workload in a mode, and returns its seconds and its result.
Run = Callable[[str], Awaitable[tuple[float, object]]]


async def workload_annealing(setting: Setting) -> Measured:
    """Milliseconds of a sweep over 32 colourings of a random graph, with three steps of eight sweeps in flight.

    Baseline: the synchronous mode, in which each operation ends before the next one begins.
    """
    return await _both_modes(setting, "sweeps", _colouring(setting, "annealing", "Annealing"))


async def workload_conflict_repair(setting: Setting) -> Measured:
    """The same, of the program `conflict_repair.py`."""
    return await _both_modes(setting, "sweeps", _colouring(setting, "conflict_repair", "ConflictRepair"))


async def workload_reservoir(setting: Setting) -> Measured:
    """The same, of the program `reservoir.py`."""
    return await _both_modes(setting, "sweeps", _colouring(setting, "reservoir", "Reservoir"))


async def workload_quantum(setting: Setting) -> Measured:
    """Milliseconds of a time step of a wave function in two dimensions, which is measured every ten steps."""
    quantum = load("quantum")

    async def run(mode: str) -> tuple[float, object]:
        found = await quantum.main(
            argparse.Namespace(
                points=setting.count("points"), dimensions=2, dt=0.02, steps=setting.count("steps"), every=10, seed=1,
                driver=setting.device.driver.name, mode=mode,
            )
        )  # fmt: skip
        return found["seconds"], (found["state"], found["history"])

    return await _both_modes(setting, "steps", run)


def _colouring(setting: Setting, module: str, name: str) -> Run:
    """Return the run of a program that searches for a colouring with too few colours: it makes every sweep."""
    make: Any = getattr(load(module), name)
    graph, solve = load("colouring.dimacs").gnp(setting.count("vertices"), 0.5, 1), load("colouring.search").solve

    async def run(mode: str) -> tuple[float, object]:
        search = make(graph, setting.count("colours"), 1, setting.count("replicas"))
        found = await solve(search, setting.count("sweeps"), driver=setting.device.driver.name, mode=mode)
        return found.seconds, (found.colouring, found.history)

    return run


async def _both_modes(setting: Setting, count: str, run: Run) -> Measured:
    measured = Measured([])
    await run("async")  # compiles the kernels
    for _ in range(setting.count("repeats")):
        (seconds, found), (sync_seconds, expected) = await run("async"), await run("sync")
        if found != expected:
            raise RuntimeError("the two modes have different results")
        measured.samples.append(seconds * 1e3 / setting.count(count))
        measured.baseline.append(sync_seconds * 1e3 / setting.count(count))
    return measured
