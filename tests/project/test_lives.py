"""The table of lives: how each public class with `aclose` ends, in seven columns.

A new class with `aclose` needs a row. Each cell asserts what happens, how long it takes, and that no stream, event or
byte is left in the device, and no thread or descriptor after it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import importlib
import inspect
import os
import pkgutil
import re
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, ClosedError, Device, StaleHandleError, WrongLoopError
from aiocuda.data import SyncBatches, sync_loader
from aiocuda.driver import DriverName
from aiocuda.lowlevel import resources_of
from aiocuda.testing import SimulatedLoop
from tests.helpers import PATIENCE, SPIN, quickly, until
from tests.lives.rows import DEVICES, HELD, ROWS, SOON, Life

pytestmark = pytest.mark.filterwarnings(
    "ignore::aiocuda.errors.DrainTimeoutWarning", "ignore::aiocuda.errors.CleanupWarning"
)

ALL = {**ROWS, **DEVICES}

#: A cluster starts processes.
HEAVY: dict[str, Any] = {name: pytest.mark.heavy if name == "Cluster" else () for name in DEVICES}


class Counts(NamedTuple):
    """What a device has for its objects."""

    streams: int
    events: int  #: that are in use
    memory: int  #: bytes


def counts(device: Device) -> Counts:
    statistics, leases = device.statistics(), resources_of(device).device_state.leases
    return Counts(statistics.streams, statistics.events - leases.idle, device.memory.statistics().live_bytes)


def own_threads() -> collections.Counter[str]:
    names = [thread.name for thread in threading.enumerate()]
    return collections.Counter(name for name in names if name.startswith("aiocuda"))


def descriptors() -> int:
    """The open descriptors, without pipes: ports keep theirs for the next loop, since notifiers are never destroyed."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # that of this iteration
            count += not os.readlink(entry).startswith("pipe:")
    return count


@contextlib.asynccontextmanager
async def opened(driver: DriverName = "host") -> AsyncIterator[Device]:
    """A device. At the end, no thread and no descriptor is left of it, and before, nothing of its objects."""
    threads, files = own_threads(), descriptors()
    async with aiocuda.open_device(driver=driver) as device:
        before = counts(device)
        yield device
        await device.drain()
        gc.collect()
        await settles(lambda: counts(device) == before, lambda: f"{before} has become {counts(device)}")
    await settles(lambda: not own_threads() - threads, lambda: f"threads are left: {own_threads() - threads}")
    await settles(lambda: descriptors() <= files, lambda: f"{files} descriptors have become {descriptors()}")


async def settles(condition: Callable[[], bool], text: Callable[[], str]) -> None:
    """Wait until a condition holds."""
    with contextlib.suppress(AssertionError):
        await until(condition)
    assert condition(), text()


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
            try:
                each = getattr(module, name)
            except ImportError:  # an exporter imports its library when it is first used
                continue
            if inspect.isclass(each) and hasattr(each, "aclose"):
                found.setdefault(each, info.name)
    return found


#: Classes whose rows are elsewhere, or are those of another class.
ELSEWHERE = {
    "CheckedStream": "Stream",
    "StreamView": "it is closed with its stream",
    "PipelineRun": "tests/pipeline/test_leaving.py",
}


#: The cells of one column. In a column of 20 objects, those that open devices or processes are heavy.
TABLE = pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=HEAVY[name]) for name in DEVICES)])
HANDLED = pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.heavy) for name in DEVICES)])


def test_each_class_has_a_row() -> None:
    names = {each.__name__ for each in _classes()}
    assert names == set(ALL) | ELSEWHERE.keys()


@TABLE
@pytest.mark.asyncio
async def test_second_end_waits_for_the_first(name: str) -> None:
    async with opened() as device, ALL[name].make(device) as life:
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
        await quickly(work)  # accepted, or refused with `ClosedError`


@TABLE
def test_end_under_a_timeout(name: str) -> None:
    """In virtual time, an end that does not drain takes less time than the work."""
    drains = ALL[name].drains

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with opened("host" if drains else "simulated") as device:
            await device.load(SPIN)
            async with ALL[name].make(device) as life:
                await _enter(name, life)
                await life.begin()
                began = loop.time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SOON):
                        await life.thing.aclose()
                assert drains or loop.time() - began < HELD

    with asyncio.Runner(loop_factory=None if drains else SimulatedLoop) as runner:
        runner.run(main())


@TABLE
@pytest.mark.asyncio
async def test_exception_in_the_block(name: str) -> None:
    async with opened() as device:
        async with ALL[name].make(device) as life:
            with pytest.raises(ZeroDivisionError):
                async with life.thing:
                    await life.begin()
                    raise ZeroDivisionError
            with pytest.raises(ALL[name].ended):
                async with life.thing:
                    pass


