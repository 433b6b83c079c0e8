from __future__ import annotations

import pytest

from aiocuda.driver.software.rules import Block, DeviceMemory, IllegalAddressError
from aiocuda.errors import DeviceOutOfMemory, InvalidArgumentError, StaleHandleError

STREAM, OTHER = 1, 2


@pytest.fixture
def memory() -> DeviceMemory:
    return DeviceMemory(devices=2, nbytes=1000)


def allocate(memory: DeviceMemory, nbytes: int, stream: int = STREAM, device: int = 0) -> Block:
    """Allocated, and reached by its stream."""
    block = memory.allocate(device, nbytes, stream)
    memory.map(block)
    return block


def free(memory: DeviceMemory, block: Block, stream: int = STREAM) -> None:
    """Freed, and reached by its stream."""
    memory.unmap(memory.deallocate(block.address, stream), stream)


def test_view_is_of_the_bytes_themselves(memory: DeviceMemory) -> None:
    block = allocate(memory, 100)
    memory.view(0, block.address, 100)[:] = 7
    memory.view(0, block.address + 10, 5)[:] = 9
    assert memory.view(0, block.address, 100).sum() == 95 * 7 + 5 * 9


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (-1, 100), (100, 1), (99, 2), (0, 101), (-(10**6), 1)])
def test_range_that_is_not_all_there_is_illegal(memory: DeviceMemory, offset: int, nbytes: int) -> None:
    block = allocate(memory, 100)
    allocate(memory, 100)
    with pytest.raises(IllegalAddressError, match="not all allocated"):
        memory.view(0, block.address + offset, nbytes)


def test_memory_cannot_be_touched_before_its_place_in_the_order(memory: DeviceMemory) -> None:
    block = memory.allocate(0, 100, STREAM)
    with pytest.raises(IllegalAddressError):
        memory.view(0, block.address, 1)
    memory.map(block)
    memory.deallocate(block.address, STREAM)
    assert memory.view(0, block.address, 100).size == 100
    memory.unmap(block, STREAM)
    with pytest.raises(IllegalAddressError):
        memory.view(0, block.address, 1)


def test_another_device_cannot_touch_it(memory: DeviceMemory) -> None:
    block = allocate(memory, 100, device=1)
    assert memory.device_of(block.address) == 1
    with pytest.raises(IllegalAddressError, match="on device 0"):
        memory.view(0, block.address, 1)


def test_free_before_its_allocation_is_reached_is_illegal(memory: DeviceMemory) -> None:
    block = memory.allocate(0, 100, STREAM)
    memory.deallocate(block.address, OTHER)
    with pytest.raises(IllegalAddressError, match=f"freed on stream {OTHER}"):
        memory.unmap(block, OTHER)


def test_addresses_are_never_used_twice_and_are_not_the_hosts(memory: DeviceMemory) -> None:
    seen = set()
    for _ in range(100):
        block = allocate(memory, 500)
        assert block.address % 256 == 0
        assert 2**60 <= block.address < 2**63
        seen.add(block.address)
        free(memory, block)
    assert len(seen) == 100


def test_freeing_twice_is_refused(memory: DeviceMemory) -> None:
    block = allocate(memory, 100)
    memory.deallocate(block.address, STREAM)
    with pytest.raises(StaleHandleError, match=f"{block.address:#x}"):
        memory.deallocate(block.address, STREAM)


def test_limit_is_kept_and_the_next_allocation_may_work(memory: DeviceMemory) -> None:
    kept = allocate(memory, 600)
    with pytest.raises(DeviceOutOfMemory) as caught:
        memory.allocate(0, 500, STREAM)
    assert (caught.value.requested, caught.value.free) == (500, 400)
    allocate(memory, 400)
    allocate(memory, 1000, device=1)
    free(memory, kept)
    allocate(memory, 600)


def test_what_a_stream_frees_is_taken_over_by_that_stream_only(memory: DeviceMemory) -> None:
    first = allocate(memory, 900)
    memory.deallocate(first.address, STREAM)
    with pytest.raises(DeviceOutOfMemory):
        memory.allocate(0, 500, OTHER)
    second = memory.allocate(0, 700, STREAM)
    with pytest.raises(DeviceOutOfMemory):
        memory.allocate(0, 400, STREAM)  # 200 are left of the 900, and 100 are free
    memory.unmap(first, STREAM)
    memory.map(second)
    memory.allocate(0, 300, OTHER)
    with pytest.raises(DeviceOutOfMemory):
        memory.allocate(0, 1, OTHER)


def test_several_frees_are_taken_over_by_one_allocation(memory: DeviceMemory) -> None:
    blocks = [allocate(memory, 300) for _ in range(3)]
    for block in blocks:
        memory.deallocate(block.address, STREAM)
    taken = memory.allocate(0, 800, STREAM)
    for block in blocks:
        memory.unmap(block, STREAM)
    memory.map(taken)
    memory.trim(0, 0)
    assert memory.info(0) == (200, 1000)
    free(memory, taken)
    memory.trim(0, 0)
    assert memory.info(0) == (1000, 1000)


def test_everything_given_back_leaves_everything_free(memory: DeviceMemory) -> None:
    for _ in range(3):
        first = allocate(memory, 400)
        memory.deallocate(first.address, STREAM)
        second = memory.allocate(0, 900, STREAM)
        memory.unmap(first, STREAM)
        memory.map(second)
        free(memory, second)
    memory.trim(0, 0)
    assert memory.info(0) == (1000, 1000)
    assert memory.reserved(0) == 0


def test_pool_keeps_what_is_freed_until_it_is_trimmed(memory: DeviceMemory) -> None:
    big, small = allocate(memory, 600), allocate(memory, 100)
    free(memory, big)
    assert (memory.reserved(0), memory.info(0)) == (700, (300, 1000))
    memory.trim(0, 400)
    assert memory.reserved(0) == 400
    memory.trim(0, 0)
    assert (memory.reserved(0), memory.info(0)) == (100, (900, 1000))
    free(memory, small)
    memory.trim(0, 50)
    assert memory.reserved(0) == 50


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_allocated(memory: DeviceMemory, nbytes: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{nbytes} bytes"):
        memory.allocate(0, nbytes, STREAM)


def test_machine_without_so_much_memory_is_out_of_memory() -> None:
    memory = DeviceMemory(devices=1, nbytes=2**62)
    with pytest.raises(DeviceOutOfMemory) as caught:
        memory.allocate(0, 2**61, STREAM)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert memory.info(0) == (2**62, 2**62)
