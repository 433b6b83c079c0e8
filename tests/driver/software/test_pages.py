from __future__ import annotations

import numpy as np
import pytest

from aiocuda.driver.software.rules import HostPages, PageKind
from aiocuda.errors import BusyError, InvalidArgumentError, StaleHandleError


@pytest.fixture
def pages() -> HostPages:
    return HostPages()


@pytest.mark.parametrize("kind", ["pinned", "managed"])
@pytest.mark.parametrize("nbytes", [1, 63, 4096, 100_001])
def test_memory_is_aligned_and_found_by_address(pages: HostPages, kind: PageKind, nbytes: int) -> None:
    address = pages.allocate(kind, nbytes)
    assert address % 64 == 0
    found = pages.find(address, nbytes)
    assert found is not None
    assert found[0] == kind
    assert found[1].ctypes.data == address
    assert found[1].flags.writeable


def test_only_what_is_wholly_inside_one_range_is_found(pages: HostPages) -> None:
    address = pages.allocate("pinned", 128)
    inner = pages.find(address + 100, 28)
    assert inner is not None
    assert inner[1].ctypes.data == address + 100
    assert pages.find(address, 129) is None
    assert pages.find(address + 128, 1) is None
    assert pages.find(address - 1, 1) is None
    assert pages.find(1, 1) is None


def test_registered_memory_is_the_owners(pages: HostPages) -> None:
    array = np.zeros(100, np.uint8)
    pages.register(array.ctypes.data, 100)
    found = pages.find(array.ctypes.data + 10, 5)
    assert found is not None
    found[1][:] = 3
    assert array.sum() == 15


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (10, 20), (50, 150), (99, 100)])
def test_overlapping_registration_is_busy(pages: HostPages, start: int, stop: int) -> None:
    array = np.zeros(200, np.uint8)
    pages.register(array.ctypes.data, 100)
    with pytest.raises(BusyError, match="overlap 100 registered"):
        pages.register(array.ctypes.data + start, stop - start)
    pages.register(array.ctypes.data + 100, 100)


def test_released_memory_is_gone_but_its_views_live(pages: HostPages) -> None:
    address = pages.allocate("pinned", 1 << 20)
    found = pages.find(address, 1 << 20)
    assert found is not None
    pages.release("pinned", address)
    assert pages.find(address, 1) is None
    found[1][:] = 1
    assert found[1].sum() == 1 << 20


def test_release_wants_the_right_kind_once(pages: HostPages) -> None:
    address = pages.allocate("pinned", 64)
    with pytest.raises(StaleHandleError, match="no managed memory"):
        pages.release("managed", address)
    pages.release("pinned", address)
    with pytest.raises(StaleHandleError, match=f"no pinned memory at {address:#x}"):
        pages.release("pinned", address)


def test_nothing_cannot_be_allocated_or_registered(pages: HostPages) -> None:
    with pytest.raises(InvalidArgumentError, match="0 bytes"):
        pages.allocate("pinned", 0)
    with pytest.raises(InvalidArgumentError, match="cannot pin 0 bytes"):
        pages.register(4096, 0)
    with pytest.raises(InvalidArgumentError, match="at 0x0"):
        pages.register(0, 10)
