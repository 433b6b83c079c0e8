from __future__ import annotations

import ctypes
import mmap
import struct
import sys

import pytest

from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.protocol import Advice, Allocation
from aiocuda.errors import DeviceOutOfMemory, InvalidArgumentError, StaleHandleError, UnsupportedError
from tests.driver.cuda.fake import Fake

_INT = 2**32 - 1
_NEAR, _FAR = 0x7F12_3456_7800, 0x7E65_4321_0000


@pytest.fixture
def stream(fake: Fake, driver: CudaDriver) -> int:
    fake.value("cuStreamCreateWithPriority", 0xAAA0)
    stream = driver.stream_create(0, 0)
    fake.forget()
    return stream


def test_pool_is_of_its_device(fake: Fake) -> None:
    fake.answer("cuMemPoolSetAttribute", 801, times=1)  # which would write over what the fake keeps
    driver = CudaDriver(fake.path)
    with pytest.raises(UnsupportedError):
        driver.device_open(1)
    properties = fake.bytes(88)
    kind, handles, place, device = struct.unpack_from("iiii", properties)
    assert (kind, handles, place, device) == (1, 0, 1, 1)  # PINNED, no export, DEVICE 1
    assert properties[16:] == bytes(72)


def test_allocate_and_free(fake: Fake, driver: CudaDriver, stream: int) -> None:
    fake.value("cuMemAllocFromPoolAsync", _NEAR)
    assert driver.allocate(0, 12345, stream) == _NEAR
    made = fake.only("cuMemAllocFromPoolAsync")
    assert made.arguments[1] == 12345
    assert made.arguments[3] == 0xAAA0
    assert made.context == 0  # a stream is named: no context is needed
    driver.deallocate(_NEAR, stream)
    assert fake.only("cuMemFreeAsync").starts(_NEAR, 0xAAA0)


def test_each_device_has_its_own_pool(fake: Fake, driver: CudaDriver, stream: int) -> None:
    driver.device_open(1)
    driver.allocate(0, 1, stream)
    driver.allocate(1, 1, stream)
    driver.pool_trim(1, 77)
    first, second = (call.arguments[2] for call in fake.calls("cuMemAllocFromPoolAsync"))
    assert first != second
    assert fake.only("cuMemPoolTrimTo").starts(second, 77)


def test_no_room(fake: Fake, driver: CudaDriver, stream: int) -> None:
    fake.answer("cuMemAllocFromPoolAsync", 2, times=1)
    fake.value("cuMemPoolGetAttribute", 500)
    with pytest.raises(DeviceOutOfMemory, match="no room for 5,000 bytes: 1,000 of 2,000 are free") as caught:
        driver.allocate(0, 5000, stream)
    error = caught.value
    assert (error.requested, error.free, error.reserved, error.live) == (5000, 1000, 500, 500)
    assert fake.only("cuMemPoolTrimTo").arguments[1] == 0  # the failed call has left all free memory in the pool
    assert driver.allocate(0, 10, stream)


@pytest.mark.parametrize("nbytes", [1, 1 << 40])
def test_no_room_on_the_host(fake: Fake, driver: CudaDriver, nbytes: int) -> None:
    fake.answer("cuMemHostAlloc", 2, times=1)
    with pytest.raises(DeviceOutOfMemory, match=f"the host has no room for {nbytes:,} page-locked bytes") as caught:
        driver.pinned_allocate(nbytes)
    assert caught.value.requested == nbytes
    fake.answer("cuMemAllocManaged", 2, times=1)
    with pytest.raises(DeviceOutOfMemory, match=f"no room for {nbytes:,}"):
        driver.managed_allocate(0, nbytes)


def test_pool_reserved(fake: Fake, driver: CudaDriver) -> None:
    fake.value("cuMemPoolGetAttribute", 1 << 40)
    assert driver.pool_reserved(0) == 1 << 40
    assert fake.only("cuMemPoolGetAttribute").arguments[1] & _INT == 5  # RESERVED_MEM_CURRENT


def test_memory_info(driver: CudaDriver) -> None:
    assert driver.memory_info(0) == (1000, 2000)


