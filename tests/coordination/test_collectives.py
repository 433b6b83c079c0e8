"""broadcast, reduce and all_reduce, over one and several devices."""

from __future__ import annotations

import asyncio
import contextlib
import lzma
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import AsyncCoordinator, Device, DeviceBuffer, SkippedError, Stream
from aiocuda.coordination import _collectives, _reductions
from aiocuda.coordination._reductions import OPERATIONS
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated._upset import Upsets
from aiocuda.errors import (
    ClosedError,
    DeviceFault,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    UnsupportedError,
    WrongDeviceError,
    WrongLoopError,
)  # fmt: skip
from aiocuda.testing import SimulatedDriver, Upset
from tests.coordination.reductions import PTX, SOURCE, stamped
from tests.coordination.simulation import CHUNK, Program, run_over
from tests.driver.several import SEVERAL_DEVICES, open_driver, shared_gpu
from tests.helpers import TRAP, Peer, quickly, until

pytestmark = pytest.mark.asyncio

_Array = npt.NDArray[Any]

HALVES = ("float16", "bfloat16")
DTYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", *HALVES, "float32", "float64",
)  # fmt: skip


def expected(arrays: Sequence[_Array], operation: str) -> _Array:
    """Combine arrays in their order with NumPy: halves in float32."""
    dtype = arrays[0].dtype
    wide = [array.astype(np.float32) if dtype.name in HALVES else array for array in arrays]
    total = wide[0]
    with np.errstate(all="ignore"):
        for array in wide[1:]:
            total = OPERATIONS[operation](total, array)
        return total.astype(dtype)


def arrays_of(dtype: Any, count: int, size: int = 37) -> list[_Array]:
    chance = np.random.default_rng(count)
    return [(chance.standard_normal(size) * 100).astype(np.int64).astype(dtype) / np.dtype(dtype).type(1) if
            np.dtype(dtype).kind not in "iu" else (chance.standard_normal(size) * 100).astype(np.int64).astype(dtype)
            for _ in range(count)]  # fmt: skip


async def upload(devices: Sequence[Device], arrays: Sequence[_Array]) -> list[DeviceBuffer]:
    """Upload arrays, to each device in turn."""
    buffers: list[DeviceBuffer] = []
    for number, array in enumerate(arrays):
        async with devices[number % len(devices)].stream() as stream:
            buffers.append(await stream.upload(array))
    return buffers


async def download(buffer: DeviceBuffer) -> _Array:
    async with buffer.device.stream() as stream:
        found: _Array = await stream.download(buffer)
    return found


@pytest_asyncio.fixture(params=SEVERAL_DEVICES)
async def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Device]]:
    """Three devices of one driver, or two GPUs; chunks of a few items."""
    monkeypatch.setattr(_collectives, "CHUNK", 64)
    monkeypatch.setattr(_collectives, "PART", 64)
    count = 2 if request.param == "cuda" else 3
    driver = open_driver(request.param, count)
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(aiocuda.open_device(index, driver=driver)) for index in range(count)]
    driver.close()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
async def test_one_device(device: Device, dtype: str, operation: str) -> None:
    """The result has NumPy's bits, for few and for many buffers."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")  # NumPy knows the name then
    for count in (1, 3, 11):
        arrays = arrays_of(dtype, count)
        want = expected(arrays, operation)
        buffers = await upload([device], arrays)
        async with AsyncCoordinator(device) as coordinator:
            target = coordinator.compute_stream.empty(37, dtype)
            coordinator.reduce(buffers, target, operation)
            coordinator.all_reduce(buffers, operation)
            for buffer in (target, *buffers):
                got = await quickly(coordinator.download(buffer).wait())
                assert got.tobytes() == want.tobytes(), (got, want)


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_several_devices(devices: list[Device], operation: str) -> None:
    """Buffers of all devices, more than one of some; all get the same bits."""
    for dtype in (np.float16, "float32", "int16"):
        for count in (2, 5, 11):
            arrays = arrays_of(dtype, count, 203)
            want = expected(arrays, operation)
            buffers = await upload(devices, arrays)
            (target,) = await upload(devices[1:], arrays[:1])
            async with AsyncCoordinator(devices[0]) as coordinator:
                coordinator.reduce(buffers, target, operation)
                coordinator.all_reduce(buffers, operation)
                await quickly(coordinator.drain())
                assert set(coordinator.statistics().by_kind) == {"reduction", "all-reduce"}
            for buffer in (target, *buffers):
                assert (await download(buffer)).tobytes() == want.tobytes()


async def test_broadcast(devices: list[Device]) -> None:
    """Several targets on each device, from a source on another device than the coordinator's."""
    source, *targets = await upload(devices, [np.full(501, value, np.int32) for value in range(8)])
    async with AsyncCoordinator(devices[-1]) as coordinator:
        node = coordinator.broadcast(source, targets, priority="high", description="weights", label="step 7")
        assert (node.kind, node.priority, node.label) == ("broadcast", "high", "step 7")
        await quickly(node.wait())
    for target in targets:
        np.testing.assert_array_equal(await download(target), np.zeros(501, np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 60, 20))
