"""Bound launches and copies: the second use prepares a function, and anything unusual takes the way with all checks."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    SkippedError,
    StaleHandleError,
    Stream,
)
from aiocuda.device.streams._transfers import MOST_BOUND
from aiocuda.driver.host import HostDriver
from aiocuda.observe import Instrument
from tests.helpers import AFFINE, Latch, Peer, open_peer, quickly, refusal, until

pytestmark = pytest.mark.asyncio


class Repeated:
    """A pinned array, a buffer and a result array, whose copies in both directions are bound."""

    def __init__(self, device: Device, stream: Stream, count: int = 16) -> None:
        self.stream = stream
        self.source = device.pinned(count, "i4")
        self.target = device.pinned(count, "i4")
        self.buffer = stream.empty(count, "i4")
        self.source[:] = 0

    async def bind(self) -> None:
        for _ in range(2):
            await self.up()
            await self.down()

    def up(self) -> aiocuda.Operation[None]:
        return self.stream.copy(self.buffer, self.source)

    def down(self) -> aiocuda.Operation[None]:
        return self.stream.copy(self.target, self.buffer)


async def test_repeated_copies_move_the_present_contents(device: Device, stream: Stream) -> None:
    copies = Repeated(device, stream)
    for value in range(6):
        copies.source[:] = value
        await copies.up()
        await copies.down()
        assert copies.target.tolist() == [value] * 16
    statistics = stream.statistics()
    assert (statistics.uploads, statistics.downloads) == (6, 6)
    assert (statistics.bytes_uploaded, statistics.bytes_downloaded) == (6 * 64, 6 * 64)


async def test_repeated_copies_and_launches_keep_their_order(device: Device, stream: Stream) -> None:
    copies = Repeated(device, stream)
    await device.load(AFFINE)
    await copies.bind()
    copies.source[:] = 1
    for _ in range(3):
        copies.up()
        for _ in range(4):
            stream.launch(AFFINE, 1, 32, copies.buffer.view("u4"), 16, 2, 1)
        await copies.down()
        assert copies.target.tolist() == [31] * 16


async def test_bound_copy_does_not_keep_memory_alive(device: Device, stream: Stream) -> None:
    copies = Repeated(device, stream)
    await copies.bind()
    gone: list[weakref.ref[Any]] = [weakref.ref(copies.buffer), weakref.ref(copies.source), weakref.ref(copies.target)]
    before = device.memory.statistics().live_bytes
    del copies
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    await stream.synchronize()
    stream.empty(1).free()  # it frees the blocks that were dropped
    assert device.memory.statistics().live_bytes == before - 64


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda array: setattr(array, "shape", (4, 4)), InvalidArgumentError),
        (lambda array: setattr(array, "dtype", np.dtype("f4")), InvalidTypeError),
    ],
    ids=["shape", "dtype"],
)
async def test_array_that_was_changed_in_place_is_checked_again(
    device: Device, stream: Stream, change: Callable[[Any], None], error: type[Exception]
) -> None:
    copies = Repeated(device, stream)
    await copies.bind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2.5
        change(copies.source)
        change(copies.target)
    with pytest.raises(error):
        copies.up()
    with pytest.raises(error):
        copies.down()


async def test_array_that_became_read_only_is_no_target(device: Device, stream: Stream) -> None:
    copies = Repeated(device, stream)
    await copies.bind()
    copies.target.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="read-only"):
        copies.down()
    copies.source.flags.writeable = False
    await copies.up()


async def test_freed_memory_is_not_copied(device: Device, stream: Stream) -> None:
    copies = Repeated(device, stream)
    await copies.bind()
    copies.buffer.free()
    with pytest.raises(StaleHandleError):
        copies.up()
    with pytest.raises(StaleHandleError):
        copies.down()
    others = Repeated(device, stream)
    await others.bind()
    others.source.free()
    with pytest.raises(StaleHandleError):
        others.up()


async def test_target_of_a_running_download_is_busy(device: Device, stream: Stream, latch: Latch) -> None:
    copies = Repeated(device, stream)
    await copies.bind()
    latch.hold(stream)
    await latch.held()
    first = copies.down()
    with pytest.raises(BusyError, match="is writing this"):
        copies.down()
    latch.release()
    await first
    await copies.down()


async def test_repeated_work_is_refused_by_a_closed_stream(device: Device) -> None:
    async with device.stream() as stream:
        copies = Repeated(device, stream)
        await copies.bind()
        await device.load(AFFINE)
        words = copies.buffer.view("u4")
        for _ in range(3):
            await stream.launch(AFFINE, 1, 32, words, 16, 1, 0)
    again: Callable[[], object]
    for again in (copies.up, copies.down, lambda: stream.launch(AFFINE, 1, 32, words, 16, 1, 0)):
        with pytest.raises(ClosedError):
            again()


async def test_repeated_work_waits_on_the_host_if_the_stream_is_full() -> None:
    async with aiocuda.open_device(driver=HostDriver(), max_in_flight=2) as device, device.stream() as stream:
        copies = Repeated(device, stream)
        await copies.bind()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            copies.source[:] = 5
            uploads = [copies.up() for _ in range(5)]
            download = copies.down()
            assert (uploads[0].state, uploads[-1].state, download.state) == ("submitted", "queued", "queued")
            latch.release()
            await quickly(download)
        assert copies.target.tolist() == [5] * 16


@pytest.mark.parametrize("verb", ["upload", "event_record"])
async def test_refused_repeated_copy_fails_alone_and_skips_later_work(verb: str) -> None:
    """If only the record is refused, the stream has accepted the copy."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        copies = Repeated(device, stream)
        await copies.bind()
        copies.source[:] = 7
        peer.refuse(verb)
        failed, skipped = copies.up(), copies.down()
        with pytest.raises(DriverError, match="does not take this"):
            await quickly(failed)
        with pytest.raises(SkippedError):
            await quickly(skipped)
        await quickly(copies.down())
        assert copies.target.tolist() == [7 if verb == "event_record" else 0] * 16
        await copies.up()
        assert device.statistics().in_flight == 0


