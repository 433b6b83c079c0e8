"""E8, E9, P18: bytes that a failed operation should have written are not read before they are replaced."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    Device,
    DeviceBuffer,
    DeviceFault,
    DriverError,
    Pipeline,
    SkippedError,
    Slot,
    Stage,
)
from aiocuda.coordination import Node
from aiocuda.coordination._dependencies import MOST_UNDELIVERED
from aiocuda.driver.host import HostDriver
from aiocuda.memory._accesses import Ranges
from tests.coordination.graphs import BLEND, BUMP, ITEMS, BodyError
from tests.helpers import PATIENCE, TRAP, Peer, Reports, jobs_done, open_peer, quickly, until

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)
DRIVERS = ["host", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest_asyncio.fixture(params=DRIVERS)
async def device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """A device of each driver."""
    async with aiocuda.open_device(driver=request.param) as opened:
        yield opened


def empty(coordinator: AsyncCoordinator) -> DeviceBuffer:
    return coordinator.compute_stream.empty(ITEMS, np.uint32)


async def fail(coordinator: AsyncCoordinator, *writes: Any, reads: Any = ()) -> None:
    """An operation that should have written these buffers fails, and this task reads the failure."""
    with pytest.raises(BodyError):
        async with coordinator.operation("kernel", description="the first", reads=reads, writes=writes):
            raise BodyError("body")


async def poisoned(coordinator: AsyncCoordinator, value: int = 1) -> DeviceBuffer:
    """A buffer that holds a value, and that an operation should have overwritten."""
    buffer = await coordinator.upload(value * ONES)
    await fail(coordinator, buffer)
    return buffer


async def assert_skipped(node: Any) -> None:
    with pytest.raises(SkippedError, match="'the first' failed before it: body") as caught:
        await quickly(node)
    assert isinstance(caught.value.__cause__, BodyError)
    assert node.state == "skipped"


async def assert_holds(coordinator: AsyncCoordinator, buffer: DeviceBuffer, value: int) -> None:
    np.testing.assert_array_equal(await quickly(coordinator.download(buffer)), np.full(buffer.shape, value))


# Bytes that become poisoned


async def test_bytes_of_a_failed_operation_are_not_read_by_the_task_that_saw_the_failure(
    coordinator: AsyncCoordinator,
) -> None:
    buffer = await poisoned(coordinator)
    for _ in range(3):  # however often the failure is read
        await assert_skipped(coordinator.download(buffer))
    await coordinator.drain()
    await assert_skipped(coordinator.download(buffer))
    await asyncio.create_task(assert_skipped_later(coordinator, buffer))


async def assert_skipped_later(coordinator: AsyncCoordinator, buffer: DeviceBuffer) -> None:
    await assert_skipped(coordinator.download(buffer))


async def test_bytes_of_a_skipped_operation_are_poisoned(coordinator: AsyncCoordinator) -> None:
    """Its other arguments are, too: what it was to write of them was not written."""
    first = await poisoned(coordinator)
    second = await coordinator.upload(ONES)
    await assert_skipped(coordinator.compute(BLEND, 1, 32, second, first, first, ITEMS, writes=[second]))
    await coordinator.drain()
    await assert_skipped(coordinator.download(second))


async def test_bytes_of_an_upload_that_the_driver_refuses_are_poisoned() -> None:
    async with open_peer() as (peer, device), AsyncCoordinator(device) as coordinator:
        up = coordinator.upload(ONES)
        await up
        peer.refuse("upload")
        refused = coordinator.upload(2 * ONES, up.buffer)
        with pytest.raises(DriverError):
            await quickly(refused)
        with pytest.raises(SkippedError) as caught:
            await quickly(coordinator.download(up))
        assert isinstance(caught.value.__cause__, DriverError)
        await coordinator.upload(3 * ONES, up.buffer)
        await assert_holds(coordinator, up.buffer, 3)
        np.testing.assert_array_equal(await quickly(coordinator.download(refused)), 3 * ONES)  # it names the buffer


async def test_bytes_of_a_withdrawn_operation_are_poisoned(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        buffer = await coordinator.upload(ONES)
        gate = asyncio.Event()
        node = coordinator.upload(2 * ONES, buffer, after=coordinator.host(gate.wait))
        assert node.abandon()
        gate.set()
        await coordinator.drain()
        with pytest.raises(SkippedError, match="was abandoned"):
            await quickly(coordinator.download(buffer))


async def test_targets_of_a_kernel_are_poisoned_if_its_upload_has_no_room() -> None:
    with Peer(HostDriver(memory=1 << 20)) as peer:
        async with aiocuda.open_device(driver=peer.driver) as device, AsyncCoordinator(device) as coordinator:
            target = await coordinator.upload(ONES)
            large = coordinator.upload(np.zeros(1 << 21, np.uint32))
            kernel = coordinator.compute(BLEND, 1, 32, target, large, large, ITEMS, writes=[target])
            with pytest.raises(aiocuda.DeviceOutOfMemory):
                await quickly(large)
            with pytest.raises(SkippedError):
                await quickly(kernel)
            with pytest.raises(SkippedError):
                await quickly(coordinator.download(target))
            with pytest.raises(aiocuda.InvalidTypeError, match="takes 4 arguments, 1 given"):
                coordinator.compute(BLEND, 1, 32, large)


async def test_an_abandoned_result_does_not_poison(coordinator: AsyncCoordinator) -> None:
    """Work that a stream has accepted runs."""
    up = coordinator.upload(ONES)
    up.abandon()
    await coordinator.drain()
    await assert_holds(coordinator, up.buffer, 1)


async def test_bytes_that_were_only_read_are_not_poisoned(coordinator: AsyncCoordinator) -> None:
    buffer = await coordinator.upload(ONES)
    await fail(coordinator, reads=[buffer])
    await assert_holds(coordinator, buffer, 1)


async def test_other_slices_are_not_poisoned(coordinator: AsyncCoordinator) -> None:
    buffer = await coordinator.upload(ONES)
    await fail(coordinator, buffer[4:8])
    await assert_holds(coordinator, buffer[:4], 1)
    await assert_holds(coordinator, buffer[8:], 1)
    for part in (buffer, buffer[4:5], buffer[7:9], buffer[3:5]):
        await assert_skipped(coordinator.download(part))


# What heals


def upload(coordinator: AsyncCoordinator, buffer: DeviceBuffer) -> Node[Any]:
    return coordinator.upload(np.full(buffer.shape, 8, np.uint32), buffer)


def kernel(coordinator: AsyncCoordinator, buffer: DeviceBuffer) -> Node[Any]:
    twos = coordinator.upload(np.full(buffer.shape, 2, np.uint32))
    return coordinator.compute(BLEND, 1, 32, buffer, twos, twos, buffer.size, writes=[buffer])


def function(coordinator: AsyncCoordinator, buffer: DeviceBuffer) -> Node[Any]:
    async def fill() -> None:
        await coordinator.compute_stream.fill(buffer, 8)

    return coordinator.host(fill, writes=[buffer])


def fill(coordinator: AsyncCoordinator, buffer: DeviceBuffer) -> asyncio.Task[None]:
    async def run() -> None:
        async with coordinator.operation("kernel", writes=[buffer]) as bracket:
            assert bracket.stream is not None
            bracket.stream.fill(buffer, 8)

    return asyncio.create_task(run())


def copy(coordinator: AsyncCoordinator, buffer: DeviceBuffer) -> asyncio.Task[None]:
    source = coordinator.upload(np.full(buffer.shape, 8, np.uint32)).buffer

    async def run() -> None:
        async with coordinator.operation("transfer", reads=[source], writes=[buffer]) as bracket:
            assert bracket.stream is not None
            bracket.stream.copy(buffer, source)

    return asyncio.create_task(run())


Heals = Callable[[AsyncCoordinator, DeviceBuffer], Any]


@pytest.mark.parametrize("heals", [upload, kernel, function, fill, copy])
async def test_an_operation_that_replaces_bytes_heals_them(coordinator: AsyncCoordinator, heals: Heals) -> None:
    """Later nodes depend on it from its registration on."""
    buffer = await poisoned(coordinator)
    healing = heals(coordinator, buffer)
    await asyncio.sleep(0)  # a task creates the bracket
    bumped = coordinator.compute(BUMP, 1, 32, buffer, 2, ITEMS)
    await assert_holds(coordinator, buffer, 42)
    await quickly(healing)
    await quickly(bumped)


@pytest.mark.parametrize("heals", [upload, kernel, function, fill, copy])
async def test_a_partial_overwrite_heals_only_what_it_covers(coordinator: AsyncCoordinator, heals: Heals) -> None:
    buffer = await poisoned(coordinator)
    await quickly(heals(coordinator, buffer[2:6]))
    await assert_holds(coordinator, buffer[2:6], 8)
    for part in (buffer[1:3], buffer[5:7], buffer[:2], buffer[6:]):
        await assert_skipped(coordinator.download(part))
    await quickly(heals(coordinator, buffer[6:]))
    await quickly(heals(coordinator, buffer[:2]))
    await assert_holds(coordinator, buffer, 8)


async def test_a_kernel_that_may_read_its_target_is_skipped_and_does_not_heal(coordinator: AsyncCoordinator) -> None:
    buffer = await poisoned(coordinator)
    await assert_skipped(coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS))
    await assert_skipped(coordinator.download(buffer))


async def test_a_kernel_that_may_read_a_poisoned_part_poisons_all_that_it_writes(coordinator: AsyncCoordinator) -> None:
    buffer = await coordinator.upload(ONES)
    await fail(coordinator, buffer[:1])
    await assert_skipped(coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS))
    await assert_skipped(coordinator.download(buffer[8:]))


async def test_a_healing_operation_that_fails_poisons_again(coordinator: AsyncCoordinator) -> None:
    """Its dependents are skipped because of its own failure, and not because of the first one."""

    def broken() -> None:
        raise LookupError("second")

    buffer = await poisoned(coordinator)
    healing = coordinator.host(broken, writes=[buffer[:6]])
    reader = coordinator.download(buffer[:6])
    with pytest.raises(LookupError):
        await quickly(healing)
    for node in (reader, coordinator.download(buffer[:6])):
        with pytest.raises(SkippedError) as caught:
            await quickly(node)
        assert isinstance(caught.value.__cause__, LookupError)
    await assert_skipped(coordinator.download(buffer[6:]))


async def test_failure_does_not_poison_bytes_that_were_overwritten_since(coordinator: AsyncCoordinator) -> None:
    """Program order counts, and not the moment at which the failure is known."""
    buffer = await coordinator.upload(ONES)
    gate = asyncio.Event()

    async def broken() -> None:
        await gate.wait()
        raise BodyError("late")

    late = coordinator.host(broken, writes=[buffer])
    coordinator.upload(3 * ONES[4:], buffer[4:])
    gate.set()
    with pytest.raises(BodyError):
        await quickly(late)
    await assert_holds(coordinator, buffer[4:], 3)
    with pytest.raises(SkippedError):
        await quickly(coordinator.download(buffer[:5]))


# reads= and writes=


async def test_named_buffers_are_read_and_written_as_named_and_others_as_inferred(
    coordinator: AsyncCoordinator,
) -> None:
    target = await poisoned(coordinator)
    good = await coordinator.upload(2 * ONES)
    await quickly(coordinator.compute(BLEND, 1, 32, target, good, good, ITEMS, reads=[good], writes=[target]))
    await assert_holds(coordinator, target, 8)
    bad = await poisoned(coordinator)
    # `target` is named, `bad` is not: it counts as read, for its parameter is const.
    await assert_skipped(coordinator.compute(BLEND, 1, 32, target, bad, good, ITEMS, reads=[good], writes=[target]))
    await assert_skipped(coordinator.download(target))
    await quickly(coordinator.compute(BLEND, 1, 32, target, good, bad, ITEMS, reads=[], writes=[target, bad]))
    await assert_holds(coordinator, bad, 1)  # it was declared as written, so it is not poisoned any more


async def test_a_buffer_that_only_reads_names_is_not_written(coordinator: AsyncCoordinator) -> None:
    """And a pointer that is not const and that nothing names is read and written, whatever else is named."""
    first, second = await coordinator.upload(ONES), await coordinator.upload(ONES)
    await fail(coordinator, second)
    await assert_skipped(coordinator.compute(BLEND, 1, 32, first, second, second, ITEMS, reads=[first, second]))
    await assert_holds(coordinator, first, 1)
    await assert_skipped(coordinator.compute(BLEND, 1, 32, first, second, second, ITEMS, reads=[second]))
    await assert_skipped(coordinator.download(first))


async def test_declaring_a_part_of_an_argument_declares_all_of_it(coordinator: AsyncCoordinator) -> None:
    target = await poisoned(coordinator)
    twos = await coordinator.upload(2 * ONES)
    await quickly(coordinator.compute(BLEND, 1, 32, target, twos, twos, ITEMS, writes=[target[:6]]))
    await assert_holds(coordinator, target[:6], 8)
    await assert_skipped(coordinator.download(target[6:]))


# Host memory


@pytest.mark.parametrize("pinned", [False, True])
async def test_a_download_that_is_skipped_poisons_its_target(coordinator: AsyncCoordinator, pinned: bool) -> None:
    """The array stays poisoned until the program has received the failure of the download."""
    buffer, other = await poisoned(coordinator), empty(coordinator)
    array = coordinator.device.pinned(ITEMS, np.uint32) if pinned else np.zeros(ITEMS, np.uint32)
    down = coordinator.download(buffer, out=array)
    await coordinator.drain()
    await assert_skipped(coordinator.upload(array[2:4], other[2:4]))
    await assert_skipped(coordinator.download(other[2:4]))
    await assert_skipped(down)
    array[:] = 9
    await coordinator.upload(array, other)
    await assert_holds(coordinator, other, 9)


async def test_a_host_array_is_healed_by_a_download(coordinator: AsyncCoordinator) -> None:
    array, good = np.zeros(ITEMS, np.uint32), await coordinator.upload(5 * ONES)
    coordinator.download(await poisoned(coordinator), out=array)
    coordinator.download(good, out=array)
    await assert_holds(coordinator, coordinator.upload(array).buffer, 5)


async def test_another_array_at_the_same_address_is_not_poisoned(coordinator: AsyncCoordinator) -> None:
    buffer = await poisoned(coordinator)
    memory = np.ones(4 * ITEMS, np.uint8)
    first = np.frombuffer(memory.data, np.uint32)
    coordinator.download(buffer, out=first)
    await coordinator.drain()
    address = first.ctypes.data
    del first
    second = np.frombuffer(memory.data, np.uint32)
    assert second.ctypes.data == address
    await quickly(coordinator.upload(second))


async def test_host_memory_of_unread_failures_is_not_kept_for_ever(coordinator: AsyncCoordinator) -> None:
    """P25: of 4 × `MOST_UNDELIVERED` downloads that are not awaited."""
    buffer = await poisoned(coordinator)
    arrays = np.zeros((4 * MOST_UNDELIVERED, ITEMS), np.uint32)
    for array in arrays:
        coordinator.download(buffer, out=array)
    await coordinator.drain()
    graph = coordinator._scheduler.graph
    assert len(graph._undelivered) <= 2 * MOST_UNDELIVERED
    assert len(graph._host.writers) <= 2 * MOST_UNDELIVERED
    await assert_skipped(coordinator.upload(arrays[-1]))


# Memory that is assigned anew


async def test_new_memory_is_not_poisoned(coordinator: AsyncCoordinator) -> None:
    """Whether the memory before it was freed or collected; on CUDA it is at the same address."""
    addresses = set()
    for number in range(20):
        buffer = empty(coordinator)
        addresses.add(buffer.address)
        await quickly(coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS))
        await fail(coordinator, buffer)
        await coordinator.drain()
        if number % 2:
            buffer.free()
        del buffer
    assert len(addresses) < 20 or coordinator.device.driver.name != "cuda"


async def test_a_buffer_that_dies_while_poisoned_leaves_no_record(coordinator: AsyncCoordinator) -> None:
    """P25: also where an error holds a frame that holds the buffer."""
    dying: list[weakref.ref[Any]] = []

    def kernel_of(up: Node[DeviceBuffer]) -> None:
        coordinator.compute(BUMP, 1, 32, up, 1, ITEMS)

    for _ in range(3):
        buffer = await poisoned(coordinator)
        dying.append(weakref.ref(buffer._block))
        node = coordinator.upload(ONES)
        dying.append(weakref.ref(node.buffer._block))
        await fail(coordinator, node.buffer[:3])
        kernel_of(node)
        await coordinator.drain()
        del buffer, node
    coordinator._scheduler.unread.clear()
    await until(lambda: (gc.collect(), not any(block() for block in dying))[1], "the buffers are gone")
    assert len(coordinator._scheduler.graph) == 0
    assert not coordinator._scheduler.graph._poisoned


async def test_a_closed_coordinator_leaves_no_poison(device: Device) -> None:
    """Poison is a coordinator's own; a buffer outlives many of them."""
    async with device.stream() as stream:
        buffer = await stream.upload(ONES)
        for ends in ("closes", "is left"):
            with pytest.raises(ZeroDivisionError) if ends == "is left" else pytest.raises(SystemError):
                async with AsyncCoordinator(device) as coordinator, AsyncCoordinator(device) as other:
                    await fail(coordinator, buffer)
                    await coordinator.drain()
                    np.testing.assert_array_equal(await quickly(other.download(buffer)), ONES)
                    assert len(buffer._block.poisoned()) == 1
                    if ends == "is left":
                        raise ZeroDivisionError
                raise SystemError
            assert not buffer._block.poison


