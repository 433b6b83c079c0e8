from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from aiocuda._base._types import Span
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import ManagedAttributes
from aiocuda.errors import (
    BusyError,
    DeviceFault,
    DeviceOutOfMemory,
    InvalidArgumentError,
    StaleHandleError,
    WrongDeviceError,
)
from tests.driver.host.kit import PATIENCE, Rig, address_of


def test_bytes_go_up_across_and_down(rig: Rig) -> None:
    stream = rig.stream()
    content = np.arange(1000, dtype="u4")
    first = rig.uploaded(stream, content, "u4")
    second = rig.driver.allocate(0, content.nbytes, stream)
    rig.driver.copy(stream, second, first, content.nbytes)
    assert (rig.download(stream, second, 1000, "u4") == content).all()
    assert (rig.download(stream, second + 400, 10, "u4") == content[100:110]).all()


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_fill_repeats_its_pattern(rig: Rig, size: int) -> None:
    stream = rig.stream()
    pattern = bytes(range(1, size + 1))
    address = rig.driver.allocate(0, 100 * size + 2, stream)
    rig.driver.fill(stream, address, b"\xff", 100 * size + 2)
    rig.driver.fill(stream, address + 1, pattern, 100)
    assert rig.download(stream, address, 100 * size + 2).tobytes() == b"\xff" + pattern * 100 + b"\xff"


@pytest.mark.parametrize("pattern", [b"", b"abc", b"x" * 32])
def test_fill_refuses_other_patterns(rig: Rig, pattern: bytes) -> None:
    stream = rig.stream()
    address = rig.driver.allocate(0, 96, stream)
    with pytest.raises(InvalidArgumentError, match=f"has {len(pattern)}"):
        rig.driver.fill(stream, address, pattern, 3)


def test_nothing_is_copied_at_once(rig: Rig) -> None:
    stream = rig.stream()
    address = rig.driver.allocate(0, 8, stream)
    calls = rig.driver.statistics()["threads"]
    rig.driver.upload(stream, address, 1, 0)
    rig.driver.copy(stream, address, address, 0)
    rig.driver.fill(stream, address, b"\0", 0)
    assert rig.driver.stream_query(stream)
    assert rig.driver.statistics()["threads"] == calls
    with pytest.raises(InvalidArgumentError, match="cannot copy or fill -1"):
        rig.driver.copy(stream, address, address, -1)


@pytest.mark.slow
def test_upload_changes_its_target_when_it_ends_and_not_before() -> None:
    rig = Rig(HostDriver(latency=0.4, bandwidth=math.inf))
    stream, other = rig.stream(), rig.stream()
    target = Span(rig.driver.allocate(0, 8, stream), (8,), "|u1")
    rig.driver.fill(stream, target.address, b"\1", 8)
    source = rig.pinned([2] * 8)
    rig.finish(stream)
    seen: list[int] = []
    rig.driver.upload(stream, target.address, address_of(source), 8)
    done = rig.record(stream)
    rig.launch(other, lambda data: seen.extend(data), target, format="P")
    rig.finish(other)
    assert not rig.driver.event_query(done)
    assert seen == [1] * 8
    rig.launch(stream, lambda data: seen.extend(data), target, format="P")
    rig.finish(stream)
    assert seen == [1] * 8 + [2] * 8
    rig.driver.close()


def test_two_uploads_share_one_engine() -> None:
    rig = Rig(HostDriver(latency=0.0, bandwidth=1e6))
    streams = [rig.stream(), rig.stream()]
    source = rig.pinned(np.zeros(20_000))
    targets = [rig.driver.allocate(0, 20_000, stream) for stream in streams]
    start, ends = rig.record(streams[0], timing=True), []
    for stream, target in zip(streams, targets, strict=True):
        rig.driver.upload(stream, target, address_of(source), 20_000)
        ends.append(rig.record(stream, timing=True))
    rig.finish(*streams)
    assert rig.driver.event_elapsed_ms(start, ends[0]) >= 20.0
    assert rig.driver.event_elapsed_ms(start, ends[1]) >= 40.0
    rig.driver.close()


