"""The rows about stalls: their calls of CUDA, over bindings that make no call, and what they measure."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from aiocuda.driver.host import HostDriver
from tests.benchmarks.peers.raw_calls import peer_calls, waiting_calls
from tests.benchmarks.peers.raw_host import RawHost
from tests.benchmarks.raw_stalls import FREE, stalls_driver
from tests.benchmarks.rows import ROWS, STALL_LIMITS
from tests.benchmarks.turns import metered_loop
from tests.helpers import PATIENCE


class Bindings:
    """NVIDIA's bindings, without a GPU: a call must exist, and returns a number."""

    def __init__(self) -> None:
        self.driver: Any = pytest.importorskip("cuda.bindings.driver")
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._results = itertools.count(1 << 12)

    def ask(self, call: str, *arguments: Any) -> int:
        assert callable(getattr(self.driver, call))
        self.calls.append((call, arguments))
        return next(self._results)

    def stream(self) -> Any:
        return SimpleNamespace(handle=next(self._results), sync=lambda: None)

    def cubin(self, source: str) -> bytes:
        return source.encode()

    def fill(self, stream: Any, address: int, nbytes: int) -> None:
        self.ask("cuMemsetD8Async", address, 1, nbytes, stream.handle)


#: Calls that give back what others make.
RELEASES = {
    "cuModuleUnload": "cuModuleLoadData",
    "cuMemFreeHost": "cuMemHostAlloc",
    "cuMemHostUnregister": "cuMemHostRegister",
    "cuMemFreeAsync": "cuMemAllocFromPoolAsync",
}


def test_calls_of_cuda_exist_and_give_back_what_they_make() -> None:
    raw: Any = Bindings()
    calls = waiting_calls(raw, 1 / 256)
    prepared = len(raw.calls)
    for name, call in calls.items():
        before = len(raw.calls)
        call()
        assert raw.calls[before][0] == "cuCtxSetCurrent", name
        assert len(raw.calls) > before + 1, name
    assert set(calls) >= FREE
    made = [call for call, _ in raw.calls[prepared:]]
    assert {made.count(end) - made.count(begin) for end, begin in RELEASES.items()} == {0}


def test_calls_of_two_devices_exist() -> None:
    raw: Any = Bindings()
    for call in peer_calls(raw).values():
        call()
    assert [call for call, _ in raw.calls if call != "cuCtxSetCurrent"][-2:] == [
        "cuCtxEnablePeerAccess",
        "cuMemPoolSetAccess",
    ]


class Held(RawHost):
    """A driver in which a call holds the launches of the other threads."""

    def __init__(self, driver: HostDriver) -> None:
        super().__init__(driver)
        self.launching = threading.Event()
        self.release = threading.Event()

    def waiting_calls(self, scale: float) -> Mapping[str, Callable[[], object]]:
        def hold() -> None:
            self.launching.wait(PATIENCE)
            self.release.set()

        def refuse() -> None:
            raise RuntimeError("cuMemPoolCreate answered CUDA_ERROR_NOT_SUPPORTED")

        return {"hold": hold, "pool_free": lambda: None, "pool_trim": refuse}

    def launcher(self, stream: Any, seconds: float) -> Callable[[], None]:
        launch = super().launcher(stream, seconds)
        return launch if seconds else lambda: (self.launching.set(), launch())[1]


def test_each_call_is_timed_and_a_refused_one_is_noted() -> None:
    driver = HostDriver()
    setting: Any = SimpleNamespace(raw=Held(driver), sizes={"seconds": 0.01, "scale": 1.0})
    try:
        measured = asyncio.run(stalls_driver(setting))
    finally:
        driver.close()
    assert setting.raw.release.is_set()  # launches went on while the call waited
    assert {name.removesuffix("_launch_ms") for name in measured.figures} >= {"hold", "pool_free", "free"}
    assert len(measured.samples) == 1  # of the call that does not wait
    assert measured.notes == ["pool_trim: cuMemPoolCreate answered CUDA_ERROR_NOT_SUPPORTED"]


def test_bounds_hold_the_worst_run_of_each_action() -> None:
    for name, without in (("stalls_busy", {"load", "first_launch"}), ("stalls_idle", set[str]())):
        bounds = {bound.figure: bound.at_most for bound in ROWS[name].bounds}
        limits = {action: limit for action, limit in STALL_LIMITS.items() if action not in without}
        assert bounds == {f"worst_{action}_ms": limit for action, limit in limits.items()}


def test_meter_keeps_each_turn_while_it_records() -> None:
    loop, turns = metered_loop()

    async def run() -> list[float]:
        await asyncio.sleep(0)
        turns.record()
        for _ in range(10):
            await asyncio.sleep(0)
        return turns.recorded()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        found = runner.run(run())
    assert len(found) == 11
    assert all(turn >= 0 for turn in found)
