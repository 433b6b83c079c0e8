"""The end of `DataLoader` and of `to_device`: it runs once, every caller waits for it, and nothing is left."""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from aiocuda import BusyError, ClosedError, Device, Kernel, WrongLoopError, open_device
from aiocuda.data import DataLoader, to_device
from tests.helpers import LATCH, in_thread, quickly, turns, until

pytestmark = pytest.mark.asyncio


class Opened:
    """A loader of nine batches, whose source waits at batch 1 until ``gate`` is set, and its first batch."""

    def __init__(self, kind: str, device: Device) -> None:
        self.device = device
        self.gate = threading.Event()
        self.waits = threading.Event()  # set when the source waits
        self.loader: Any
        if kind == "to_device":
            self.loader = to_device(self, device)
        else:
            fields = {"x": ((4,), np.float32)}
            self.loader = DataLoader(device, range(9), fields=fields, decode=self.decode, workers=1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.read, range(9))

    def read(self, number: int) -> dict[str, Any]:
        if number == 1:
            self.waits.set()
            self.gate.wait(LATCH)
        return {"x": np.full(4, number, np.float32)}

    def decode(self, sample: int, out: Any) -> None:
        out["x"][...] = self.read(sample)["x"]

    @property
    def left(self) -> tuple[int, int]:
        """The streams and the bytes that are open."""
        return self.device.statistics().streams, self.device.memory.statistics().live_bytes

    async def begin(self) -> Any:
        """Enter the loader, take the first batch, and wait until the source waits. Return the iterator."""
        await self.loader.__aenter__()
        batches = aiter(self.loader)
        assert (await anext(batches)).number == 0
        await until(self.waits.is_set)
        return batches


KINDS = ("DataLoader", "to_device")


def _wait_for(event: threading.Event) -> None:
    assert event.wait(LATCH)


@pytest_asyncio.fixture(params=KINDS)
async def opened(request: pytest.FixtureRequest, device: Device) -> AsyncIterator[Opened]:
    opened = Opened(request.param, device)
    yield opened
    opened.gate.set()
    await opened.loader.aclose()


async def test_every_caller_waits_for_the_end(opened: Opened) -> None:
    before = opened.left
    await opened.begin()
    closing = [asyncio.ensure_future(opened.loader.aclose()) for _ in range(3)]
    await turns(50)
    assert not any(task.done() for task in closing)
    closing.append(asyncio.ensure_future(opened.loader.__aexit__(None, None, None)))
    await turns(50)
    assert not any(task.done() for task in closing)
    opened.gate.set()
    await quickly(asyncio.gather(*closing))
    assert opened.left == before
    await opened.loader.aclose()


async def test_a_second_end_under_a_timeout_does_not_touch_the_first(opened: Opened) -> None:
    before = opened.left
    await opened.begin()
    first = asyncio.ensure_future(opened.loader.aclose())
    await turns(5)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await opened.loader.aclose()
    assert not first.done()
    opened.gate.set()
    await quickly(first)
    assert opened.left == before