def test_host_memory_is_for_every_device(fake: Fake, driver: CudaDriver) -> None:
    fake.value("cuMemHostAlloc", _NEAR)
    assert driver.pinned_allocate(99) == _NEAR
    driver.pin(_FAR, 55)
    for name, address, count in (("cuMemHostAlloc", None, 99), ("cuMemHostRegister", _FAR, 55)):
        call = fake.only(name)
        assert call.context != 0
        assert call.arguments[1] == count
        assert call.arguments[2] & _INT == 1  # PORTABLE
        assert address is None or call.arguments[0] == address
    driver.pinned_deallocate(_NEAR)
    driver.unpin(_FAR)
    assert fake.only("cuMemFreeHost").starts(_NEAR)
    assert fake.only("cuMemHostUnregister").starts(_FAR)


def residents(address: int, pages: int) -> int:
    """Return how many pages from that address on are in memory."""
    found = (ctypes.c_ubyte * pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(pages * mmap.PAGESIZE), found) == 0, ctypes.get_errno()
    return sum(page & 1 for page in found)


@pytest.mark.skipif(sys.platform != "linux", reason="the advice is Linux's")
def test_pages_are_in_memory_before_they_are_registered(fake: Fake, driver: CudaDriver) -> None:
    """Registering touched pages holds the launches of other threads for a tenth of the time."""
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as memory:
        view = ctypes.c_char.from_buffer(memory)
        begin = ctypes.addressof(view)
        assert residents(begin, 64) == 0
        driver.pin(begin + 3 * mmap.PAGESIZE + 100, 5 * mmap.PAGESIZE)
        if not residents(begin, 64):
            pytest.skip("this system cannot populate pages (Linux 5.14)")
        assert residents(begin + 3 * mmap.PAGESIZE, 6) == 6  # the first and the last in part
        assert residents(begin, 64) == 6
        del view
    assert fake.only("cuMemHostRegister").starts(begin + 3 * mmap.PAGESIZE + 100, 5 * mmap.PAGESIZE)


def test_memory_that_cannot_be_populated_is_registered_all_the_same(fake: Fake, driver: CudaDriver) -> None:
    """The driver then gives the error, if there is one."""
    driver.pin(mmap.PAGESIZE, 55)
    assert fake.only("cuMemHostRegister").starts(mmap.PAGESIZE, 55)


def test_managed_memory(fake: Fake, driver: CudaDriver, stream: int) -> None:
    fake.value("cuMemAllocManaged", _NEAR)
    assert driver.managed_allocate(0, 4096) == _NEAR
    assert fake.only("cuMemAllocManaged").arguments[1] == 4096
    assert fake.only("cuMemAllocManaged").arguments[2] & _INT == 1  # CU_MEM_ATTACH_GLOBAL
    driver.managed_deallocate(_NEAR)
    assert fake.only("cuMemFree").starts(_NEAR)


@pytest.mark.parametrize("device", [-1, 0, 1])
def test_prefetch_passes_the_place_by_value(fake: Fake, driver: CudaDriver, stream: int, device: int) -> None:
    driver.device_open(1)
    driver.prefetch(stream, _NEAR, 8192, device)
    call = fake.only("cuMemPrefetchAsync")
    assert call.starts(_NEAR, 8192)
    kind, index = struct.unpack("ii", call.arguments[2].to_bytes(8, "little"))
    assert (kind, index) == ((2, 0) if device < 0 else (1, device))
    assert call.arguments[3] & _INT == 0
    assert call.arguments[4] == 0xAAA0


@pytest.mark.parametrize(
    ("advice", "number"),
    [
        ("set_read_mostly", 1),
        ("unset_read_mostly", 2),
        ("set_preferred_location", 3),
        ("unset_preferred_location", 4),
        ("set_accessed_by", 5),
        ("unset_accessed_by", 6),
    ],
)
@pytest.mark.parametrize("device", [-1, 1])
def test_advice_passes_the_place_by_value(
    fake: Fake, driver: CudaDriver, stream: int, advice: Advice, number: int, device: int
) -> None:
    driver.device_open(1)
    driver.advise(_NEAR, 8192, advice, device)
    call = fake.only("cuMemAdvise")
    assert call.starts(_NEAR, 8192)
    assert call.arguments[2] & _INT == number
    kind, index = struct.unpack("ii", call.arguments[3].to_bytes(8, "little"))
    assert (kind, index) == ((2, 0) if device < 0 else (1, device))
    assert fake.asked_version("cuMemAdvise") == 12020


def test_advice_for_a_device_that_is_not_open(fake: Fake, driver: CudaDriver, stream: int) -> None:
    with pytest.raises(InvalidArgumentError, match="device 1 is not open"):
        driver.advise(_NEAR, 8192, "set_accessed_by", 1)
    assert fake.calls("cuMemAdvise") == []


