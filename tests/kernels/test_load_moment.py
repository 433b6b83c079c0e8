"""When a kernel is loaded: at a moment without unfinished operations, or 50 ms later. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import aiocuda
from aiocuda import ClosedError, CompileError, Device, DeviceFault, Kernel
from aiocuda.driver.protocol import CompiledKernel, CudaSource, Program
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import SPIN, TRAP, quickly

MS = 1_000_000  # of the nanoseconds that SPIN takes


def fresh(name: str = "fresh", ran: list[str] | None = None) -> Kernel:
    """A kernel that no device has loaded. Each launch appends its name to the list."""
    launches: list[str] = [] if ran is None else ran
    return Kernel(name, source=f"__global__ void {name}();", host=lambda: launches.append(name))


class Noting(SimulatedDriver):
    """Notes when kernels are compiled and loaded, in milliseconds. It has a compiler, which may fail."""

    wants_image = True

    def __init__(self) -> None:
        super().__init__(None)
        self.compiled: dict[str, float] = {}
        self.loaded: dict[str, float] = {}
        self.error: Exception | None = None

    def now_ms(self) -> float:
        return self.now() * 1e3

    def compile(self, device: int, source: CudaSource) -> CompiledKernel:
        self.compiled[source.name] = self.now_ms()
        if self.error is not None:
            raise self.error
        return CompiledKernel(b"", source.name, False)

    def load(self, device: int, program: Program) -> int:
        self.loaded[program.name] = self.now_ms()
        return super().load(device, program)


def run(main: Callable[[Device, Noting], Awaitable[None]]) -> None:
    """Run it on a device that has loaded SPIN and TRAP."""

    async def opened() -> None:
        driver = Noting()
        async with aiocuda.open_device(driver=driver) as device:
            await device.load(SPIN, TRAP)
            await main(device, driver)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())


@pytest.mark.parametrize("by", ["a launch", "a graph", "device.load"])
@pytest.mark.parametrize(("running", "least", "most"), [(0, 0, 0.5), (20, 20, 23), (200, 50, 52)])
def test_load_waits_for_running_work_and_for_at_most_50_ms(by: str, running: int, least: float, most: float) -> None:
    async def main(device: Device, driver: Noting) -> None:
        async with device.stream() as busy, device.stream() as stream:
            if running:
                busy.launch(SPIN, 1, 1, running * MS)
            began, kernel = driver.now_ms(), fresh()
            if by == "a launch":
                await stream.launch(kernel, 1, 1)
            elif by == "a graph":
                async with stream.capture() as graph:
                    stream.launch(kernel, 1, 1)
                await graph
            else:
                await device.load(kernel)
            assert driver.compiled["fresh"] - began < 0.5  # the compiler needs no device
            assert least <= driver.loaded["fresh"] - began < most

    run(main)


def test_several_kernels_are_loaded_at_one_moment() -> None:
    """While a kernel of 10 s runs: three loads after another would take 150 ms."""

    async def main(device: Device, driver: Noting) -> None:
        async with device.stream() as busy:
            busy.launch(SPIN, 1, 1, 10_000 * MS)
            kernels = [fresh(name) for name in ("a", "b", "c")]
            began = driver.now_ms()
            await device.load(*kernels, SPIN, kernels[0])
            assert 50 <= driver.now_ms() - began < 53
            compiled = dict(driver.compiled)
            await device.load(*kernels)
            await device.load()
            assert driver.compiled == compiled

    run(main)


def test_launches_keep_their_order() -> None:
    async def main(device: Device, driver: Noting) -> None:
        ran: list[str] = []
        known, first, second = (fresh(name, ran) for name in ("known", "first", "second"))
        await device.load(known)
        async with device.stream() as busy, device.stream() as stream, device.stream() as other:
            busy.launch(SPIN, 1, 1, 20 * MS)
            for kernel in (first, known, second, first, known):
                stream.launch(kernel, 1, 1)
            await other.launch(known, 1, 1)  # not behind a kernel that is not loaded
            assert ran == ["known"]
            await stream.synchronize()
        assert ran == ["known", "first", "known", "second", "first", "known"]

    run(main)


def test_launch_behind_work_of_its_own_stream_waits_for_it() -> None:
    async def main(device: Device, driver: Noting) -> None:
        async with device.stream() as stream:
            stream.launch(SPIN, 1, 1, 20 * MS)
            began = driver.now_ms()
            await stream.launch(fresh(), 1, 1)
            assert 20 <= driver.loaded["fresh"] - began < driver.now_ms() - began < 23

    run(main)


def test_close_waits_for_a_launch_that_was_accepted() -> None:
    async def main(device: Device, driver: Noting) -> None:
        ran: list[str] = []
        busy, stream = device.stream(), device.stream()
        busy.launch(SPIN, 1, 1, 20 * MS)
        launch = stream.launch(fresh(ran=ran), 1, 1)
        await device.aclose()
        assert ran == ["fresh"]
        assert await launch is None

    run(main)


def test_stream_that_is_left_drops_its_launch() -> None:
    async def main(device: Device, driver: Noting) -> None:
        ran: list[str] = []
        kernel = fresh(ran=ran)
        async with device.stream() as busy:
            busy.launch(SPIN, 1, 1, 20 * MS)
            with pytest.raises(ZeroDivisionError):
                async with device.stream() as stream:
                    launch = stream.launch(kernel, 1, 1)
                    raise ZeroDivisionError
            with pytest.raises(ClosedError):
                await launch
            async with device.stream() as stream:  # the load goes on, for others
                await stream.launch(kernel, 1, 1)
        assert ran == ["fresh"]

    run(main)


def test_cancelled_wait_withdraws_neither_the_launch_nor_the_load() -> None:
    async def main(device: Device, driver: Noting) -> None:
        ran: list[str] = []
        async with device.stream() as busy, device.stream() as stream:
            busy.launch(SPIN, 1, 1, 20 * MS)
            launch = stream.launch(fresh(ran=ran), 1, 1)
            other = fresh("other")
            for waiting in (launch.wait(), device.load(other)):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(waiting, 0.005)
            await launch
            assert ran == ["fresh"]
            await asyncio.sleep(0.05)
            assert set(driver.loaded) >= {"fresh", "other"}

    run(main)


def test_fault_fails_a_launch_that_waits() -> None:
    async def main(device: Device, driver: Noting) -> None:
        busy, stream, faulting = device.stream(), device.stream(), device.stream()
        busy.launch(SPIN, 1, 1, 1000 * MS)
        launch, loading = stream.launch(fresh(), 1, 1), asyncio.create_task(device.load(fresh("other")))
        await asyncio.sleep(0.005)
        with pytest.raises(DeviceFault):
            await faulting.launch(TRAP, 1, 1)
        for waiting in (launch, loading):
            with pytest.raises(DeviceFault):
                await quickly(waiting)
        assert not {"fresh", "other"} & set(driver.loaded)

    run(main)


def test_kernel_that_cannot_be_compiled_waits_for_nothing() -> None:
    async def main(device: Device, driver: Noting) -> None:
        async with device.stream() as busy, device.stream() as stream:
            busy.launch(SPIN, 1, 1, 1000 * MS)
            began = driver.now_ms()
            driver.error = CompileError("no", code=6, call="nvrtcCompileProgram", log="")
            for waiting in (device.load(fresh("one"), fresh("two")), stream.launch(fresh(), 1, 1)):
                with pytest.raises(CompileError, match="no"):
                    await waiting
            assert driver.now_ms() - began < 1
            assert not {"one", "two", "fresh"} & set(driver.loaded)

    run(main)


def test_driver_without_a_compiler_loads_at_the_same_moments() -> None:
    async def main() -> None:
        driver = SimulatedDriver(None)
        async with aiocuda.open_device(driver=driver) as device, device.stream() as busy, device.stream() as stream:
            began = driver.now()
            await stream.launch(fresh(), 1, 1)
            assert driver.now() - began < 0.5e-3
            await device.load(SPIN)
            busy.launch(SPIN, 1, 1, 20 * MS)
            began = driver.now()
            await stream.launch(fresh(), 1, 1)
            assert 20e-3 <= driver.now() - began < 23e-3

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