async def test_random_programs_on_a_gpu(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Collectives and unified memory over one GPU as up to three devices, and withdrawn nodes, against NumPy."""
    monkeypatch.setattr(_collectives, "CHUNK", 100 * CHUNK)
    monkeypatch.setattr(_collectives, "PART", CHUNK)
    for seed in range(first, first + 20):
        await run_over(Program(seed, None, items=20_011), shared_gpu(), 1 + seed % 3)


async def test_target_is_a_source(device: Device) -> None:
    buffers = await upload([device], [np.full(9, value, np.float32) for value in (1, 2, 4)])
    async with AsyncCoordinator(device) as coordinator:
        coordinator.reduce(buffers, buffers[1])
        np.testing.assert_array_equal(await coordinator.download(buffers[1]), np.full(9, 7, np.float32))


async def test_nan_and_empty_and_zero_dimensions(device: Device) -> None:
    """minimum and maximum propagate NaN; buffers may have no items, or no dimensions."""
    one, other = np.array([1, np.nan, 3], np.float32), np.array([np.nan, 2, 4], np.float32)
    async with AsyncCoordinator(device) as coordinator:
        for operation in ("minimum", "maximum"):
            nodes = [coordinator.upload(one), coordinator.upload(other)]
            coordinator.all_reduce(nodes, operation)
            want = OPERATIONS[operation](one, other)
            np.testing.assert_array_equal(await coordinator.download(nodes[1]), want)
        empty = [coordinator.upload(np.empty(0, np.float32)) for _ in range(2)]
        await coordinator.all_reduce(empty)
        single = [coordinator.upload(np.array(value, np.int8)) for value in (100, 100)]
        coordinator.all_reduce(single)
        assert await coordinator.download(single[0]) == np.int8(-56)


async def test_nodes_depend_and_skip(device: Device) -> None:
    """A collective follows what writes its buffers, and is skipped after a failure of it."""

    def fail() -> None:
        raise ValueError("no data")

    buffers = await upload([device], [np.ones(5, np.float32)] * 3)
    async with AsyncCoordinator(device) as coordinator:
        failed = coordinator.host(fail, writes=[buffers[0]])
        reduced = coordinator.reduce(buffers[:2], buffers[2])
        behind = coordinator.broadcast(buffers[2], buffers[:1])
        with pytest.raises(ValueError, match="no data"):
            await failed
        for node in (reduced, behind):
            with pytest.raises(SkippedError):
                await node
        coordinator.broadcast(buffers[1], [buffers[0], buffers[2]])  # overwrites the poisoned bytes
        await coordinator.all_reduce(buffers)


@pytest.mark.parametrize("kernel", ["loaded", "loading"])
@pytest.mark.parametrize("verb", ["copy", "copy_peer", "launch", "load", "stream_wait", "event_record", "allocate"])
async def test_refused_call_fails_only_the_node(monkeypatch: pytest.MonkeyPatch, verb: str, kernel: str) -> None:
    """The driver refuses a call of a collective: its node fails with that error; other collectives run."""
    monkeypatch.setattr(_collectives, "CHUNK", 64)
    monkeypatch.setattr(_collectives, "PART", 64)
    failed = 0
    for nth in (1, 2, 5, 9):
        _reductions._fold.cache_clear()  # no device has loaded the kernel
        arrays = [np.full(100, value, np.float32) for value in range(6)]
        driver = SimulatedDriver(devices=3)
        async with contextlib.AsyncExitStack() as stack:
            devices = [await stack.enter_async_context(aiocuda.open_device(k, driver=driver)) for k in range(3)]
            buffers, others = await upload(devices, arrays), await upload(devices, arrays)
            async with AsyncCoordinator(devices[0]) as coordinator:
                if kernel == "loaded":
                    await coordinator.all_reduce(await upload(devices, arrays))
                driver.upsets = Upsets([Upset("refuse", nth, verb, 801)])
                nodes = [coordinator.all_reduce(each) for each in (buffers, others)]
                outcomes = await quickly(asyncio.gather(*(node.wait() for node in nodes), return_exceptions=True))
                failures = [outcome for outcome in outcomes if outcome is not None]
                if verb != "event_record":  # by which one or the other may be seen to end
                    assert [type(failure) for failure in failures] in ([], [UnsupportedError])
                failed += len(failures)
                driver.upsets = Upsets()
                again = await upload(devices, arrays)
                await quickly(coordinator.all_reduce(again).wait())
                await quickly(coordinator.drain())
            for buffer in again if outcomes[1] else [*again, *others]:
                np.testing.assert_array_equal(await download(buffer), np.full(100, 15, np.float32))
        driver.close()
    assert (failed > 0) == (verb != "copy" and (verb, kernel) != ("load", "loaded"))


async def test_stream_of_another_driver_or_loop_is_refused(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
        buffers = [stream.empty(4, np.float32) for _ in range(2)]
        foreign = HostDriver()
        async with aiocuda.open_device(driver=foreign) as other, other.stream() as theirs:
            with pytest.raises(WrongDeviceError, match="another driver"):
                coordinator.all_reduce(buffers, stream=theirs)
        foreign.close()

        async def elsewhere(done: Callable[[Stream], None], end: threading.Event) -> None:
            async with device.stream() as theirs:
                done(theirs)
                await asyncio.to_thread(end.wait)

        given: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        loop, end = asyncio.get_running_loop(), threading.Event()
        thread = asyncio.create_task(
            asyncio.to_thread(
                lambda: asyncio.run(elsewhere(lambda each: loop.call_soon_threadsafe(given.set_result, each), end))  # type: ignore[arg-type]
            )
        )
        node = coordinator.all_reduce(buffers, stream=await quickly(given))
        with pytest.raises(WrongLoopError):
            await quickly(node.wait())
        end.set()
        await quickly(thread)


async def test_items_that_are_not_aligned_are_refused(device: Device) -> None:
    """A GPU answers an access to such an address with a fault."""
    async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
        whole = stream.empty(100, np.uint8)
        views = [whole[1:41].view(np.float32), whole[44:84].view(np.float32)]
        with pytest.raises(InvalidArgumentError, match="no multiple of the 4 bytes of its items: copy it"):
            coordinator.all_reduce(views)
        with pytest.raises(InvalidArgumentError, match="no multiple of the 4 bytes"):
            coordinator.reduce(views[1:], views[0])
        await coordinator.broadcast(views[0], views[1:])


async def test_large_buffers_have_few_chunks() -> None:
    """All chunks are enqueued in one turn of the loop."""
    counts = []
    with Peer(HostDriver(devices=2)) as peer:
        async with (
            aiocuda.open_device(0, driver=peer.driver) as one,
            aiocuda.open_device(1, driver=peer.driver) as two,
            AsyncCoordinator(one) as coordinator,
        ):
            for items in (1 << 20, 1 << 24):
                buffers = await upload([one, two], [np.ones(items, np.float32)] * 2)
                before = peer.calls["copy_peer"]
                await quickly(coordinator.all_reduce(buffers).wait())
                counts.append(peer.calls["copy_peer"] - before)
    assert counts == [4, 2 * (2 + 1)]
    assert _collectives._chunk_size(1 << 40, 4) == 4 * _collectives.CHUNK // 4


@pytest.mark.parametrize("known", [False, True], ids=["new-streams", "known-streams"])
async def test_device_that_closes_runs_what_was_registered(known: bool) -> None:
    """Streams of collectives take it on both devices, and the other device may use the memory of the closing one."""
    driver = HostDriver(devices=2)
    async with aiocuda.open_device(1, driver=driver) as other:
        one = await aiocuda.open_device(0, driver=driver)
        async with AsyncCoordinator(one) as coordinator:
            buffers = await upload([one, other], [np.full(100, value, np.float32) for value in (1, 2)])
            if known:
                await quickly(coordinator.all_reduce(await upload([one, other], [np.ones(4)] * 2)).wait())
            released = asyncio.Event()
            gate = coordinator.host(released.wait)
            nodes = [
                coordinator.all_reduce(buffers, after=gate),
                coordinator.broadcast(buffers[1], buffers[:1]),
                coordinator.reduce(buffers, buffers[1]),
            ]
            closing = asyncio.create_task(one.aclose())
            await until(lambda: one.closed or coordinator._scheduler.closing, "the close")
            with pytest.raises(ClosedError):
                coordinator.all_reduce(buffers)
            released.set()
            await quickly(closing)
            assert [node.exception() for node in nodes] == [None] * 3
        np.testing.assert_array_equal(await download(buffers[1]), np.full(100, 6, np.float32))
        await until(lambda: not other.statistics().streams, "the end of the streams")
    driver.close()


async def test_streams_on_closed_devices_are_forgotten() -> None:
    driver = HostDriver(devices=2)
    async with aiocuda.open_device(0, driver=driver) as one, AsyncCoordinator(one) as coordinator:
        for _ in range(4):
            async with aiocuda.open_device(1, driver=driver) as two:
                await quickly(coordinator.all_reduce(await upload([one, two], [np.ones(4)] * 2)).wait())
        assert len(coordinator._scheduler.streams._lanes) <= 5
    driver.close()


async def test_fault_reaches_every_waiter() -> None:
    """A fault on one device fails the node, and every other operation."""
    driver = HostDriver(devices=2)
    async with contextlib.AsyncExitStack() as stack:
        devices = [await stack.enter_async_context(aiocuda.open_device(k, driver=driver)) for k in range(2)]
        buffers = await upload(devices, [np.ones(10, np.float32)] * 2)
        with pytest.raises(DeviceFault):
            async with AsyncCoordinator(devices[0]) as coordinator, devices[1].stream() as stream:
                await devices[1].load(TRAP)
                trap = stream.launch(TRAP, 1, 1)
                node = coordinator.all_reduce(buffers)
                with pytest.raises(DeviceFault):
                    await quickly(node.wait())
                with pytest.raises(DeviceFault):
                    await quickly(trap.wait())
                await coordinator.reduce(buffers, buffers[0])
        for device in devices:
            with contextlib.suppress(DeviceFault):
                await quickly(device.aclose())
    driver.close()


async def test_bad_input_is_refused_at_the_call(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        base = coordinator.compute_stream.empty(30, np.float32)
        one, other, wrong = base[:10], base[10:20], base[5:15]
        call: Any = coordinator.all_reduce
        bad: Any
        for bad, error in (
            (lambda: call([]), InvalidArgumentError),
            (lambda: call(one), InvalidTypeError),
            (lambda: call([one, one]), InvalidArgumentError),
            (lambda: call([one, wrong]), InvalidArgumentError),
            (lambda: call([one, base[10:21]]), InvalidArgumentError),
            (lambda: call([one, other.view(np.int32)]), InvalidTypeError),
            (lambda: call([one, np.zeros(10, np.float32)]), InvalidTypeError),
            (lambda: call([one, other], "mean"), InvalidArgumentError),
            (lambda: call([one.view(np.complex64)]), InvalidTypeError),
            (lambda: coordinator.reduce([one, other], wrong), InvalidArgumentError),
            (lambda: coordinator.broadcast(one, []), InvalidArgumentError),
            (lambda: coordinator.broadcast(one, [one]), InvalidArgumentError),
        ):
            with pytest.raises(error):
                bad()
        assert coordinator.statistics().registered == 0
        gone = coordinator.compute_stream.empty(10, np.float32)
        gone.free()
        with pytest.raises(StaleHandleError):
            call([one, gone])
    with pytest.raises(ClosedError):
        call([one, other])


async def test_device_of_another_driver_and_closed_device() -> None:
    driver = HostDriver(devices=2)
    async with aiocuda.open_device(driver=driver) as device, AsyncCoordinator(device) as coordinator:
        async with aiocuda.open_device(driver="host") as foreign:
            buffers = await upload([device, foreign], [np.ones(4, np.float32)] * 2)
            with pytest.raises(WrongDeviceError, match="another driver"):
                coordinator.all_reduce(buffers)
        async with aiocuda.open_device(1, driver=driver) as second:
            buffers = await upload([device, second], [np.ones(4, np.float32)] * 2)
            await coordinator.all_reduce(buffers)
        with pytest.raises((ClosedError, StaleHandleError)):
            coordinator.all_reduce(buffers)
    driver.close()


async def test_block_that_raises_leaves_no_stream(devices: list[Device]) -> None:
    """The streams of other devices end with the coordinator."""
    buffers = await upload(devices, [np.ones(300, np.float32)] * 4)
    before = [device.statistics().streams for device in devices]
    with contextlib.suppress(InterruptedError):
        async with AsyncCoordinator(devices[0]) as coordinator:
            coordinator.all_reduce(buffers)
            raise InterruptedError
    await until(lambda: [device.statistics().streams for device in devices] == before, "the end of the streams")


async def test_checker_reports_nothing_of_ordered_collectives() -> None:
    driver = HostDriver(devices=2)
    async with contextlib.AsyncExitStack() as stack:
        devices = [await stack.enter_async_context(aiocuda.open_device(k, driver=driver, check=True)) for k in range(2)]
        buffers = await upload(devices, [np.ones(300, np.float32)] * 4)
        async with AsyncCoordinator(devices[0]) as coordinator:
            for _ in range(3):
                coordinator.all_reduce(buffers)
                coordinator.broadcast(buffers[1], [buffers[0], *buffers[2:]])
        for device in devices:
            assert device.checker is not None
            assert device.checker.conflicts == []
    driver.close()


async def test_ptx_is_compiled_from_the_source() -> None:
    published = lzma.decompress(PTX.read_bytes()).decode()
    assert published == stamped(SOURCE.read_bytes(), published.partition("\n")[2]), (
        "run python -m tests.coordination.reductions"
    )


@pytest.mark.parametrize("changed", [(b"sources", "ptx"), (b"source", "ptxs"), (b"sourcep", "tx")])
async def test_hash_of_the_ptx_shows_a_change_of_the_source_or_of_the_ptx(changed: tuple[bytes, str]) -> None:
    assert stamped(*changed).partition("\n")[0] != stamped(b"source", "ptx").partition("\n")[0]


async def test_ptx_is_for_compute_capability_7_5_and_is_decompressed_once() -> None:
    _reductions._ptx.cache_clear()
    for symbol in ("sum_uint8", "maximum_float64"):
        ptx = _reductions._ptx_of(symbol)
        assert "\n.target sm_75\n" in ptx
        assert ptx.count(".entry ") == ptx.count(f".visible .entry {symbol}(") == 1
    assert _reductions._ptx.cache_info().misses == 1


@pytest.fixture
def no_lzma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this Python one that was built without liblzma."""
    monkeypatch.setitem(sys.modules, "_lzma", None)
    monkeypatch.delitem(sys.modules, "lzma")
    _reductions._ptx.cache_clear()


@pytest.mark.usefixtures("no_lzma")
async def test_gpu_needs_lzma_for_a_reduction() -> None:
    with pytest.raises(UnsupportedError, match=r"need lzma, .*: install liblzma-dev .* build Python again"):
        _reductions._ptx_of("sum_uint8")


@pytest.mark.usefixtures("no_lzma")
async def test_host_needs_no_lzma() -> None:
    driver = HostDriver()
    async with aiocuda.open_device(driver=driver) as device, AsyncCoordinator(device) as coordinator:
        buffers = await upload([device], [np.ones(3, np.float32)] * 2)
        await coordinator.all_reduce(buffers)
        np.testing.assert_array_equal(await download(buffers[1]), np.full(3, 2, np.float32))
    driver.close()