@pytest.mark.parametrize("verb", ["upload", "event_record"])
async def test_interrupted_repeated_copy_does_not_lose_the_stream(verb: str) -> None:
    """Ctrl-C inside the driver call: it is unknown whether the device copies. In the record: it does."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        copies = Repeated(device, stream)
        await copies.bind()
        copies.source[:] = 7
        peer.refuse(verb, error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            copies.up()
        if verb == "upload":
            with pytest.raises(SkippedError):
                await quickly(copies.down())
        await quickly(copies.down())
        assert copies.target.tolist() == [7 if verb == "event_record" else 0] * 16
        await until(lambda: device.statistics().in_flight == 0, "the end of all operations")


async def test_repeated_copy_makes_the_same_driver_calls() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        copies = Repeated(device, stream)
        await copies.bind()
        peer.calls.clear()
        await copies.up()
        assert (peer.calls["upload"], peer.calls["event_record"]) == (1, 1)


async def test_instrument_sees_repeated_work(device: Device, stream: Stream) -> None:
    copies = Repeated(device, stream)
    await copies.bind()

    class Listener(Instrument):
        timing = False

        def __init__(self) -> None:
            self.kinds: list[str] = []

        def on_submit(self, operation: aiocuda.Operation[Any]) -> None:
            self.kinds.append(operation.kind)

        def on_resolve(self, operation: aiocuda.Operation[Any], start: int, end: int) -> None:
            return None

    listener = Listener()
    with device.listen(listener):
        await copies.up()
        await copies.down()
    await copies.up()
    assert listener.kinds == ["upload", "download"]


async def test_bound_copies_are_limited(device: Device, stream: Stream) -> None:
    """Each pair of objects is one entry; from the limit on, the record starts anew."""
    source = device.pinned(4, "i4")
    buffers = [stream.empty(4, "i4") for _ in range(MOST_BOUND + 10)]
    for _ in range(3):
        for buffer in buffers:
            stream.copy(buffer, source)
        await stream.synchronize()
    assert len(stream._transfers._bound) <= MOST_BOUND
    assert len(stream._transfers._made) <= MOST_BOUND


async def test_copies_of_new_buffers_are_not_bound(device: Device, stream: Stream) -> None:
    """A new buffer may have the id of one that was collected."""
    source = device.pinned(4, "i4")
    for _ in range(20):
        await stream.copy(stream.empty(4, "i4"), source)
    assert stream._transfers._bound == {}


async def test_bound_copy_of_another_opening_is_refused_after_its_close() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as two:
            one = await aiocuda.open_device(driver=peer.driver)
            home, foreign = one.stream(), two.stream()
            copies = Repeated(one, home)
            copies.stream = foreign
            await copies.bind()
            await one.aclose()
            with pytest.raises((StaleHandleError, ClosedError)):
                copies.up()


async def test_bound_launch_checks_its_arguments_each_time(device: Device, stream: Stream) -> None:
    await device.load(AFFINE)
    words = stream.empty(16, "u4")
    for _ in range(3):
        await stream.launch(AFFINE, 1, 32, words, 16, 1, 0)
    with pytest.raises(InvalidTypeError, match="4 arguments, 3 given"):
        stream.launch(AFFINE, 1, 32, words, 16, 1)
    with pytest.raises(InvalidTypeError):
        stream.launch(AFFINE, 1, 32, words, 16, 1.5, 0)
    words.free()
    with pytest.raises(StaleHandleError):
        stream.launch(AFFINE, 1, 32, words, 16, 1, 0)


async def test_bound_launch_in_another_loop_is_refused(device: Device, stream: Stream) -> None:
    await device.load(AFFINE)
    words = stream.empty(16, "u4")
    copies = Repeated(device, stream)
    await copies.bind()
    for _ in range(3):
        await stream.launch(AFFINE, 1, 32, words, 16, 1, 0)

    async def elsewhere() -> None:
        for again in (copies.up, lambda: stream.launch(AFFINE, 1, 32, words, 16, 1, 0)):
            with pytest.raises(aiocuda.WrongLoopError):
                again()

    await asyncio.to_thread(asyncio.run, elsewhere())


async def test_refused_bound_launch_fails_its_operation() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        await device.load(AFFINE)
        words = stream.empty(16, "u4")
        for _ in range(3):
            await stream.launch(AFFINE, 1, 32, words, 16, 1, 0)
        peer.refuse("launch", error=refusal)
        with pytest.raises(DriverError):
            await quickly(stream.launch(AFFINE, 1, 32, words, 16, 1, 0))
        await quickly(stream.launch(AFFINE, 1, 32, words, 16, 1, 0))