@TABLE
@pytest.mark.asyncio
async def test_entered_again_after_the_end(name: str) -> None:
    async with opened() as device, ALL[name].make(device) as life:
        async with life.thing:
            pass
        with pytest.raises(ALL[name].ended):
            await life.thing.__aenter__()
        again = pytest.raises(StaleHandleError) if ALL[name].ended is StaleHandleError else contextlib.nullcontext()
        with again:
            await life.thing.aclose()


@TABLE
@pytest.mark.asyncio
async def test_end_from_another_loop(name: str) -> None:
    """It raises and changes nothing: the object works, and can be closed in its own loop."""
    async with opened() as device:
        async with ALL[name].make(device) as life:
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
            assert [type(error) for error in found] == ([] if ALL[name].any_loop else [WrongLoopError])
            await life.thing.aclose()
            await asyncio.wait({work}, timeout=PATIENCE)


@TABLE
def test_end_after_the_loop_was_closed(name: str) -> None:
    """The object's end raises, as in any other loop; the end of the device in the new loop leaves nothing."""
    kept: list[Any] = []

    async def first() -> None:
        device = await aiocuda.open_device(driver="host")
        stack = contextlib.AsyncExitStack()
        life = await stack.enter_async_context(ALL[name].make(device))
        await _enter(name, life)
        await life.begin()
        kept.extend((device, stack, life))

    async def second() -> None:
        device, _, life = kept
        refused = pytest.raises((ClosedError, WrongLoopError)) if ALL[name].bound else contextlib.nullcontext()
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
        gc.collect()  # with the warnings of what was left open


@HANDLED
@pytest.mark.asyncio
async def test_handlers_that_time_out(name: str) -> None:
    async with opened() as device:

        async def handler() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SOON), ALL[name].make(device) as life, life.thing:
                    await life.begin()
                    await asyncio.sleep(10 * PATIENCE)

        await quickly(asyncio.gather(*(handler() for _ in range(ALL[name].handlers))))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("GroupStream", "LeasedStream")])
@pytest.mark.asyncio
async def test_one_warning_if_it_is_never_closed(name: str) -> None:
    async with opened() as device:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            stack = contextlib.AsyncExitStack()
            life = await stack.enter_async_context(ROWS[name].make(device))
            await _enter(name, life)
            if name == "Pipeline":
                await life.thing.__aenter__()
            work = await life.begin()
            await asyncio.wait({work}, timeout=0.3)
            work.cancel()
            await asyncio.wait({work})
            await device.drain()
            del life, work, stack
            gc.collect()
            await asyncio.sleep(0.01)
            gc.collect()
        texts = [str(each.message) for each in found if issubclass(each.category, ResourceWarning)]
        assert len(texts) == 1, texts
        assert re.match(r"unclosed .*, opened at .*rows\.py:\d+: use `async with .*`|.*test_lives", texts[0], re.DOTALL)
        await device.aclose()


async def _enter(name: str, life: Life) -> None:
    if ALL[name].must_enter:
        await life.thing.__aenter__()


# -- the loader of threads without a loop ----------------------------------------------------------------------------


def _batches() -> SyncBatches:
    return sync_loader(list(np.zeros((8, 4), np.float32)), driver="host", batch_size=2)


def test_sync_batches_end_once() -> None:
    batches = _batches()
    with batches:
        assert sum(1 for _ in batches) == 4
        batches.close()
        batches.close()
    batches.close()
    with pytest.raises(ClosedError, match="has been closed: make another one"), batches:
        pass
    with pytest.raises(ClosedError):
        next(iter(batches))
    assert not [name for name in own_threads() if "sync" in name]


def test_sync_batches_that_are_left_by_an_exception() -> None:
    batches = _batches()
    with pytest.raises(ZeroDivisionError), batches:
        next(iter(batches))
        raise ZeroDivisionError
    with pytest.raises(ClosedError), batches:
        pass
    assert not [name for name in own_threads() if "sync" in name]


def test_sync_batches_that_two_threads_close() -> None:
    batches = _batches().__enter__()
    next(iter(batches))
    threads = [threading.Thread(target=batches.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert not [name for name in own_threads() if "sync" in name]


@pytest.mark.parametrize("name", ["Stream", "StreamGroup", "StreamPool"])
@pytest.mark.asyncio
async def test_streams_that_are_lent_are_not_closed(name: str) -> None:
    """The end waits for the work of the streams, and the borrower may still enqueue."""
    async with opened() as device, ROWS[name].make(device) as life:
        thing = life.thing
        stream = thing[0] if name == "StreamGroup" else thing
        if name == "StreamPool":
            stream = next(place.stream for place in thing._places)
        async with stream.lend():
            with pytest.raises(BusyError, match="is lent: leave the"):
                await thing.aclose()
            assert not stream.closed
            with pytest.raises(ZeroDivisionError):  # what an exception leaves is closed after the loan
                async with thing:
                    raise ZeroDivisionError
        assert stream.closed
