"""An object of each public class with `aclose`, and work of it: the rows of the table of lives."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    ClosedError,
    Device,
    ManagedContext,
    Pipeline,
    Stage,
    StaleHandleError,
    Stream,
    StreamGroup,
    StreamPool,
    TripleBuffer,
)
from aiocuda.cluster import open_cluster
from aiocuda.data import DataLoader, to_device
from aiocuda.serving import MicroBatcher
from tests.helpers import SPIN

__all__ = ["DEVICES", "HELD", "ROWS", "SOON", "Life", "Row"]

#: Seconds for which the work of a row keeps the device busy, and less than that.
HELD, SOON = 0.15, 0.03


@dataclasses.dataclass
class Life:
    """An object, and work of it that takes `HELD` seconds."""

    thing: Any
    work: Callable[[], Awaitable[Any]]

    async def begin(self) -> asyncio.Future[Any]:
        """Begin the work, and return its end."""
        task = asyncio.ensure_future(_quietly(self.work()))
        for _ in range(4):
            await asyncio.sleep(0)
        return task


async def _quietly(work: Awaitable[Any]) -> None:
    with contextlib.suppress(ClosedError, asyncio.CancelledError):
        await work


Make = Callable[[Device], contextlib.AbstractAsyncContextManager[Life]]


@dataclasses.dataclass(frozen=True)
class Row:
    """The expectations of one class.

    Attributes
    ----------
    make
        Makes the object, not entered, in an asynchronous context manager.
    drains
        Whether a cancelled `aclose` first waits for the accepted work; else it leaves at once.
    ended
        The error of an object that is entered again after its end.
    bound
        Whether it belongs to an event loop also while none of its work runs.
    any_loop
        Whether any loop may end it.
    must_enter
        Whether its `aclose` needs an ``__aenter__`` before.
    handlers
        How many handlers time out at once.
    """

    make: Make
    drains: bool = False
    ended: type[Exception] = ClosedError
    bound: bool = True
    any_loop: bool = False
    must_enter: bool = False
    handlers: int = 20


#: Of classes that use a device, and of those that open devices.
ROWS: dict[str, Row] = {}
DEVICES: dict[str, Row] = {}


def row(
    name: str, table: dict[str, Row] = ROWS, **options: Any
) -> Callable[[Callable[[Device], AsyncIterator[Life]]], None]:
    """Add the row of a class."""

    def add(make: Callable[[Device], AsyncIterator[Life]]) -> None:
        table[name] = Row(contextlib.asynccontextmanager(make), **options)

    return add


def _spin(stream: Stream) -> Callable[[], Awaitable[Any]]:
    return lambda: stream.launch(SPIN, 1, 1, int(HELD * 1e9)).wait()


@row("Stream")
async def stream(device: Device) -> AsyncIterator[Life]:
    stream = device.stream()
    yield Life(stream, _spin(stream))


@row("GroupStream")
async def group_stream(device: Device) -> AsyncIterator[Life]:
    group = StreamGroup(device, 1)
    yield Life(group[0], _spin(group[0]))


@row("LeasedStream", ended=StaleHandleError)
async def leased_stream(device: Device) -> AsyncIterator[Life]:
    async with StreamPool(device, maximum=1) as pool:
        lease = await pool.stream()
        yield Life(lease, _spin(lease))


@row("StreamGroup")
async def stream_group(device: Device) -> AsyncIterator[Life]:
    group = StreamGroup(device, 2)
    yield Life(group, _spin(group[0]))


@row("StreamPool")
async def stream_pool(device: Device) -> AsyncIterator[Life]:
    pool = StreamPool(device, maximum=2)
    lease = await pool.stream()
    yield Life(pool, _spin(lease))


@row("AsyncCoordinator")
async def async_coordinator(device: Device) -> AsyncIterator[Life]:
    coordinator = AsyncCoordinator(device)

    async def work() -> None:
        await coordinator.compute(SPIN, 1, 1, int(HELD * 1e9))

    yield Life(coordinator, work)


@row("Pipeline", drains=True, bound=False)
async def pipeline(device: Device) -> AsyncIterator[Life]:
    stage = Stage("work", lambda slot: slot.stream.launch(SPIN, 1, 1, int(HELD * 1e9)))
    pipeline = Pipeline(device, [stage], depth=1)
    yield Life(pipeline, lambda: pipeline.execute_iteration(None))


@row("TripleBuffer")
async def triple_buffer(device: Device) -> AsyncIterator[Life]:
    ring = TripleBuffer(1, buffers={"x": (4, np.float32)}, device=device)

    async def work() -> None:
        async with device.stream() as stream, ring.slot() as slot:
            operation = stream.launch(SPIN, 1, 1, int(HELD * 1e9))
            slot.enter("uploading", until=operation)
            await operation

    yield Life(ring, work)


@row("MicroBatcher", drains=True, must_enter=True)
async def micro_batcher(device: Device) -> AsyncIterator[Life]:
    async def answer(batch: Any) -> list[Any]:
        await batch.stream.launch(SPIN, 1, 1, int(HELD * 1e9))
        return [None] * batch.size

    batcher = MicroBatcher(answer, max_batch_size=1, device=device)
    yield Life(batcher, lambda: batcher.submit(1))


@row("DataLoader", drains=True, must_enter=True)
async def data_loader(device: Device) -> AsyncIterator[Life]:
    samples = np.zeros((64, 4), np.float32)
    loader = DataLoader(device, samples, batch_size=4)

    async def work() -> None:
        async for batch in loader:
            batch.stream.launch(SPIN, 1, 1, int(HELD * 1e9))
            await asyncio.sleep(HELD)

    yield Life(loader, work)


@row("DeviceBatches", drains=True)
async def device_batches(device: Device) -> AsyncIterator[Life]:
    batches = to_device([np.zeros(4, np.float32)] * 8, device)

    async def work() -> None:
        async for batch in batches:
            batch.stream.launch(SPIN, 1, 1, int(HELD * 1e9))
            await asyncio.sleep(HELD)

    yield Life(batches, work)


@row("Device", DEVICES, drains=True, bound=False, any_loop=True)
async def device(device: Device) -> AsyncIterator[Life]:
    device = await aiocuda.open_device(driver="host")
    yield Life(device, _spin(device.stream()))


@row("ManagedContext", DEVICES, drains=True, bound=False, must_enter=True)
async def managed_context(device: Device) -> AsyncIterator[Life]:
    context = ManagedContext(driver="host")

    async def work() -> None:
        await context.stream("compute").launch(SPIN, 1, 1, int(HELD * 1e9)).wait()

    yield Life(context, work)


class Replica:
    """What the replica of a cluster runs."""

    def wait(self) -> None:
        time.sleep(HELD)  # noqa: TID251 - the replica is busy for this time


class _OpenedCluster:
    """A cluster, entered as programs do."""

    def __init__(self) -> None:
        self._opening = open_cluster("local", replicas=1)
        self._cluster: Any = None

    async def __aenter__(self) -> Self:
        self._cluster = await self._opening.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opening.__aexit__(kind, error, trace)

    async def aclose(self) -> None:
        await self._cluster.aclose()

    async def work(self) -> None:
        handle = await self._cluster.spawn(Replica)
        await handle.call("wait")


@row("Cluster", DEVICES, drains=True, must_enter=True, handlers=4)
async def cluster(device: Device) -> AsyncIterator[Life]:
    opened = _OpenedCluster()
    yield Life(opened, opened.work)
