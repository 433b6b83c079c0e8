"""Asynchronous, or one operation after the other on the default stream: chosen how, and what it changes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import DeviceFault, InvalidArgumentError, InvalidTypeError, ManagedContext, Stream
from aiocuda.driver.host import HostDriver
from aiocuda.lowlevel import resources_of
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.context.programs import SIZE, everything, numbered, value
from tests.helpers import TRAP, Latch, Peer, open_peer, quickly, until


@pytest.mark.parametrize(
    ("variable", "argument", "expected"),
    [
        (None, None, True),
        ("", None, True),
        ("1", None, True),
        ("0", None, False),
        ("0", True, True),
        ("1", False, False),
        ("nonsense", False, False),  # the variable is not read
    ],
)
@pytest.mark.asyncio
async def test_argument_or_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, argument: bool | None, expected: bool
) -> None:
    """J2: the argument goes before the environment, and asynchronous is the default."""
    monkeypatch.delenv("AIOCUDA_ASYNC", raising=False)
    if variable is not None:
        monkeypatch.setenv("AIOCUDA_ASYNC", variable)
    async with ManagedContext(driver="host", asynchronous=argument) as context:
        assert context.device.asynchronous is context.statistics().asynchronous is expected
        assert ("synchronous" in repr(context).replace("asynchronous", "")) is not expected


@pytest.mark.parametrize("dropped", ["nonsense", "true", "2", " 1"])
@pytest.mark.asyncio
async def test_garbage_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, dropped: str) -> None:
    monkeypatch.setenv("AIOCUDA_ASYNC", dropped)
    with pytest.raises(InvalidArgumentError, match=f"AIOCUDA_ASYNC={dropped!r}: it takes 1, for asynchronous, or 0"):
        ManagedContext(driver="host")


@pytest.mark.parametrize("dropped", [1, 0, "yes", []])
@pytest.mark.asyncio
async def test_a_mode_is_true_or_false(dropped: Any) -> None:
    with pytest.raises(InvalidTypeError, match="asynchronous is True or False, not"):
        ManagedContext(driver="host", asynchronous=dropped)
    with pytest.raises(InvalidTypeError, match="asynchronous is True or False, not"):
        aiocuda.open_device(driver="host", asynchronous=dropped)


@pytest.mark.asyncio
async def test_both_modes_bring_the_same(driver: str) -> None:
    """J2: bit by bit; and no stream in one of them, by the driver's own count."""
    found: dict[bool, dict[str, Any]] = {}
    made: dict[bool, dict[str, int]] = {}
    for mode in (True, False):
        async with ManagedContext(driver=driver, asynchronous=mode) as context:  # type: ignore[arg-type]
            before = context.device.driver.statistics()
            found[mode] = await quickly(everything(context))
            after = context.device.driver.statistics()
            made[mode] = {
                name: after[name] - before[name] for name in ("streams_created", "notifiers") if name in after
            }
            assert context.statistics().streams_created == made[mode]["streams_created"]
            made[mode]["streams served again"] = before["streams_kept"] - after["streams_kept"]  # of earlier tests
            assert context.statistics().device.parks == 0 or mode
    assert found[True] == found[False]
    assert len(found[True]) == 17
    assert made[True]["streams_created"] + made[True]["streams served again"] > 10
    assert set(made[False].values()) == {0}


@pytest.mark.asyncio
async def test_no_stream_and_no_bell_is_asked_for() -> None:
    """J2: nor for memory that finalisers leave, which needs a stream to go back in."""
    with Peer() as peer:
        async with ManagedContext(driver=peer.driver, asynchronous=False) as context:
            await quickly(everything(context))
            stream = context.stream("compute")
            buffer = stream.empty(SIZE)
            await stream.fill(buffer, 1)
            await stream.aclose()
            del buffer
            gc.collect()
            context.stream("compute").empty(SIZE)  # which gives back what is left
        assert peer.calls["stream_default"] > 10
        assert peer.calls["stream_create"] == peer.calls["notifier"] == 0
        assert peer.calls["stream_destroy"] == peer.calls["stream_default"]
    with Peer() as peer:  # what it would be otherwise
        async with ManagedContext(driver=peer.driver, asynchronous=True) as context:
            await quickly(everything(context))
        assert peer.calls["stream_create"] > 10
        assert peer.calls["notifier"] > 0
        assert peer.calls["stream_default"] == 0


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.asyncio
async def test_one_after_the_other(asynchronous: bool) -> None:
    """J2: what is held in one stream holds all others, in synchronous mode."""
    async with (
        ManagedContext(driver="host", asynchronous=asynchronous) as context,
        aiocuda.open_device(driver=context.device.driver) as beside,
    ):
        compute, control, another = context.stream("compute"), context.stream("control"), beside.stream()
        mine, theirs = control.empty(SIZE), another.empty(SIZE)
        with Latch(context.device) as latch:
            held = latch.hold(compute)
            await quickly(latch.held())
            other = control.fill(mine, 1)
            await quickly(another.fill(theirs, 1))  # in another stream: work that could have run has run now
            if asynchronous:
                await quickly(other)
            assert other.done() is asynchronous
            assert not held.done()
            latch.release()
            await quickly(other)