@pytest.mark.slow
def test_upload_download_and_kernel_overlap() -> None:
    """In a stream each, they take a third of the time that they take in one stream."""
    rig = Rig(HostDriver(latency=0.0, bandwidth=1e5))
    up, down, compute = rig.stream(), rig.stream(), rig.stream()
    host = rig.pinned(np.zeros(40_000))
    device = [rig.driver.allocate(0, 40_000, stream) for stream in (up, down)]
    rig.finish(up, down)

    def milliseconds(up: int, down: int) -> float:
        start = rig.record(compute, timing=True)
        rig.driver.upload(up, device[0], address_of(host), 40_000)
        rig.driver.download(down, address_of(host), device[1], 40_000)
        rig.launch(compute, lambda: None, seconds=0.4)
        for stream in {up, down} - {compute}:
            rig.driver.stream_wait(compute, rig.record(stream))
        end = rig.record(compute, timing=True)
        rig.finish(compute)
        return rig.driver.event_elapsed_ms(start, end)

    assert 400.0 <= milliseconds(up, down) < 0.6 * milliseconds(compute, compute)
    rig.driver.close()


def test_copy_between_devices(rig: Rig) -> None:
    here, there = rig.stream(0), rig.stream(1)
    source = rig.uploaded(here, range(100))
    target = rig.driver.allocate(1, 100, there)
    rig.driver.stream_wait(there, rig.record(here))
    rig.driver.copy_peer(there, target, 1, source, 0, 100)
    assert (rig.download(there, target, 100) == np.arange(100)).all()


def test_memory_of_another_device_is_refused(rig: Rig) -> None:
    here, there = rig.stream(0), rig.stream(1)
    mine, other = rig.driver.allocate(0, 8, here), rig.driver.allocate(1, 8, there)
    host = address_of(rig.pinned([0] * 8))
    driver = rig.driver
    for call in (
        lambda: driver.upload(here, other, host, 8),
        lambda: driver.download(here, host, other, 8),
        lambda: driver.copy(here, mine, other, 8),
        lambda: driver.copy(here, other, mine, 8),
        lambda: driver.fill(here, other, b"\0", 8),
        lambda: driver.deallocate(other, here),
        lambda: driver.copy_peer(here, mine, 1, other, 1, 8),
        lambda: driver.allocate(0, 8, there),
    ):
        with pytest.raises(WrongDeviceError, match="device 1"):
            call()
    rig.finish(here, there)
    assert driver.fault is None


def test_pageable_memory_is_refused(rig: Rig) -> None:
    stream = rig.stream()
    address = rig.driver.allocate(0, 8, stream)
    pageable = np.zeros(8, "u1")
    with pytest.raises(InvalidArgumentError, match=f"8 bytes at {address_of(pageable):#x} are not pinned"):
        rig.driver.upload(stream, address, address_of(pageable), 8)
    rig.driver.pin(address_of(pageable), 8)
    rig.driver.upload(stream, address, address_of(pageable), 8)
    with pytest.raises(BusyError):
        rig.driver.pin(address_of(pageable) + 4, 8)
    rig.driver.unpin(address_of(pageable))
    with pytest.raises(InvalidArgumentError):
        rig.driver.download(stream, address_of(pageable), address, 8)


def test_memory_is_freed_in_the_order_of_its_stream() -> None:
    rig = Rig(HostDriver(memory=1000))
    stream, other = rig.stream(), rig.stream()
    first = rig.driver.allocate(0, 900, stream)
    gate = rig.hold(stream)
    rig.driver.deallocate(first, stream)
    with pytest.raises(DeviceOutOfMemory) as caught:
        rig.driver.allocate(0, 800, other)
    assert (caught.value.requested, caught.value.free) == (800, 100)
    rig.driver.allocate(0, 800, stream)  # behind the free
    gate.open()
    rig.finish(stream)
    rig.driver.allocate(0, 100, other)
    rig.driver.pool_trim(0, 0)
    assert rig.driver.pool_reserved(0) == 900
    assert rig.driver.memory_info(0) == (100, 1000)
    rig.driver.close()


def test_use_after_free_is_an_illegal_address(rig: Rig) -> None:
    stream = rig.stream()
    address = rig.driver.allocate(0, 64, stream)
    rig.driver.deallocate(address, stream)
    rig.driver.allocate(0, 64, stream)
    rig.driver.fill(stream, address, b"\0", 64)
    with pytest.raises(DeviceFault, match=f"64 bytes at {address:#x}.*freed") as caught:
        rig.finish(stream)
    assert caught.value.code == 700


def test_use_before_the_allocation_is_reached_is_an_illegal_address(rig: Rig) -> None:
    stream, other = rig.stream(), rig.stream()
    gate = rig.hold(stream)
    address = rig.driver.allocate(0, 64, stream)
    rig.driver.fill(other, address, b"\0", 64)
    with pytest.raises(DeviceFault, match="without a wait for the stream that allocates"):
        rig.finish(other)
    gate.open()


