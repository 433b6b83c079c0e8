"""Closing: every object refuses new work from the first line of `aclose`, also while tasks go on enqueueing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import ClosedError, Device, ManagedContext, Operation, Pipeline, Stage, Stream, StreamGroup
from aiocuda.context import StepConfig
from aiocuda.coordination import AsyncCoordinator
from aiocuda.driver import DriverName
from aiocuda.errors import DrainTimeoutWarning
from aiocuda.memory._staging import SMALL_BYTES
from aiocuda.pool import StreamPool
from aiocuda.testing import SimulatedLoop
from tests.helpers import PATIENCE, SPIN, turns

#: Seconds of the driver's time for which the device is held. In virtual time a turn of the loop takes 3 µs.
HELD = {"host": 0.01, "simulated": 0.0002}

#: More bytes than one chunk of a staged copy.
LARGE = np.arange(SMALL_BYTES + 1, dtype=np.uint8)
SMALL = np.arange(64, dtype=np.float32)


class BodyError(Exception):
    """Raised by the body of a block."""


#: One enqueueing method. If its result is awaitable, it ends when the device has finished.
Verb = Callable[[], Awaitable[Any]]


@dataclasses.dataclass
class Closing:
    """An object with `aclose`, and its enqueueing methods."""

    thing: Any  # with `aclose`, `__aenter__` and `__aexit__`
    verbs: list[Verb]
    hold: Callable[[float], Any]  # keeps it busy for this many seconds


def _held(stream: Stream) -> Callable[[float], Any]:
    return lambda seconds: stream.launch(SPIN, 1, 1, int(seconds * 1e9))


def _verbs(stream: Stream) -> list[Verb]:
    async def launch() -> Operation[None]:
        return stream.launch(SPIN, 1, 1, 10)

    async def upload() -> Operation[Any]:
        return stream.upload(LARGE)

    async def record() -> Operation[Any]:
        return stream.record().operation

    return [launch, upload, record]


Opened = contextlib.AbstractAsyncContextManager[Closing]
CASES: dict[str, Callable[[Device], Opened]] = {}


def _case(make: Callable[[Device], AsyncIterator[Closing]]) -> None:
    CASES[make.__name__] = contextlib.asynccontextmanager(make)


@_case
async def stream(device: Device) -> AsyncIterator[Closing]:
    one = device.stream()
    yield Closing(one, _verbs(one), _held(one))


@_case
async def imported_stream(device: Device) -> AsyncIterator[Closing]:
    async with device.stream() as owner:
        one = Stream.from_handle(device, owner)
        yield Closing(one, _verbs(one)[::2], _held(one))


@_case
async def stream_group(device: Device) -> AsyncIterator[Closing]:
    group = StreamGroup(device, 3)
    group.add_dependency(1, 0)

    async def barrier() -> Operation[None]:
        return group.barrier()

    yield Closing(group, [*_verbs(group[0]), *_verbs(group[1]), barrier], _held(group[0]))


@_case
async def stream_of_a_group(device: Device) -> AsyncIterator[Closing]:
    async with StreamGroup(device, 2) as group:
        yield Closing(group[0], _verbs(group[0]), _held(group[0]))


@_case
async def stream_pool_whose_leases_are_not_returned(device: Device) -> AsyncIterator[Closing]:
    pool = StreamPool(device, maximum=2)
    lease, alone = await pool.stream(), await pool.stream(exclusive=True)

    async def again() -> Operation[None]:
        async with pool.stream() as leased:
            return leased.launch(SPIN, 1, 1, 10)

    yield Closing(pool, [*_verbs(lease), *_verbs(alone), again], _held(alone))


@_case
async def lease_of_a_pool(device: Device) -> AsyncIterator[Closing]:
    async with StreamPool(device, maximum=1) as pool:
        lease = await pool.stream()
        yield Closing(lease, _verbs(lease), _held(lease))


def _registered(coordinator: AsyncCoordinator) -> list[Verb]:
    async def upload() -> Any:
        return coordinator.upload(SMALL)

    async def chain() -> Any:
        return coordinator.download(coordinator.upload(LARGE))

    async def host() -> Any:
        return coordinator.host(len, SMALL, after=coordinator.compute(SPIN, 1, 1, 10))

    async def block() -> Any:
        async with coordinator.operation("kernel") as bracket:
            assert bracket.stream is not None
            bracket.stream.launch(SPIN, 1, 1, 10)
        return bracket

    return [upload, chain, host, block]


@_case
async def coordinator(device: Device) -> AsyncIterator[Closing]:
    one = AsyncCoordinator(device, max_in_flight=4, streams=2)
    yield Closing(one, _registered(one), lambda seconds: one.compute(SPIN, 1, 1, int(seconds * 1e9)))


@_case
async def coordinator_whose_stream_is_used(device: Device) -> AsyncIterator[Closing]:
    one = AsyncCoordinator(device, max_in_flight=4)
    yield Closing(one, _verbs(one.compute_stream), _held(one.compute_stream))


@_case
async def device_with_streams(device: Device) -> AsyncIterator[Closing]:
    one = device.stream()
    streams: list[Stream] = []

    async def another() -> Operation[None]:
        streams.append(device.stream())
        return streams[-1].launch(SPIN, 1, 1, 10)

    async def offload() -> int:
        return await device.offload(len, SMALL)

    yield Closing(device, [*_verbs(one), another, offload], _held(one))


@_case
async def device_with_a_coordinator(device: Device) -> AsyncIterator[Closing]:
    one, own = AsyncCoordinator(device, max_in_flight=4), device.stream()

    async def on_its_own() -> Any:
        return one.compute(SPIN, 1, 1, 10, stream=own)

    verbs = [*_registered(one)[:3], on_its_own]
    yield Closing(device, verbs, lambda seconds: one.compute(SPIN, 1, 1, int(seconds * 1e9)))


@_case
async def device_with_a_pool(device: Device) -> AsyncIterator[Closing]:
    pool = StreamPool(device, maximum=2)
    lease = await pool.stream()

    async def again() -> Operation[None]:
        async with pool.stream() as leased:
            return leased.launch(SPIN, 1, 1, 10)

    yield Closing(device, [*_verbs(lease), again], _held(lease))


@_case
async def pipeline(device: Device) -> AsyncIterator[Closing]:
    one = Pipeline(device, [Stage("work", lambda slot: slot.stream.launch(SPIN, 1, 1, slot.item))], depth=2)

    async def item() -> None:
        await one.execute_iteration(10)

    yield Closing(one, [item] * 3, lambda seconds: asyncio.create_task(one.execute_iteration(int(seconds * 1e9))))


@_case
async def context(device: Device) -> AsyncIterator[Closing]:
    one = await ManagedContext(driver=device.driver)
    one.device.drain_timeout = device.drain_timeout
    lease = await one.pool.stream()
    carried = one.pipeline([Stage("work", lambda slot: slot.stream.launch(SPIN, 1, 1, 10))])

    async def purpose() -> Operation[None]:
        return one.stream("telemetry").launch(SPIN, 1, 1, 10)

    async def item() -> None:
        await carried.execute_iteration(None)

    compute = one.stream("compute")
    verbs = [*_verbs(compute), *_registered(one.coordinator)[:3], *_verbs(lease), purpose, item]
    yield Closing(one, verbs, _held(compute))


@_case
async def context_with_steps(device: Device) -> AsyncIterator[Closing]:
    one = await ManagedContext(driver=device.driver)
    one.device.drain_timeout = device.drain_timeout

    def spin(nanoseconds: int) -> StepConfig:
        return StepConfig({}, lambda step: step.stream.launch(SPIN, 1, 1, nanoseconds), [])

    async def step() -> None:
        await one.triple_buffered_step(spin(10))

    yield Closing(
        one, [step] * 3, lambda seconds: asyncio.create_task(one.triple_buffered_step(spin(int(seconds * 1e9))))
    )


class Busy:
    """Runs a task for each method, which calls it again and again, perhaps until it is refused."""

    def __init__(self, verbs: list[Verb], stops: bool) -> None:
        self.accepted: list[Any] = []
        self.closing = False
        self.begun = self.late = self.refused = 0
        self.tasks = [asyncio.create_task(self._enqueue(verb, stops)) for verb in verbs]

    async def _enqueue(self, verb: Verb, stops: bool) -> None:
        while True:
            late = self.closing
            self.begun += 1
            try:
                self.accepted.append(await verb())
                self.late += late
            except ClosedError:
                self.refused += 1
                if stops:
                    return
                await asyncio.sleep(1e-3)
            except aiocuda.BusyError:  # the queue of an imported stream is full
                pass
            await asyncio.sleep(0)

    async def close(self, thing: Any) -> None:
        self.closing = True
        await thing.aclose()

    async def end(self) -> list[BaseException]:
        """Stop all tasks. Return the errors of the accepted work."""
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        found = await asyncio.gather(*(_ended(one) for one in self.accepted), return_exceptions=True)
        return [error for error in found if isinstance(error, BaseException)]


async def _ended(one: Any) -> None:
    if inspect.isawaitable(one):
        await one


@contextlib.asynccontextmanager
async def _opened(driver: DriverName, name: str, patience: float) -> AsyncIterator[Closing]:
    async with aiocuda.open_device(driver=driver, max_in_flight=8) as device:
        device.drain_timeout = patience
        await device.load(SPIN)
        async with CASES[name](device) as case:
            yield case


def _run(driver: DriverName, main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=SimulatedLoop if driver == "simulated" else None) as runner:
        runner.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("stops", [True, False], ids=["until_it_is_refused", "for_ever"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("driver", ["host", "simulated"])
def test_it_ends_beside_tasks_that_enqueue(driver: DriverName, name: str, stops: bool) -> None:
    async def main() -> None:
        async with _opened(driver, name, HELD[driver] / 10) as case:  # a drain timeout that has no effect here
            held = case.hold(HELD[driver])
            await asyncio.sleep(0)
            busy = Busy(case.verbs, stops)
            await turns(6)
            assert busy.begun
            await busy.close(case.thing)
            assert held.done()
            assert await busy.end() == []
            assert busy.late == 0
            assert busy.refused >= 1

    _run(driver, main)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("driver", ["host", "simulated"])
def test_left_by_an_exception_it_ends_within_the_drain_timeout(driver: DriverName, name: str) -> None:
    """Even if the device is held and other tasks go on enqueueing."""
    patience = 0.02

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DrainTimeoutWarning)
            async with _opened(driver, name, patience) as case:
                case.hold(4 * patience)
                await asyncio.sleep(0)
                if not isinstance(case.thing, ManagedContext):  # it is entered already
                    await case.thing.__aenter__()
                busy = Busy(case.verbs, stops=True)
                await turns(6)
                began = loop.time()
                try:
                    with contextlib.suppress(BodyError):  # a coordinator raises it again, with earlier failures
                        await case.thing.__aexit__(BodyError, BodyError(), None)
                finally:
                    took = loop.time() - began
                    await busy.end()
        if driver == "simulated":
            assert took < patience + 0.002

    _run(driver, main)
