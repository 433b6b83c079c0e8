"""The table of lives: how each public class with `aclose` ends, in seven columns.

A new class with `aclose` needs a row. Each cell asserts what happens, how long it takes, and that no stream is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import pkgutil
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    ClosedError,
    Device,
    Pipeline,
    Stage,
    StaleHandleError,
    Stream,
    StreamGroup,
    StreamPool,
    WrongLoopError,
)
from aiocuda.data import DataLoader, to_device
from aiocuda.serving import MicroBatcher
from tests.helpers import SPIN, until

pytestmark = pytest.mark.filterwarnings("ignore::aiocuda.errors.DrainTimeoutWarning")

#: Seconds for which the work of a row keeps the device busy, and less than that.
HELD, SOON = 0.15, 0.03

HANDLERS = 20


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
    """

    make: Make
    drains: bool = False
    ended: type[Exception] = ClosedError
    bound: bool = True


ROWS: dict[str, Row] = {}


def row(name: str, **options: Any) -> Callable[[Callable[[Device], AsyncIterator[Life]]], None]:
    """Add the row of a class."""

    def add(make: Callable[[Device], AsyncIterator[Life]]) -> None:
        ROWS[name] = Row(contextlib.asynccontextmanager(make), **options)

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


@row("MicroBatcher", drains=True)
async def micro_batcher(device: Device) -> AsyncIterator[Life]:
    async def answer(batch: Any) -> list[Any]:
        await batch.stream.launch(SPIN, 1, 1, int(HELD * 1e9))
        return [None] * batch.size

    batcher = MicroBatcher(answer, max_batch_size=1, device=device)
    yield Life(batcher, lambda: batcher.submit(1))


@row("DataLoader", drains=True)
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


def _opened() -> Any:
    return aiocuda.open_device(driver="host")


def _classes() -> dict[type, str]:
    """The public classes with `aclose`, with the name of a module that exports them."""
    found: dict[type, str] = {}
    for info in pkgutil.walk_packages(aiocuda.__path__, "aiocuda."):
        if any(part.startswith("_") for part in info.name.split(".")):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # of a library that is not installed
            continue
        for name in getattr(module, "__all__", ()):
            each = getattr(module, name)
            if inspect.isclass(each) and hasattr(each, "aclose"):
                found.setdefault(each, info.name)
    return found


#: Classes whose rows are elsewhere, or are those of another class.
ELSEWHERE = {
    "CheckedStream": "Stream",
    "StreamView": "it is closed with its stream",
    "PipelineRun": "tests/pipeline/test_leaving.py",
    "Device": "tests/project/test_closing.py",
    "ManagedContext": "tests/context/test_context.py",
    "Cluster": "tests/cluster/test_cluster.py",
}


def test_each_class_has_a_row() -> None:
    names = {each.__name__ for each in _classes()}
    assert names == set(ROWS) | ELSEWHERE.keys()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.asyncio
async def test_second_end_waits_for_the_first(name: str) -> None:
    async with _opened() as device, ROWS[name].make(device) as life:
        await _enter(name, life)
        work = await life.begin()
        first = asyncio.create_task(life.thing.aclose())
        await asyncio.sleep(0)
        second = asyncio.create_task(life.thing.aclose())
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)
        assert first.done(), "the second call has ended before the first one"
        assert done
        await asyncio.gather(first, second)
        await asyncio.wait_for(work, 2)  # accepted, or refused with `ClosedError`


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.asyncio
async def test_end_under_a_timeout(name: str) -> None:
    loop = asyncio.get_running_loop()
    async with _opened() as device:
        before = device.statistics().streams
        async with ROWS[name].make(device) as life:
            await _enter(name, life)
            await life.begin()
            began = loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SOON):
                    await life.thing.aclose()
            took = loop.time() - began
            if not ROWS[name].drains:
                assert took < HELD
            assert took < 2
        await until(lambda: device.statistics().streams == before, "the streams")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.asyncio
async def test_exception_in_the_block(name: str) -> None:
    async with _opened() as device:
        before = device.statistics().streams
        async with ROWS[name].make(device) as life:
            with pytest.raises(ZeroDivisionError):
                async with life.thing:
                    await life.begin()
                    raise ZeroDivisionError
            with pytest.raises(ROWS[name].ended):
                async with life.thing:
                    pass
        await until(lambda: device.statistics().streams == before, "the streams")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.asyncio
async def test_entered_again_after_the_end(name: str) -> None:
    async with _opened() as device, ROWS[name].make(device) as life:
        async with life.thing:
            pass
        with pytest.raises(ROWS[name].ended):
            await life.thing.__aenter__()
        again = pytest.raises(StaleHandleError) if ROWS[name].ended is StaleHandleError else contextlib.nullcontext()
        with again:
            await life.thing.aclose()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.asyncio
async def test_end_from_another_loop(name: str) -> None:
    """It raises and changes nothing: the object works, and can be closed in its own loop."""
    async with _opened() as device:
        before = device.statistics().streams
        async with ROWS[name].make(device) as life:
            await _enter(name, life)
            work = await life.begin()
            found: list[BaseException] = []

            def close() -> None:
                try:
                    asyncio.run(life.thing.aclose())
                except BaseException as error:  # noqa: BLE001 - the test looks at it
                    found.append(error)

            thread = threading.Thread(target=close)
            thread.start()
            await asyncio.to_thread(thread.join)
            assert [type(error) for error in found] == [WrongLoopError]
            await life.thing.aclose()
            await asyncio.wait({work}, timeout=2)
        await until(lambda: device.statistics().streams == before, "the streams")


@pytest.mark.parametrize("name", ROWS)
def test_end_after_the_loop_was_closed(name: str) -> None:
    """The object's end raises, as in any other loop; the end of the device in the new loop leaves nothing."""
    kept: list[Any] = []

    async def first() -> None:
        device = await _opened()
        stack = contextlib.AsyncExitStack()
        life = await stack.enter_async_context(ROWS[name].make(device))
        await _enter(name, life)
        await life.begin()
        kept.extend((device, stack, life))

    async def second() -> None:
        device, _, life = kept
        refused = pytest.raises((ClosedError, WrongLoopError)) if ROWS[name].bound else contextlib.nullcontext()
        with refused:
            await life.thing.aclose()
        await device.aclose()
        assert device.statistics().streams == 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the device and its objects were left open
        for main in (first, second):
            with asyncio.Runner() as runner:
                runner.run(main())
        kept.clear()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.asyncio
async def test_handlers_that_time_out(name: str) -> None:
    async with _opened() as device:
        before = device.statistics().streams
        threads = threading.active_count()

        async def handler() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SOON), ROWS[name].make(device) as life, life.thing:
                    await life.begin()
                    await asyncio.sleep(10)

        await asyncio.wait_for(asyncio.gather(*(handler() for _ in range(HANDLERS))), 10)
        await until(lambda: device.statistics().streams == before, "the streams")
        await until(lambda: threading.active_count() <= threads + 2 * HANDLERS, "the threads")


async def _enter(name: str, life: Life) -> None:
    if name in ("MicroBatcher", "DataLoader"):
        await life.thing.__aenter__()