# Slots of a pipeline, steps of a context


@pytest.mark.parametrize("depth", [1, 3])
async def test_one_of_a_hundred_items_fails_and_the_others_succeed(device: Device, depth: int) -> None:
    """A slot that starts its next item is newly assigned memory: its buffers are those of the item that failed."""
    async with AsyncCoordinator(device) as coordinator:

        async def work(slot: Slot) -> None:
            buffer = slot.buffer("x", ITEMS, np.uint32)
            if slot.item == 3:
                await fail(coordinator, buffer)
            await coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS)

        async with Pipeline(device, [Stage("work", work)], depth) as pipeline:
            found = await quickly(
                asyncio.gather(*(pipeline.execute_iteration(item) for item in range(100)), return_exceptions=True)
            )
        failed = {item: type(error) for item, error in enumerate(found) if error is not None}
        assert failed == {3: SkippedError}


@pytest.mark.parametrize("depth", [1, 3])
async def test_failing_work_of_an_item_does_not_fail_later_items(device: Device, depth: int) -> None:
    """The slot starts its next item before the coordinator has seen the end of the operation that fails."""
    gates = [asyncio.Event() for _ in range(20)]
    nodes: list[Node[Any]] = []
    async with AsyncCoordinator(device) as coordinator:

        async def work(slot: Slot) -> None:
            buffer = slot.buffer("x", ITEMS, np.uint32)
            if slot.item % 5 == 0:

                async def broken(gate: asyncio.Event = gates[slot.item]) -> None:
                    await gate.wait()
                    raise BodyError("late")

                nodes.append(coordinator.host(broken, writes=[buffer]))
                coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS)  # skipped, and not awaited
            else:
                node = coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS)
                for gate in gates[: slot.item]:
                    gate.set()
                await node

        async with Pipeline(device, [Stage("work", work)], depth) as pipeline:
            for item in range(20):
                await quickly(pipeline.execute_iteration(item))
        for gate in gates:
            gate.set()
        for node in nodes:
            with pytest.raises(BodyError):
                await quickly(node)


