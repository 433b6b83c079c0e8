"""Each row, and what the peers do for it, once on the host driver."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import math
import os
import shutil
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiocuda.driver.host import HostDriver
from tests.benchmarks.c_bound import NO_COMPILER, NO_GPU, build, c_bound
from tests.benchmarks.figures import Measured
from tests.benchmarks.peers import PEERS
from tests.benchmarks.peers.raw import Raw, RawCuda, own_time
from tests.benchmarks.peers.raw_host import RawHost
from tests.benchmarks.rows import ROWS
from tests.benchmarks.setting import open_setting
from tests.benchmarks.turns import metered_loop

#: Smaller than a row's small sizes: this only shows that a row runs.
TINY: dict[str, float] = {
    "bytes": 1 << 20,
    "repeats": 1,
    "warmup": 1,
    "rounds": 1,
    "kernels": 3,
    "streams": 2,
    "series": 2,
    "in_flight": 2,
    "launches": 40,
    "few": 20,
    "every": 16,
    "held": 1e-3,
    "seconds": 1e-4,
    "nbytes": 1 << 16,
    "iterations": 4,
    "burst": 5,
    "buffers": 3,
    "turns": 6,
    "items": 16,
    "waiters": 20,
    "handlers": 3,
    "requests": 2,
    "open_seconds": 0.01,
    "rows": 2,
    "scale": 0.02,
    "copies": 1,
    "runs": 1,
    "slice": 0.001,
    "idle": 1,
    "vertices": 20,
    "colours": 3,
    "replicas": 2,
    "sweeps": 9,
    "points": 64,
    "steps": 11,
}


for _row in ROWS.values():  # not in the time of a test
    importlib.import_module(f"tests.benchmarks.{_row.module}")


#: They start processes of other packages, or kill processes.
HEAVY = {"cluster_dask", "cluster_losses", "service_freeze"}

#: They offer requests at the rate that they measured first, so that needs time for some requests on any machine.
OFFERED = {"service_freeze"}


#: They start worker processes.
STARTING = {"stalls_busy", "stalls_idle"}


def marks(name: str) -> list[pytest.MarkDecorator]:
    if name in HEAVY:
        return [pytest.mark.heavy, pytest.mark.slow]
    return [pytest.mark.slow] if name in STARTING else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in ROWS])
def test_row_measures_on_the_host_driver(name: str) -> None:
    if name in HEAVY:
        pytest.importorskip("uvicorn" if name == "service_freeze" else "distributed")
    row = ROWS[name]
    tiny = row.small if name in OFFERED else TINY
    sizes = {key: tiny.get(key, value) for key, value in row.sizes.items()}
    function = getattr(importlib.import_module(f"tests.benchmarks.{row.module}"), row.function or row.name)
    loop, turns = metered_loop()

    async def run() -> Measured:
        async with open_setting("host", sizes, turns) as setting:
            result = await function(setting)
            assert isinstance(result, Measured)
            return result

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(run())
    assert result.samples
    assert result.baseline
    assert all(math.isfinite(value) for value in [*result.samples, *result.baseline, *result.figures.values()])
    ours = {bound.figure for bound in row.bounds} - {"p50", "ratio"} - ({"c_ratio"} if result.notes else set())
    assert {figure for figure in ours if not figure.startswith("times_")} <= set(result.figures)


class ThreadPeer:
    """A peer over the host driver, which waits in a thread: so the peers' rows are tested without their libraries."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw

    def stream(self) -> Any:
        return self.raw.stream()

    def launch(self, stream: Any, seconds: float) -> None:
        self.raw.launcher(stream, seconds)()

    def submit(self, stream: Any, seconds: float) -> Awaitable[object]:
        self.launch(stream, seconds)
        return asyncio.to_thread(self.raw.synchronize, stream)

    def own_time(self, seconds: float) -> float:
        return own_time(self.raw, seconds)

    def copies(self, direction: str, nbytes: int) -> Callable[[], Awaitable[object]]:
        array, device, stream = np.ones(nbytes, np.uint8), self.raw.device_memory(nbytes), self.stream()
        return lambda: asyncio.to_thread(self.raw.pageable, direction, device, array, stream)

    def service(self, rows: int, width: int, layers: int) -> Callable[[], Awaitable[object]]:
        stream = self.stream()
        return lambda: self.submit(stream, 1e-6 * rows * layers)

    def all_reduce(self, nbytes: int) -> Callable[[], Awaitable[object]]:
        stream = self.raw.stream()
        return lambda: self.submit(stream, 0.0)

    def empty_free(self, nbytes: int) -> Callable[[], object]:
        stream = self.raw.stream()
        return lambda: self.raw.free(stream, self.raw.allocate(stream, nbytes))


#: Beside a busy loop a thread waits 5 ms for the GIL, each time: what the row is about.
SLOW = {"busy_loop"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, row in ROWS.items()
        if any(not PEERS[peer].ours for peer in row.peers)
    ],
)
def test_peers_row_measures_on_the_host_driver(name: str) -> None:
    row = ROWS[name]
    function = getattr(importlib.import_module("tests.benchmarks.peers.rows"), row.function or row.name)
    sizes = {**{key: TINY.get(key, value) for key, value in row.sizes.items()}, "peer_repeats": 2}
    driver = HostDriver()
    loop, turns = metered_loop()
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            result = runner.run(function(ThreadPeer(RawHost(driver)), sizes, turns))
    finally:
        driver.close()
    assert len(result.samples) == 2
    assert all(math.isfinite(value) for value in [*result.samples, *result.figures.values()])


def test_raw_callbacks_write_an_eventfd_and_call_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def launch(stream: int, function: ctypes.c_void_p, argument: int | None) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value or 0)(argument)

    raw, called = object.__new__(RawCuda), list[str]()
    monkeypatch.setattr(raw, "_functions", [], raising=False)
    monkeypatch.setattr(raw, "_launch_host_function", lambda: launch)
    stream = SimpleNamespace(handle=1)
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        raw.callback(stream, descriptor)()
        assert os.eventfd_read(descriptor) == 1
    finally:
        os.close(descriptor)
    raw.host_function(stream, lambda: called.append("called"))()
    assert called == ["called"]


def test_bounds_in_c_can_be_compiled() -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    assert build(compiler).bound_launch is not None


def test_row_says_why_it_has_no_bound_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostDriver()
    try:
        assert c_bound(RawHost(driver)) == NO_GPU
    finally:
        driver.close()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert c_bound(object.__new__(RawCuda)) == NO_COMPILER