def test_freeing_twice_is_refused(rig: Rig) -> None:
    stream = rig.stream()
    address = rig.driver.allocate(0, 64, stream)
    rig.driver.deallocate(address, stream)
    with pytest.raises(StaleHandleError, match=f"{address:#x} is not allocated"):
        rig.driver.deallocate(address, stream)
    rig.finish(stream)
    assert rig.driver.fault is None


def test_managed_memory_is_reached_from_both_sides(rig: Rig) -> None:
    stream = rig.stream()
    address = rig.driver.managed_allocate(0, 64)
    rig.driver.prefetch(stream, address, 64, 0)
    rig.driver.fill(stream, address, b"\7", 64)
    rig.launch(stream, lambda data: np.add(data, 1, out=data), Span(address, (64,), "|u1"), format="P")
    rig.driver.prefetch(stream, address, 64, -1)
    assert (rig.download(stream, address, 64) == 8).all()
    rig.driver.managed_deallocate(address)
    with pytest.raises(StaleHandleError, match="no managed memory"):
        rig.driver.managed_deallocate(address)


def test_only_managed_memory_is_prefetched(rig: Rig) -> None:
    stream = rig.stream()
    for address in (rig.driver.allocate(0, 64, stream), address_of(rig.pinned([0] * 64))):
        with pytest.raises(InvalidArgumentError, match="not managed memory"):
            rig.driver.prefetch(stream, address, 64, 0)
        with pytest.raises(InvalidArgumentError, match="not managed memory"):
            rig.driver.advise(address, 64, "set_read_mostly", 0)
        with pytest.raises(InvalidArgumentError, match="not managed memory"):
            rig.driver.managed_attributes(address, 64)


def test_advice_is_for_places_that_there_are(rig: Rig) -> None:
    address = rig.driver.managed_allocate(0, 64)
    with pytest.raises(InvalidArgumentError, match="no device 7"):
        rig.driver.advise(address, 64, "set_accessed_by", 7)
    rig.driver.advise(address, 64, "set_read_mostly", 7)  # which names no place
    assert rig.driver.managed_attributes(address, 64) == ManagedAttributes(read_mostly=True)


def test_advice_is_for_whole_pages(rig: Rig) -> None:
    address = rig.driver.managed_allocate(0, 3 * 4096)
    page = -(-address // 4096) * 4096
    rig.driver.advise(page + 10, 1, "set_read_mostly", 0)
    assert rig.driver.managed_attributes(page, 4096).read_mostly
    assert not rig.driver.managed_attributes(page, 4097).read_mostly
    rig.driver.advise(page + 4095, 2, "set_read_mostly", 0)
    assert rig.driver.managed_attributes(page, 8192).read_mostly


def test_the_next_in_the_same_place_has_no_advice(rig: Rig) -> None:
    first = rig.driver.managed_allocate(0, 1 << 16)
    rig.driver.advise(first, 1 << 16, "set_read_mostly", 0)
    rig.driver.managed_deallocate(first)
    for _ in range(1000):  # where memory lies is up to the C library
        address = rig.driver.managed_allocate(0, 1 << 16)
        assert rig.driver.managed_attributes(address, 1 << 16) == ManagedAttributes()
        if address == first:
            break
        rig.driver.managed_deallocate(address)
    else:
        pytest.fail("the memory was never used again: this shows nothing")


def test_advice_goes_with_the_memory(rig: Rig) -> None:
    """Neither what is allocated later in the same place has it, nor what lies beside it in the same page."""
    addresses = [rig.driver.managed_allocate(0, 64) for _ in range(2)]
    rig.driver.advise(addresses[0], 1, "set_preferred_location", -1)
    assert rig.driver.managed_attributes(addresses[0], 64) == ManagedAttributes(preferred_location=-1)
    assert rig.driver.managed_attributes(addresses[1], 64) == ManagedAttributes()
    rig.driver.managed_deallocate(addresses[0])
    with pytest.raises(InvalidArgumentError, match="not managed memory"):
        rig.driver.managed_attributes(addresses[0], 64)


def test_pinned_memory_is_given_back_when_the_devices_are_through(rig: Rig) -> None:
    stream = rig.stream()
    gate = rig.hold(stream)
    address = rig.driver.pinned_allocate(64)
    freed = threading.Event()

    def free() -> None:
        rig.driver.pinned_deallocate(address)
        freed.set()

    thread = threading.Thread(target=free)
    thread.start()
    device = rig.driver.allocate(0, 64, stream)
    rig.driver.download(stream, address, device, 64)  # found: it is not freed yet
    assert not freed.is_set()
    gate.open()
    thread.join(PATIENCE)
    assert freed.is_set()
    with pytest.raises(StaleHandleError, match="no pinned memory"):
        rig.driver.pinned_deallocate(address)
