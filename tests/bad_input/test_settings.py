"""Rows that are taken, though they look odd, and rows that need a setting of their own: a thread, a fault, a fork.

Each test bears its rows' numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    ClosedError,
    Device,
    DeviceBuffer,
    DeviceFault,
    ForkedProcessError,
    InvalidArgumentError,
    InvalidTypeError,
    Kernel,
    NoEventLoopError,
    StaleHandleError,
    Stream,
    StreamBarrier,
    StreamPool,
    WrongLoopError,
)
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Driver
from aiocuda.testing import SimulatedDriver
from tests.bad_input.case import KERNEL, World, open_world, settled
from tests.helpers import TRAP, in_a_child, in_thread, quickly

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWN = pytest.mark.parametrize("name", ["host", "simulated"])


class Index:
    def __index__(self) -> int:
        return 7


def made(name: str) -> HostDriver | SimulatedDriver:
    return HostDriver() if name == "host" else SimulatedDriver()


@contextlib.contextmanager
def driver_of(name: str) -> Any:
    driver = made(name)
    yield cast("Driver", driver)
    if isinstance(driver, HostDriver):
        driver.close()


# -- rows that are taken ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0, (0,), (3, 0)])
async def test_row_2_and_11_nothing_at_all_needs_no_driver(each: World, shape: Any) -> None:
    before = each.calls
    buffer = each.stream.empty(shape)
    assert (buffer.nbytes, each.calls) == (0, before)
    await quickly(each.stream.copy(buffer, np.empty(buffer.shape, np.float32)))
    assert (await quickly(each.stream.download(buffer))).shape == buffer.shape
    moved = each.driver.statistics()["calls"] - before
    await quickly(each.stream.copy(each.buffer, np.zeros(16, np.float32)))
    assert each.calls - before > moved  # bytes do need it


@pytest.mark.parametrize("size", [np.int64(7), Index(), np.array(7)])
async def test_row_5_objects_with_index_are_sizes(each: World, size: Any) -> None:
    assert each.stream.empty(size).shape == (7,)


@pytest.mark.parametrize(("shape", "items"), [((), 1), ((0,), 0), ((2, 0, 3), 0)])
async def test_row_19_and_20_any_array_of_a_users_own_goes_there_and_back(
    each: World, shape: tuple[int, ...], items: int
) -> None:
    given = np.full(shape, 7, np.int16)
    back = await quickly(each.stream.download(await quickly(each.stream.upload(given))))
    assert (back.shape, back.size, back.tobytes()) == (shape, items, given.tobytes())


async def test_row_21_source_cannot_go_while_it_is_read(each: World) -> None:
    given = bytearray(64)
    operation = each.stream.upload(given)
    with pytest.raises(BufferError):
        given.extend(b"more")
    await quickly(operation)
    del operation
    given.extend(b"more")


async def test_row_23_writable_memory_is_a_target(each: World) -> None:
    await quickly(each.stream.fill(each.buffer, 1))
    target = bytearray(64)
    await quickly(each.stream.copy(memoryview(target), each.buffer))
    assert target == np.ones(16, np.float32).tobytes()


async def test_row_34_free_with_work_in_flight_is_deferred(each: World) -> None:
    buffer = each.stream.empty(16)
    each.other.wait(each.stream)
    each.other.fill(buffer, 5)
    result = each.other.download(buffer)
    buffer.free()
    assert (await quickly(result) == 5).all()


async def test_row_59_the_same_result_each_time(each: World) -> None:
    operation = each.stream.download(each.buffer)
    results = [await quickly(operation) for _ in range(5)]
    assert all(result is results[0] for result in results)
    gone = each.stream.download(each.buffer)
    gone.abandon()
    for _ in range(3):
        with pytest.raises(ClosedError):
            await quickly(gone)


async def test_row_61_barrier_over_nothing_and_over_one_twice(each: World) -> None:
    assert await quickly(StreamBarrier(1).wait()) == 0
    before = each.stream.statistics().operations
    await quickly(StreamBarrier(1).wait(each.stream))
    once = each.stream.statistics().operations - before
    await quickly(StreamBarrier(1).wait(each.stream, each.stream))
    assert each.stream.statistics().operations - before == 2 * once


async def test_row_65_infinity_is_no_limit(each: World) -> None:
    assert await quickly(StreamBarrier(1).wait(each.stream, timeout=float("inf"))) >= 0
    async with StreamPool(each.device) as pool, await quickly(pool.any_ready(timeout=float("inf"))) as stream:
        await quickly(stream.synchronize())


async def test_row_72_a_handle_equals_itself_and_nothing_else(each: World) -> None:
    gone = each.stream.empty(64)
    gone.free()
    pairs = [
        (each.stream, each.other),
        (each.buffer, each.buffer[:]),
        (gone, each.stream.empty(64)),  # at its address, where that is used again
        (each.stream.record(), each.stream.record()),
        (each.stream.synchronize(), each.stream.synchronize()),
    ]
    for one, another in pairs:
        assert one == one
        assert one != another
        assert len({one, another, one}) == 2
    with pytest.raises(TypeError, match="download"):
        assert np.zeros(16, np.float32) == each.buffer


async def test_row_72_a_driver_is_not_copied(each: World) -> None:
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(InvalidTypeError, match="belongs to this process"):
            copied(each.driver)


# -- rows with a setting of their own --------------------------------------------------------------------------------


@OWN
async def test_row_38_stream_that_its_owner_has_destroyed(name: str) -> None:
    async with open_world(name) as world:
        owner = world.device.stream()
        handle = owner._queue.handle  # not by `lend`: a stream that was lent is never destroyed
        await owner.aclose()
        await world.device.drain()
        with pytest.raises(StaleHandleError, match=f"{handle} is not a stream"):
            Stream.from_handle(world.device, handle)


async def idle(world: World) -> None:
    """Wait until nothing but the test calls the driver. CUDA's is also that of objects that earlier tests have left."""
    gc.collect()
    await quickly(world.device.drain())
    await settled(world.device)