@pytest.mark.parametrize(("answer", "place"), [(-2, None), (-1, -1), (0, 0), (1, 1)])
def test_attributes_of_managed_memory(
    fake: Fake, driver: CudaDriver, stream: int, answer: int, place: int | None
) -> None:
    fake.value("cuMemRangeGetAttribute", answer & 2**32 - 1)
    found = driver.managed_attributes(_NEAR, 8192)
    assert found.read_mostly is (answer == 1)
    assert found.preferred_location == found.last_prefetch == place
    assert (place is None) or place in found.accessed_by
    asked = [(call.arguments[1], call.arguments[2] & _INT) for call in fake.calls("cuMemRangeGetAttribute")]
    assert asked == [(4, 1), (4, 2), (4, 4), (65 * 4, 3)]
    assert all(call.arguments[3:5] == (_NEAR, 8192) for call in fake.calls("cuMemRangeGetAttribute"))


def test_copies(fake: Fake, driver: CudaDriver, stream: int) -> None:
    driver.upload(stream, _NEAR, _FAR, 1 << 33)
    driver.download(stream, _FAR, _NEAR, 2)
    driver.copy(stream, _NEAR, _FAR, 3)
    assert fake.only("cuMemcpyHtoDAsync").starts(_NEAR, _FAR, 1 << 33, 0xAAA0)
    assert fake.only("cuMemcpyDtoHAsync").starts(_FAR, _NEAR, 2, 0xAAA0)
    assert fake.only("cuMemcpyDtoDAsync").starts(_NEAR, _FAR, 3, 0xAAA0)


COPIES = {"upload": "cuMemcpyHtoDAsync", "download": "cuMemcpyDtoHAsync", "copy": "cuMemcpyDtoDAsync"}


@pytest.mark.parametrize("name", COPIES)
def test_copy_that_another_context_refuses_is_made_in_that_of_its_stream(
    fake: Fake, driver: CudaDriver, stream: int, name: str
) -> None:
    """CUDA refuses a pool's memory if the context of a device is current that cannot access it."""
    call, method = COPIES[name], getattr(driver, name)
    fake.push(0xF0E)
    fake.answer(call, 1, times=1)
    method(stream, _NEAR, _FAR, 64)
    refused, made = fake.calls(call)
    assert refused.arguments[:4] == made.arguments[:4] == (_NEAR, _FAR, 64, 0xAAA0)
    assert refused.context == 0xF0E
    assert made.context == driver.open_devices[0].primary
    assert fake.current() == 0xF0E
    fake.answer(call, 1)
    with pytest.raises(InvalidArgumentError, match=call):
        method(stream, _NEAR, _FAR, 64)


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("pinned_deallocate", "cuMemFreeHost"),
        ("unpin", "cuMemHostUnregister"),
        ("managed_deallocate", "cuMemFree"),
        ("deallocate", "cuMemFreeAsync"),
    ],
)
def test_releasing_twice_is_refused(fake: Fake, driver: CudaDriver, stream: int, method: str, call: str) -> None:
    fake.answer(call, 1)
    arguments = (_NEAR, stream) if method == "deallocate" else (_NEAR,)
    with pytest.raises(StaleHandleError, match=f"{call}: no allocation begins at 0x{_NEAR:x}"):
        getattr(driver, method)(*arguments)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (b"\xab", [("cuMemsetD8Async", 0, 0xAB, 10)]),
        (b"\x01\xff", [("cuMemsetD16Async", 0, 0xFF01, 10)]),
        (b"\x01\x02\x03\xff", [("cuMemsetD32Async", 0, 0xFF030201, 10)]),
        (b"\x01\x02\x03\x04" * 2, [("cuMemsetD32Async", 0, 0x04030201, 20)]),
        (b"\x05\x00\x00\x80" * 4, [("cuMemsetD32Async", 0, 0x80000005, 40)]),
    ],
)
def test_fill(
    fake: Fake, driver: CudaDriver, stream: int, pattern: bytes, expected: list[tuple[str, int, int, int]]
) -> None:
    driver.fill(stream, _NEAR, pattern, 10)
    width = {"cuMemsetD8Async": 8, "cuMemsetD16Async": 16, "cuMemsetD32Async": 32}
    seen = [
        (
            call.name,
            call.arguments[0] - _NEAR,
            call.arguments[1] & (2 ** width[call.name] - 1),
            call.arguments[2],
        )
        for call in fake.calls()
    ]
    assert seen == expected
    assert {call.arguments[3] for call in fake.calls()} == {0xAAA0}