async def test_the_first_end_under_a_timeout_is_completed(opened: Opened) -> None:
    before = opened.left
    await opened.begin()
    asyncio.get_running_loop().call_later(0.03, opened.gate.set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await opened.loader.aclose()
    assert opened.left == before


async def test_another_loop_changes_nothing(opened: Opened) -> None:
    before = opened.left
    batches = await opened.begin()
    opened.gate.set()
    for call in (opened.loader.aclose, lambda: anext(batches)):
        with pytest.raises(WrongLoopError, match=r"<(DataLoader|DeviceBatches) .* belongs to another event loop"):
            await asyncio.to_thread(in_thread, call)
    assert (await quickly(anext(batches))).number == 1
    await quickly(opened.loader.aclose())
    assert opened.left == before


async def test_a_task_that_waits_gets_its_error_before_the_end(opened: Opened) -> None:
    batches = await opened.begin()
    request = asyncio.ensure_future(anext(batches))
    await turns(5)
    closing = asyncio.ensure_future(opened.loader.aclose())
    with pytest.raises(ClosedError, match="closed while a task waited"):
        await quickly(request)
    assert not closing.done()
    opened.gate.set()
    await quickly(closing)


@pytest.mark.parametrize("ahead", range(4))
async def test_a_batch_that_arrives_during_the_end_is_freed(ahead: int) -> None:
    """The source wakes the task that waits for an upload, which has ended, a few turns after the call of `aclose`."""
    gate, uploaded = threading.Event(), threading.Event()
    hold = Kernel("hold", source='extern "C" __global__ void hold() {}', host=lambda: _wait_for(gate))
    tell = Kernel("tell", source='extern "C" __global__ void tell() {}', host=uploaded.set)
    async with open_device(driver="host") as device:
        before = Opened("DataLoader", device).left
        source_goes_on = asyncio.get_running_loop().create_future()

        async def source() -> AsyncIterator[Any]:
            for _ in range(4):
                yield np.zeros(4, np.float32)
            await source_goes_on
            yield np.zeros(4, np.float32)

        async with DataLoader(device, source(), batch_size=1, prefetch=2) as loader:
            batches = aiter(loader)
            first = await anext(batches)
            gate.set()
            for kernel in (hold, tell):
                await first.stream.launch(kernel, 1, 1)  # loads it
            gate.clear()
            uploaded.clear()
            first.stream.launch(hold, 1, 1)  # the upload of batch 3, on the same stream, comes after it
            await anext(batches)
            await anext(batches)
            request = asyncio.ensure_future(anext(batches))
            await until(lambda: "record" in repr(first.stream.tail))
            first.stream.launch(tell, 1, 1)
            await turns(5)
            closing = asyncio.ensure_future(loader.aclose())
            gate.set()
            _wait_for(uploaded)  # the loop does not turn meanwhile
            await turns(ahead)
            if not source_goes_on.done():  # the end has cancelled it
                source_goes_on.set_result(None)
            await quickly(closing)
            await asyncio.wait({request})
            assert isinstance(request.exception(), ClosedError | None)
            assert Opened("DataLoader", device).left == before


async def test_an_exception_in_the_block_leaves_nothing(opened: Opened) -> None:
    before = opened.left
    opened.gate.set()
    with pytest.raises(ZeroDivisionError):
        async with opened.loader as batches:
            async for _ in batches:
                _ = 1 / 0
    assert opened.left == before


@pytest.mark.parametrize("kind", KINDS)
async def test_handlers_that_time_out_leave_nothing(device: Device, kind: str) -> None:
    before = Opened(kind, device).left

    async def handle() -> None:
        each = Opened(kind, device)
        each.gate.set()
        async with asyncio.timeout(0.01), each.loader as batches:
            async for _ in batches:
                await asyncio.get_running_loop().create_future()

    for outcome in await quickly(asyncio.gather(*(handle() for _ in range(20)), return_exceptions=True)):
        assert isinstance(outcome, TimeoutError)
    assert Opened(kind, device).left == before


async def test_an_end_waits_for_the_end_of_an_iteration(opened: Opened) -> None:
    """The next iteration ends the one that was left by ``break``, and `aclose` comes meanwhile."""
    before = opened.left
    await opened.begin()
    request = asyncio.ensure_future(anext(aiter(opened.loader)))
    await turns(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        closing = asyncio.ensure_future(opened.loader.aclose())
        await turns(50)
        assert not closing.done()
        opened.gate.set()
        await quickly(closing)
        with pytest.raises(ClosedError):
            await quickly(request)
    assert opened.left == before


@pytest.mark.slow
async def test_a_loader_that_is_closed_while_it_opens_stays_closed(device: Device) -> None:
    before = device.statistics().streams
    fields = {"x": ((4,), np.float32)}
    loader = DataLoader(device, range(9), fields=fields, decode=_zeros, executor="process", workers=1)
    opening = asyncio.ensure_future(loader.__aenter__())
    await turns(5)
    await loader.aclose()
    with pytest.raises(ClosedError, match="closed while it was being opened"):
        await quickly(opening)
    assert device.statistics().streams == before
    assert loader.worker_pids == []


def _zeros(sample: int, out: Any) -> None:
    out["x"][...] = 0


async def test_a_source_that_fails_at_the_end_leaves_nothing(device: Device) -> None:
    """The first caller gets the error."""

    async def source() -> AsyncIterator[Any]:
        try:
            while True:
                yield np.zeros(4)
        finally:
            await asyncio.sleep(0)
            raise OSError("the connection is gone")

    before = device.statistics().streams
    batches = to_device(source(), device)
    await anext(batches)
    first, second = (asyncio.ensure_future(batches.aclose()) for _ in range(2))
    with pytest.raises(OSError, match="the connection is gone"):
        await quickly(first)
    await quickly(second)
    assert device.statistics().streams == before


async def test_to_device_cannot_be_used_after_its_end(device: Device) -> None:
    batches = to_device([np.zeros(4)] * 3, device)
    async with batches:
        iteration = aiter(batches)
        await anext(iteration)
    with pytest.raises(ClosedError, match="has been closed: make others by to_device"):
        await batches.__aenter__()
    with pytest.raises(ClosedError, match="has been closed"):
        async for _ in batches:
            pass
    with pytest.raises(StopAsyncIteration):
        await anext(iteration)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in Python 3.12")
@pytest.mark.parametrize("kind", ["DataLoader", "to_device"])
async def test_end_while_an_eager_task_reads_the_source(device: Device, kind: str) -> None:
    """The reads of the first samples end at once: the read that waits was begun inside of them."""
    waits, closed = asyncio.Event(), asyncio.Event()

    async def source() -> AsyncIterator[dict[str, Any]]:
        try:
            for number in range(2):
                yield {"x": np.full(4, number, np.float32)}
            waits.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    try:
        loader: Any = to_device(source(), device) if kind == "to_device" else DataLoader(device, source())
        async with loader:
            assert (await quickly(anext(aiter(loader)))).number == 0
            await quickly(waits.wait())
            tasks = asyncio.all_tasks()
        assert closed.is_set()
        await turns(2)
        assert len(asyncio.all_tasks()) == 1 < len(tasks)
    finally:
        loop.set_task_factory(before)


@pytest.mark.parametrize("kind", ["DataLoader", "to_device"])
@pytest.mark.parametrize("where", ["in a read", "in a read that is cancelled", "at its end"])
async def test_source_that_closes_its_loader_is_refused(device: Device, kind: str, where: str) -> None:
    """The end would wait for the source, which waits for the end."""
    refused: list[BusyError] = []
    waits = asyncio.Event()

    async def close() -> None:
        with pytest.raises(BusyError, match="close it outside of them") as caught:
            await loader.aclose()
        refused.append(caught.value)

    async def source() -> AsyncIterator[dict[str, Any]]:
        try:
            for number in range(9):
                if number == 1 and where == "in a read":
                    await close()
                if number == 1 and where == "in a read that is cancelled":
                    waits.set()
                    await asyncio.Event().wait()
                yield {"x": np.full(4, number, np.float32)}
        finally:
            if where != "in a read":
                await close()

    loader: Any = to_device(source(), device) if kind == "to_device" else DataLoader(device, source())
    before = device.statistics().streams
    async with loader:
        batches = aiter(loader)
        assert (await quickly(anext(batches))).number == 0
        if where == "in a read":
            assert (await quickly(anext(batches))).number == 1
        elif where == "in a read that is cancelled":
            await quickly(waits.wait())
        ending = asyncio.ensure_future(loader.aclose())
        await quickly(asyncio.shield(ending))
    assert len(refused) == 1
    assert device.statistics().streams == before