async def test_row_56_awaited_in_another_loop(each: World) -> None:
    await idle(each)
    operation = each.stream.synchronize()
    before = each.calls
    with pytest.raises(WrongLoopError, match="left belongs to another event loop"):
        in_thread(operation.wait)
    assert each.calls == before
    await quickly(operation)


@pytest.mark.parametrize(
    "verb",
    [
        lambda world: world.stream.fill(world.buffer, 1),
        lambda world: world.stream.empty(4),
        lambda world: world.stream.record(),
        lambda world: world.stream.launch(KERNEL, 1, 32, world.buffer, 16, 1.0),
        lambda world: world.device.stream(),
    ],
)
async def test_row_57_without_a_running_loop(each: World, verb: Callable[[World], object]) -> None:
    reached = []
    for _ in range(3):  # the watchdog may free what an earlier test has dropped, in the meantime
        await idle(each)
        before = each.calls
        with pytest.raises(NoEventLoopError, match=r"call from a coroutine.* asyncio\.run_coroutine_threadsafe\("):
            await asyncio.to_thread(verb, each)
        reached.append(each.calls - before)
    assert min(reached) == 0, reached


@OWN
async def test_row_58_on_a_loop_that_has_been_closed(name: str) -> None:
    async def opened() -> tuple[Device, Stream, DeviceBuffer]:
        device = await aiocuda.open_device(driver=driver)
        left = device.stream(name="left")
        await settled(device)
        return device, left, left.empty(4)

    def loops_of_its_own() -> None:
        device, left, buffer = asyncio.run(opened())
        before = driver.statistics()["calls"]

        async def there() -> None:
            left.fill(buffer, 1)

        for use in (lambda: left.fill(buffer, 1), lambda: asyncio.run(there())):
            with pytest.raises(ClosedError, match="the event loop of left has been closed"):
                use()
        assert driver.statistics()["calls"] == before
        asyncio.run(device.aclose())

    with driver_of(name) as driver:
        await asyncio.to_thread(loops_of_its_own)


@OWN
@pytest.mark.parametrize("bit_by_bit", [False, True])
async def test_row_60_a_host_implementation_that_calls_the_library(name: str, bit_by_bit: bool) -> None:
    """A driver without threads runs it on the loop's own."""
    seen: list[BaseException] = []
    async with open_world(name) as world:

        def call() -> None:
            verbs: list[Callable[[], object]] = [
                lambda: world.stream.fill(world.buffer, 1),
                lambda: world.stream.empty(4),
                lambda: world.device.stream(),
                lambda: world.buffer.free(),
                lambda: world.stream.record(),
            ]
            for verb in verbs:
                with pytest.raises(RuntimeError) as caught:
                    verb()
                seen.append(caught.value)
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()

        def naps(x: Any) -> Any:
            call()
            yield 1e-6
            call()

        twin = naps if bit_by_bit else lambda x: call()
        kernel = Kernel("calls", source="__global__ void calls(float* x);", host=twin)
        await world.device.load(kernel)
        operation = world.stream.launch(kernel, 1, 1, world.buffer)
        before = world.stream.statistics().operations
        await quickly(operation)
        assert len(seen) == (10 if bit_by_bit else 5)
        assert {type(error) for error in seen} == {NoEventLoopError}
        assert world.stream.statistics().operations == before
        assert not world.buffer.freed
        assert asyncio.get_running_loop().is_running()