@pytest.mark.parametrize("words", [(1, 2), (1, 1, 1, 2), (0xFFFFFFFF, 0, 5, 7)])
def test_wide_fill_is_column_by_column(fake: Fake, driver: CudaDriver, stream: int, words: tuple[int, ...]) -> None:
    driver.fill(stream, _NEAR, struct.pack(f"<{len(words)}I", *words), 33)
    calls = fake.calls()
    assert {call.name for call in calls} == {"cuMemsetD2D32Async"}
    size = 4 * len(words)
    for at, (call, word) in enumerate(zip(calls, words, strict=True)):
        target, pitch, value, width, height, where = call.arguments[:6]
        assert (target, pitch, value & _INT, width, height, where) == (_NEAR + 4 * at, size, word, 1, 33, 0xAAA0)


@pytest.mark.parametrize("size", [0, 3, 5, 12, 32])
def test_fill_of_another_width(fake: Fake, driver: CudaDriver, stream: int, size: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"not {size}"):
        driver.fill(stream, _NEAR, bytes(size), 1)
    assert fake.calls() == []


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ((2 << 60) + (3 << 56) + 0x12345, Allocation(3, (2 << 60) + (3 << 56) + 0x12000, 0x1000, False)),
        ((6 << 60) + 0x777, Allocation(-1, 6 << 60, 0x1000, True)),  # managed memory is a kind of device memory
        ((1 << 60) + 0x777, None),  # page-locked
        (0x777, None),  # nobody's
    ],
)
def test_locate_finds_the_allocation_of_an_address(
    fake: Fake, driver: CudaDriver, address: int, found: Allocation | None
) -> None:
    fake.forget()
    assert driver.locate(address) == found
    assert fake.only("cuPointerGetAttributes").context  # some device's
    assert fake.current() == 0


def test_peers_are_introduced_once(fake: Fake, driver: CudaDriver, stream: int) -> None:
    driver.device_open(1)
    fake.value("cuDeviceCanAccessPeer", 1)
    fake.answer("cuCtxEnablePeerAccess", 704, times=1)  # somebody else did it already
    fake.forget()
    driver.copy_peer(stream, _NEAR, 1, _FAR, 0, 4096)
    enabled = fake.calls("cuCtxEnablePeerAccess")
    assert len(enabled) == 2
    assert {(call.context, call.arguments[0]) for call in enabled} == {
        (enabled[0].context, enabled[1].context),
        (enabled[1].context, enabled[0].context),
    }
    pools = {call.arguments[0] for call in fake.calls("cuMemPoolSetAccess")}
    assert len(pools) == 2
    copy = fake.only("cuMemcpyPeerAsync")
    assert (copy.arguments[0], copy.arguments[2], copy.arguments[4], copy.arguments[5]) == (_NEAR, _FAR, 4096, 0xAAA0)
    to, origin = copy.arguments[1], copy.arguments[3]
    assert {to, origin} == {call.context for call in enabled}
    fake.forget()
    driver.copy_peer(stream, _FAR, 0, _NEAR, 1, 4096)
    (copy,) = fake.calls()
    assert (copy.arguments[1], copy.arguments[3]) == (origin, to)


def test_access_is_given_to_the_other_device(fake: Fake, driver: CudaDriver, stream: int) -> None:
    driver.device_open(1)
    fake.value("cuDeviceCanAccessPeer", 1)
    fake.answer("cuMemPoolSetAccess", 1, times=1)
    with pytest.raises(InvalidArgumentError):
        driver.copy_peer(stream, _NEAR, 1, _FAR, 0, 1)
    assert fake.calls("cuMemcpyPeerAsync") == []
    driver.copy_peer(stream, _NEAR, 1, _FAR, 0, 1)  # what failed is tried again, whole
    kind, device, rights = struct.unpack("iii", fake.bytes(12))
    assert (kind, device, rights) == (1, 0, 3)  # the last: device 0 may use the pool of device 1
    assert len(fake.calls("cuMemPoolSetAccess")) == 3


def test_devices_out_of_reach(fake: Fake, driver: CudaDriver, stream: int) -> None:
    driver.device_open(1)
    with pytest.raises(UnsupportedError, match="device 1 cannot reach the memory of device 0"):
        driver.copy_peer(stream, _NEAR, 1, _FAR, 0, 4096)
    assert not {"cuMemcpyPeerAsync", "cuCtxEnablePeerAccess"} & set(fake.names())