async def test_a_step_of_a_context_that_failed_does_not_fail_those_that_come_later() -> None:
    async with aiocuda.ManagedContext(driver="host") as context:
        coordinator = context.coordinator
        await context.device.load(BUMP)
        await jobs_done(context.device)  # with staging memory, the stream takes each node at once

        def broken() -> None:
            raise LookupError

        def compute(number: int) -> Any:
            def run(slot: Slot) -> Any:
                buffer = slot.buffer("x")
                if number == 3:
                    coordinator.host(broken, writes=[buffer])
                    raise BodyError("step")
                return coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS, stream=slot.stream).operation

            return run

        told: list[int] = []
        failures = 0
        for number in range(12):
            config = aiocuda.StepConfig({"x": ONES}, compute(number), ["x"])
            try:
                telemetry = await quickly(context.triple_buffered_step(config))
            except BodyError:
                failures += 1
                await coordinator.drain()
                continue
            if telemetry is not None:
                told.append(telemetry.step)
                np.testing.assert_array_equal(telemetry.outputs["x"], 6 * ONES)
        told += [telemetry.step for telemetry in await quickly(context.flush())]
        assert failures == 1
        assert 3 not in told
        assert told[-4:] == [8, 9, 10, 11]
        await coordinator.drain()
        coordinator._scheduler.read_all()