async def test_row_63_stage_that_raises_and_stage_that_never_ends(each: World) -> None:
    def raises(slot: aiocuda.Slot) -> None:
        raise LookupError("in the stage")

    async def never(slot: aiocuda.Slot) -> None:
        await asyncio.Event().wait()

    with pytest.raises(LookupError, match="in the stage") as caught:
        await quickly(aiocuda.Pipeline(each.device, [aiocuda.Stage("bad", raises)]).execute_iteration(1))
    assert any("bad" in note for note in caught.value.__notes__)
    pipeline = aiocuda.Pipeline(each.device, [aiocuda.Stage("never", never)])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await pipeline.execute_iteration(1)
    assert pipeline.ring.busy == 0


@OWN
async def test_row_68_a_copy_between_devices_is_never_silent(name: str) -> None:
    async with open_world(name) as world:
        await quickly(world.stream.fill(world.buffer, 3))
        there = world.distant.empty(16)
        await quickly(world.distant.copy(there, world.buffer))
        assert (await quickly(world.distant.download(there)) == 3).all()


@OWN
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
async def test_row_69_any_use_in_a_forked_child(name: str) -> None:
    async with open_world(name) as world:
        operation = world.stream.synchronize()
        assert in_a_child(lambda: ", ".join(_refusals(world))) == ""
        await quickly(operation)  # the parent goes on
        await quickly(world.stream.fill(world.buffer, 1))


def _refusals(world: World) -> Iterator[str]:
    """The calls that were not refused correctly."""

    async def there() -> None:
        world.stream.fill(world.buffer, 1)

    uses: dict[str, Callable[[], object]] = {
        "fill": lambda: world.stream.fill(world.buffer, 1),
        "fill in a loop of its own": lambda: asyncio.run(there()),
        "empty": lambda: world.stream.empty(4),
        "synchronize": lambda: world.stream.synchronize(),
        "stream": lambda: world.device.stream(),
        "free": lambda: world.buffer.free(),
        "pinned": lambda: world.device.pinned(4),
    }
    for name, use in uses.items():
        before = world.driver._calls  # type: ignore[attr-defined]
        try:
            use()
        except ForkedProcessError:
            if world.driver._calls != before:  # type: ignore[attr-defined]
                yield f"{name} called the driver"
        except BaseException as error:  # noqa: BLE001 - told to the parent
            yield f"{name}: {error!r}"
        else:
            yield f"{name} was taken"


@OWN
async def test_row_70_any_use_after_a_fault(name: str) -> None:
    with driver_of(name) as driver:
        async with aiocuda.open_device(driver=driver) as device:
            stream = device.stream()
            buffer = stream.empty(16)
            with pytest.raises(DeviceFault) as first:
                await quickly(stream.launch(TRAP, 1, 1))
            before = driver.statistics()["calls"]
            for verb in (
                lambda: stream.fill(buffer, 1),
                lambda: stream.empty(4),
                lambda: stream.record(),
                lambda: stream.synchronize(),
                lambda: stream.upload(np.zeros(4)),
                lambda: device.stream(),
                lambda: device.unified(4),
            ):
                with pytest.raises(DeviceFault) as later:
                    verb()
                assert (later.value.code, str(later.value)) == (first.value.code, str(first.value))
                assert later.value is not first.value
            assert driver.statistics()["calls"] == before


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AIOCUDA_DRIVER", "abc"),
        ("AIOCUDA_DRIVER", "host "),
        ("AIOCUDA_CHECK", "abc"),
        ("AIOCUDA_CHECK", "-1"),
        ("AIOCUDA_WARN", "abc"),
        ("AIOCUDA_WARN", "2"),
        ("AIOCUDA_ASYNC", "abc"),
    ],
)
async def test_row_75_garbage_in_the_environment(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidArgumentError, match=f"{variable}='{value}'"):
        await aiocuda.ManagedContext()