def test_faces_share_the_places_of_one_hardware_queue() -> None:
    """Any number of aliases of the default stream together never submit so much work that a call would block."""
    driver = SimulatedDriver(seed=1)
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(flooded(driver)) == {400 // 8}
    assert driver.violations == []
    driver.close()


@pytest.mark.asyncio
async def test_waiters_are_woken_without_a_notifier() -> None:
    """A timer asks, and a policy that polls polls."""
    for policy in ("latency", "balanced", "efficient"):
        async with aiocuda.open_device(driver="simulated", policy=policy, asynchronous=False) as device:
            stream = device.stream()
            for _ in range(20):
                await quickly(stream.fill(stream.empty(SIZE), 1))
            assert device.statistics().parks == 0
            assert resources_of(device).device_state.budget.tokens == list(range(24))  # they are there, for others


async def flooded(driver: SimulatedDriver) -> set[int]:
    """Eight streams of two openings of a device, each given more than it may hold; the limits of them."""
    async with (
        aiocuda.open_device(driver=driver, asynchronous=False) as device,
        aiocuda.open_device(driver=driver, asynchronous=False) as other,
    ):
        streams = [opened.stream() for opened in (device, other) for _ in range(4)]
        buffers = [stream.empty(64, np.uint8) for stream in streams]
        for _ in range(200):
            for stream, buffer in zip(streams, buffers, strict=True):
                stream.fill(buffer, 1)
        return {stream._queue.device_hot.limit for stream in streams}


@pytest.mark.asyncio
async def test_each_device_has_its_own_default_stream() -> None:
    with contextlib.closing(HostDriver(devices=2)) as host:
        async with (
            ManagedContext(0, driver=host, asynchronous=False) as first,
            ManagedContext(1, driver=host, asynchronous=False) as second,
            ManagedContext(1, driver=host, asynchronous=False) as third,
        ):
            with Latch(first.device) as latch:
                latch.hold(first.stream("compute"))
                await quickly(latch.held())
                for context in (second, third):
                    stream = context.stream("compute")
                    assert value(await quickly(stream.download(await stream.upload(np.full(4, 3))))) == 3
            assert host.statistics()["streams_created"] == 0


@pytest.mark.asyncio
async def test_the_default_stream_can_be_imported_beside_it() -> None:
    """The default stream belongs to no loop: a stream made from CUDA's handle of it is in order with the device's."""
    async with ManagedContext(driver="host", asynchronous=False) as context:
        device, own = context.device, context.stream("compute")
        handle = device.driver.stream_handle(own._queue.handle)
        imported = Stream.from_handle(device, handle)
        assert (
            resources_of(device).imports.queue_of(handle).rare.imported
        )  # made from the handle, it is not the device's own stream
        buffer = own.empty(SIZE, np.uint8)
        with Latch(device) as latch:
            latch.hold(own)
            await quickly(latch.held())
            operation = imported.fill(buffer, 5)
            assert not operation.done()
            latch.release()
            await quickly(operation)
        assert value(await own.download(buffer)) == 5


@pytest.mark.asyncio
async def test_a_fault_reaches_all_waiters() -> None:
    with pytest.raises(DeviceFault):
        async with ManagedContext(driver="host", asynchronous=False) as context:
            broken = context.stream("compute").launch(TRAP, 1, 1)
            context.stream("upload").wait(broken)  # else the fills may end while the kernel is being loaded
            others = [context.stream("upload").fill(context.stream("upload").empty(4), 1) for _ in range(3)]
            for operation in (broken, *others):
                with pytest.raises(DeviceFault):
                    await quickly(operation)
            await context.triple_buffered_step(numbered(0))


@pytest.mark.asyncio
async def test_a_failed_submission_spoils_one_stream_only() -> None:
    async with open_peer(asynchronous=False) as (peer, device):
        left, right = device.stream(), device.stream()
        buffers = [stream.empty(SIZE) for stream in (left, right)]
        peer.refuse("fill")
        broken = left.fill(buffers[0], 1)
        await quickly(right.fill(buffers[1], 2))
        with pytest.raises(aiocuda.DriverError, match="does not take this"):
            await broken
        await quickly(left.fill(buffers[0], 1))


@pytest.mark.asyncio
async def test_the_context_ends_with_work_under_way() -> None:
    async with ManagedContext(driver="host", asynchronous=False) as context:
        with Latch(context.device) as latch:
            held = latch.hold(context.stream("compute"))
            await quickly(latch.held())
            asyncio.get_running_loop().call_soon(latch.release)
        last = context.stream("upload").fill(context.stream("upload").empty(SIZE), 1)
    assert held.done()
    assert last.done()
    await until(lambda: context.device.closed)
