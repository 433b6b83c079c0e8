"""The migrations of managed memory, inferred from the order of its uses, and the suggested prefetches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import Device, Kernel, Stream, UnifiedBuffer
from aiocuda.driver.host import HostDriver
from aiocuda.memory._migrations import MOST_REMEMBERED, PAGE, Migration
from tests.helpers import open_peer, quickly

pytestmark = pytest.mark.asyncio

SIZE = 4 * PAGE

READ = Kernel(
    "total",
    source="""
        __global__ void total(const unsigned char* bytes, unsigned int* sum, int n) {
            unsigned int found = 0;
            for (int i = 0; i < n; i++) found += bytes[i];
            *sum = found;
        }
    """,
    host=lambda data, total, n: total.__setitem__(0, data.sum(dtype=np.uint32)),
)

BUMP = Kernel(
    "bump",
    source="__global__ void bump(unsigned char* bytes, int n) { for (int i = 0; i < n; i++) bytes[i] += 1; }",
    host=lambda data, n: np.add(data, 1, out=data),
)


@pytest_asyncio.fixture
async def total(stream: Stream) -> AsyncIterator[Any]:
    yield stream.empty(1, np.uint32)


def ways(buffer: UnifiedBuffer) -> list[tuple[str | int, str | int, int, bool]]:
    return [(each.source, each.target, each.nbytes, each.asked) for each in buffer.migrations()]


def read(stream: Stream, buffer: UnifiedBuffer, total: Any) -> aiocuda.Operation[None]:
    return stream.launch(READ, 1, 1, buffer, total, buffer.nbytes)


async def test_to_the_device_and_back_on_demand(device: Device, stream: Stream, total: Any) -> None:
    buffer = device.unified(SIZE, np.uint8)
    before = device.driver.now()
    buffer.array[:] = 1
    assert buffer.migrations() == ()  # its first touch moves nothing
    await read(stream, buffer, total)
    await read(stream, buffer, total)
    assert ways(buffer) == [("host", 0, SIZE, False)]
    np.asarray(buffer)
    np.asarray(buffer)
    assert ways(buffer) == [("host", 0, SIZE, False), (0, "host", SIZE, False)]
    there, back = buffer.migrations()
    assert isinstance(there, Migration)
    assert (there.address, there.shape) == (buffer.address, (SIZE,))
    assert there.dtype == np.uint8
    assert (there.operation, back.operation) == ("launch total", "asarray")
    assert before <= there.when <= back.when <= device.driver.now()


async def test_prefetches_are_asked_for(device: Device, stream: Stream, total: Any) -> None:
    buffer = device.unified(SIZE, np.uint8)
    await stream.prefetch(buffer)
    assert buffer.migrations() == ()  # there was nothing to move
    buffer.array[:] = 1
    await stream.prefetch(buffer)
    await stream.prefetch(buffer)  # there already
    await read(stream, buffer, total)
    await stream.prefetch(buffer, "host")
    np.asarray(buffer)
    assert ways(buffer)[-2:] == [("host", 0, SIZE, True), (0, "host", SIZE, True)]
    assert {each.operation for each in buffer.migrations()[-2:]} == {"prefetch"}


async def test_every_verb_of_a_stream_brings_it_to_the_device(device: Device, stream: Stream) -> None:
    buffer, plain = device.unified(SIZE, np.uint8), stream.empty(SIZE, np.uint8)
    verbs: dict[str, Callable[[], Awaitable[object]]] = {
        "launch bump": lambda: stream.launch(BUMP, 1, 1, buffer, SIZE),
        "download": lambda: stream.download(buffer),
        "upload": lambda: stream.copy(buffer, np.ones(SIZE, np.uint8)),
        "fill": lambda: stream.fill(buffer, 3),
        "copy": lambda: stream.copy(plain, buffer),
    }
    for name, verb in verbs.items():
        buffer.array[:] = 1
        await verb()
        assert ways(buffer)[-1] == ("host", 0, SIZE, False), name
        assert buffer.migrations()[-1].operation == name
    buffer.array[:] = 1
    await stream.copy(buffer, plain)
    assert buffer.migrations()[-1].operation == "copy"


async def test_parts_move_by_themselves_in_whole_pages(device: Device, stream: Stream, total: Any) -> None:
    whole = device.unified(SIZE, np.uint8)
    whole.array[:] = 1
    await read(stream, whole[PAGE : PAGE + 5], total)
    assert ways(whole) == [("host", 0, PAGE, False)]
    await read(stream, whole[PAGE - 1 : 2 * PAGE + 1], total)  # and the pages on both sides
    assert ways(whole)[1:] == [("host", 0, 2 * PAGE, False)]
    await read(stream, whole, total)
    assert ways(whole)[2:] == [("host", 0, PAGE, False)]
    assert whole[3:].migrations() == whole.migrations()
    small = device.unified(10, np.uint8)
    small.array[:] = 1
    await read(stream, small, total)
    assert ways(small) == [("host", 0, 10, False)]


async def test_what_is_read_mostly_is_copied_and_stays(device: Device, stream: Stream, total: Any) -> None:
    buffer = device.unified(SIZE, np.uint8)
    buffer.array[:] = 1
    await buffer.advise("read_mostly")
    for _ in range(3):
        await read(stream, buffer, total)
        np.asarray(buffer)
    assert ways(buffer) == [("host", 0, SIZE, False)]
    buffer.array[:] = 2  # ends the device's copy
    await read(stream, buffer, total)
    assert ways(buffer)[1:] == [("host", 0, SIZE, False)]
    await stream.launch(BUMP, 1, 1, buffer, SIZE)  # ends the host's
    np.asarray(buffer)
    assert ways(buffer)[2:] == [(0, "host", SIZE, False)]
    await buffer.unadvise("read_mostly")
    await read(stream, buffer, total)
    np.asarray(buffer)
    assert len(ways(buffer)) > 3


@pytest.mark.parametrize(("advice", "to"), [("accessed_by", "device"), ("preferred_location", "host")])
async def test_what_is_reached_from_afar_stays(
    device: Device, stream: Stream, total: Any, advice: Any, to: str
) -> None:
    buffer = device.unified(SIZE, np.uint8)
    await buffer.advise(advice, to)
    for _ in range(3):
        buffer.array[:] = 1
        await read(stream, buffer, total)
    assert ways(buffer) == []
    assert buffer.suggest_prefetch() == ()
    await stream.prefetch(buffer)
    assert ways(buffer) == [("host", 0, SIZE, True)]


async def test_the_record_is_bounded_and_of_one_buffer(device: Device, stream: Stream) -> None:
    buffer, other = device.unified(4, np.uint8), device.unified(4, np.uint8)
    for _ in range(MOST_REMEMBERED):
        buffer.array[:] = 1
        stream.fill(buffer, 1)
        await asyncio.sleep(0)
    await stream.synchronize()
    assert len(buffer.migrations()) == MOST_REMEMBERED
    assert buffer.migrations()[-1].operation == "fill"
    assert other.migrations() == ()
    address = buffer.address
    buffer.free()
    again = device.unified(4, np.uint8)
    assert again.address == address
    assert again.migrations() == ()


async def test_after_a_kernel_that_is_being_loaded(device: Device) -> None:
    async with open_peer() as (peer, fresh), fresh.stream() as stream:
        buffer = fresh.unified(SIZE, np.uint8)
        buffer.array[:] = 1
        with peer.holding_jobs():
            launch = stream.launch(BUMP, 1, 1, buffer, SIZE)
            assert buffer.migrations()[-1].operation == "launch bump"
        await quickly(launch)


# Suggestions


async def test_host_write_then_device_read_seen_twice(device: Device, stream: Stream, total: Any) -> None:
    buffer = device.unified((4, PAGE // 4), np.uint32)
    words = Kernel(
        "words",
        source="__global__ void words(const unsigned int* in, unsigned int* out) { *out = *in; }",
        host=lambda source, target: target.__setitem__(0, source.flat[0]),
    )
    buffer.array[:] = 1
    await stream.launch(words, 1, 1, buffer, total)
    assert buffer.suggest_prefetch() == ()  # once may be chance
    buffer.array[:] = 2
    await stream.launch(words, 1, 1, buffer, total)
    (suggestion,) = buffer.suggest_prefetch()
    assert suggestion.buffer.address == buffer.address
    assert suggestion.buffer.shape == buffer.shape
    assert (suggestion.to, suggestion.before, suggestion.nbytes, suggestion.seen) == (0, "launch words", 4 * PAGE, 2)
    assert "2 times the host wrote" in suggestion.why
    assert "`stream.prefetch(buffer, 0)`" in suggestion.why
    # It can be followed unchanged, and then there is no further suggestion.
    buffer.array[:] = 3
    await stream.prefetch(suggestion.buffer, suggestion.to)
    await stream.launch(words, 1, 1, buffer, total)
    assert buffer.migrations()[-1].asked
    assert buffer.suggest_prefetch() == ()


async def test_suggestion_is_for_the_part_that_is_read(device: Device, stream: Stream, total: Any) -> None:
    whole = device.unified(SIZE, np.uint8)
    for _ in range(2):
        whole.array[:] = 1
        await read(stream, whole[PAGE:], total)
    (suggestion,) = whole.suggest_prefetch()
    assert suggestion.buffer.address == whole.address + PAGE
    assert suggestion.nbytes == suggestion.buffer.nbytes == SIZE - PAGE


async def _device_only(stream: Stream, buffer: UnifiedBuffer, total: Any) -> None:
    await stream.fill(buffer, 1)
    await stream.launch(BUMP, 1, 1, buffer, SIZE)
    await read(stream, buffer, total)


async def _host_only(stream: Stream, buffer: UnifiedBuffer, total: Any) -> None:
    buffer.array[:] = 1
    np.asarray(buffer)


async def _prefetched(stream: Stream, buffer: UnifiedBuffer, total: Any) -> None:
    buffer.array[:] = 1
    stream.prefetch(buffer)
    await read(stream, buffer, total)


async def _written_by_the_device(stream: Stream, buffer: UnifiedBuffer, total: Any) -> None:
    buffer.array[:] = 1
    await stream.fill(buffer, 2)  # reads nothing of what the host wrote


async def _read_by_both(stream: Stream, buffer: UnifiedBuffer, total: Any) -> None:
    np.asarray(buffer)
    await read(stream, buffer, total)


async def _smaller_than_a_page(stream: Stream, buffer: UnifiedBuffer, total: Any) -> None:
    part = buffer[: PAGE - 1]
    part.array[:] = 1
    await read(stream, part, total)


async def _other_parts(stream: Stream, buffer: UnifiedBuffer, total: Any) -> None:
    buffer[: 2 * PAGE].array[:] = 1
    await read(stream, buffer[2 * PAGE :], total)


@pytest.mark.parametrize(
    "pattern",
    [
        _device_only,
        _host_only,
        _prefetched,
        _written_by_the_device,
        _read_by_both,
        _smaller_than_a_page,
        _other_parts,
    ],
    ids=lambda pattern: pattern.__name__.strip("_"),
)
async def test_nothing_is_suggested_where_nothing_is_gained(
    device: Device, stream: Stream, total: Any, pattern: Callable[..., Awaitable[None]]
) -> None:
    buffer = device.unified(SIZE, np.uint8)
    for _ in range(4):
        await pattern(stream, buffer, total)
    assert buffer.suggest_prefetch() == ()


async def test_read_mostly_and_only_read(device: Device, stream: Stream, total: Any) -> None:
    buffer = device.unified(SIZE, np.uint8)
    buffer.array[:] = 1
    await buffer.advise("read_mostly")
    for _ in range(4):
        await _read_by_both(stream, buffer, total)
    assert buffer.suggest_prefetch() == ()


async def test_there_are_several_devices() -> None:
    driver = HostDriver(devices=2)
    try:
        async with aiocuda.open_device(1, driver=driver) as device, device.stream() as stream:
            buffer, total = device.unified(SIZE, np.uint8), stream.empty(1, np.uint32)
            for _ in range(2):
                buffer.array[:] = 1
                await read(stream, buffer, total)
            assert ways(buffer) == [("host", 1, SIZE, False), (1, "host", SIZE, False), ("host", 1, SIZE, False)]
            (suggestion,) = buffer.suggest_prefetch()
            assert suggestion.to == 1
            await stream.prefetch(buffer, 0)
            assert ways(buffer)[-1] == (1, 0, SIZE, True)
    finally:
        driver.close()


async def test_nothing_is_asked_of_other_memory(device: Device, stream: Stream) -> None:
    """A launch without managed memory goes the quick way: a block that is ready, and no record."""
    plain = stream.empty(SIZE, np.uint8)
    await stream.launch(BUMP, 1, 1, plain, SIZE)
    assert plain._block.ready
    assert not hasattr(plain._block, "migrations")
    assert not device.unified(4)._block.ready