# Other cases


async def test_brackets_are_skipped_and_poison_unwritten_bytes(coordinator: AsyncCoordinator) -> None:
    buffer, other = await poisoned(coordinator), await coordinator.upload(ONES)
    with pytest.raises(SkippedError, match="'the first' failed"):
        async with coordinator.operation("kernel", reads=[buffer], writes=[other]):
            pytest.fail("it is not entered")
    await assert_skipped(coordinator.download(other))


async def test_host_functions_are_skipped_and_poison_unwritten_bytes(
    coordinator: AsyncCoordinator,
) -> None:
    buffer, other = await poisoned(coordinator), await coordinator.upload(ONES)
    await assert_skipped(coordinator.host(pytest.fail, reads=[buffer], writes=[other]))
    await assert_skipped(coordinator.download(other))


async def test_a_graph_in_a_bracket_is_one_operation(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
        good, buffer = await coordinator.upload(ONES), await poisoned(coordinator)
        async with stream.capture() as graph:
            stream.copy(buffer, good)
            stream.launch(BUMP, 1, 32, buffer, 1, ITEMS)
        async with coordinator.operation("kernel", reads=[good], writes=[buffer]) as bracket:
            assert bracket.stream is not None
            graph.launch(bracket.stream)
        await assert_holds(coordinator, buffer, 6)


async def test_unified_memory_is_poisoned_as_device_memory_is(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        buffer = device.unified(ITEMS, np.uint32)
        await fail(coordinator, buffer)
        await assert_skipped(coordinator.download(buffer))

        def write() -> None:
            buffer.array[:] = 7

        coordinator.host(write, writes=[buffer])
        await assert_holds(coordinator, buffer, 7)


async def test_the_stream_of_a_failed_operation_is_usable_once_the_failure_was_delivered() -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        buffer = await stream.upload(ONES)
        peer.refuse("upload")
        refused = stream.copy(buffer, 2 * ONES)
        with pytest.raises(SkippedError):
            await quickly(stream.download(buffer))
        assert isinstance(refused.exception(), DriverError)
        np.testing.assert_array_equal(await quickly(stream.download(buffer)), ONES)  # not checked here


async def test_wait_that_begins_after_a_fault_gets_the_fault() -> None:
    """Also before the coordinator has noticed it, though the task waits for a bracket that it has entered itself."""
    with Peer() as peer, Reports():
        device = await aiocuda.open_device(driver=peer.driver)
        coordinator = AsyncCoordinator(device)
        bracket = coordinator.operation("kernel")
        await bracket.__aenter__()
        node = coordinator.upload(ONES, after=bracket)
        with peer.inner._lock:
            peer.inner._fail(719, 0, "a fault of the test", ZeroDivisionError())
        with pytest.raises(DeviceFault):
            async with asyncio.timeout(PATIENCE):
                await node  # in this very task
        with pytest.raises(DeviceFault):
            await bracket.__aexit__(None, None, None)
        await quickly(coordinator.aclose())
        await device.aclose()


async def test_device_fault_ends_nodes_that_wait_to_be_skipped() -> None:
    """P3: it waits for a bracket that is never left."""
    with Peer() as peer, Reports():
        device = await aiocuda.open_device(driver=peer.driver)
        coordinator = AsyncCoordinator(device)
        buffer = await poisoned(coordinator)
        bracket = coordinator.operation("kernel")
        await bracket.__aenter__()
        node = coordinator.download(buffer, after=bracket)
        with pytest.raises(DeviceFault):
            await quickly(coordinator.compute(TRAP, 1, 1))
        with pytest.raises(DeviceFault):
            await quickly(node)
        with pytest.raises(DeviceFault):
            coordinator.upload(ONES, buffer)
        with pytest.raises(DeviceFault):
            await bracket.__aexit__(None, None, None)
        await quickly(coordinator.aclose())
        await device.aclose()


async def test_nodes_skipped_for_a_delivered_failure_raise_nothing_at_the_end(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        coordinator.download(await poisoned(coordinator))


# What it costs


def calls_of(function: Callable[[], object]) -> int:
    """How many functions of Python it calls."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


async def test_an_operation_costs_the_same_beside_many_poisoned_slices() -> None:
    """P33: each of these slices was poisoned by a failure of its own, so that nothing can be joined."""

    async def cost(count: int) -> int:
        async with aiocuda.open_device(driver="simulated") as device, AsyncCoordinator(device) as coordinator:
            buffer = coordinator.compute_stream.empty(2 * count, np.uint32)
            for index in range(count):
                await fail(coordinator, buffer[2 * index : 2 * index + 1])
            await coordinator.drain()
            assert len(buffer._block.poisoned()[coordinator._scheduler.graph]) == count

            def work() -> None:
                for index in range(1, 9):
                    coordinator.upload(ONES[:1], buffer[2 * index : 2 * index + 1])
                    coordinator.upload(ONES[:1], buffer[2 * index + 1 : 2 * index + 2])
                    coordinator.download(buffer)
                    coordinator.download(buffer[2 * index + 1 : 2 * index + 2])

            found = calls_of(work)
            await coordinator.drain()
            return found

    few, many = await cost(16), await cost(64)
    assert many <= 1.5 * few


@pytest.mark.filterwarnings("ignore")
def test_ranges_hold_the_newest_values() -> None:
    """Against one value per byte."""
    chance = np.random.default_rng(7)
    for _ in range(200):
        ranges: Ranges[int] = Ranges()
        values: list[int | None] = [None] * 20
        for value in range(15):
            start = int(chance.integers(20))
            stop = int(chance.integers(start + 1, 21))
            found = ranges.first(start, stop)
            assert found == next((one for one in values[start:stop] if one is not None), None)
            if chance.random() < 0.6:
                ranges.put(start, stop, value)
                values[start:stop] = [value] * (stop - start)
            else:
                ranges.remove(start, stop)
                values[start:stop] = [None] * (stop - start)
        assert bool(ranges) == any(value is not None for value in values)
