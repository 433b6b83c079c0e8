"""The functions in C of bound calls: `aiocuda.driver.protocol.NativeCall`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import pytest

from aiocuda._core._calls import read_word
from aiocuda._core._hot import Lease
from aiocuda._core._native import Native
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.protocol import NativeCall, Program, RecordRefused, native_call
from aiocuda.errors import DeviceFault, DeviceOutOfMemory, InvalidArgumentError, StaleHandleError
from tests.driver.cuda.fake import Fake
from tests.driver.cuda.methods import IMPORTED, Things

INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS, NOT_READY = 1, 2, 700, 600


def native_of(call: Callable[..., None]) -> NativeCall:
    native = native_call(call)
    assert native is not None
    return native


def lease_of(driver: CudaDriver) -> Lease:
    return Lease(driver.event_create(0, False), False, [])


def test_launch_passes_the_same_words_as_the_driver(driver: CudaDriver, fake: Fake) -> None:
    """Each argument arrives at its place, in the form of its letter, whatever its value."""
    fake.value("cuStreamCreateWithPriority", 0xAAA0)
    fake.value("cuEventCreate", 0xBBB0)
    layout = "PiIqQfdhHbB?"
    values = (2**63 + 8, -7, 2**32 - 1, -(2**63), 2**64 - 1, -0.375, 1e300, -2, 65535, -1, 255, True)
    places, end = [], 0
    for letter in layout:
        size = struct.calcsize(letter)
        places.append((-(-end // size) * size, size))
        end = sum(places[-1])
    fake.parameters(*places)
    function = driver.load(0, Program("k", layout, image=b"x", symbol="k"))
    recorded = driver.recorded_launch(driver.stream_create(0, 0), function, (1, 2, 3), (4, 5, 6), 7)
    lease = lease_of(driver)
    arrived = []
    for form in (lambda: recorded(values, lease.handle), lambda: Native(native_of(recorded)).enqueue(values, lease)):
        fake.forget()
        form()
        launch, record = fake.calls()
        assert (launch.name, record.name) == ("cuLaunchKernelEx", "cuEventRecord")
        assert launch.kept_gil
        assert record.kept_gil
        assert record.arguments[:2] == (0xBBB0, 0xAAA0)
        arrived.append((fake.launched(), launch.arguments[1], launch.arguments[3]))
    assert arrived[0] == arrived[1]


@pytest.mark.parametrize("values", [(2**32,), (-1,), (True,), (1.5,)])
def test_unusual_value_is_left_to_the_driver(driver: CudaDriver, fake: Fake, values: tuple[object]) -> None:
    """A value that the letter does not take is packed by `struct`, which converts it or raises its own error."""
    fake.parameters((0, 4))
    function = driver.load(0, Program("k", "I", image=b"x", symbol="k"))
    recorded = driver.recorded_launch(driver.stream_create(0, 0), function, (1, 1, 1), (1, 1, 1), 0)
    native, lease = Native(native_of(recorded)), lease_of(driver)
    if values == (True,):
        assert native.enqueue(values, lease)
        assert fake.launched()[1][:4] == b"\1\0\0\0"
        return
    with pytest.raises(struct.error):
        native.enqueue(values, lease)
    assert not fake.calls("cuLaunchKernelEx")


@pytest.mark.parametrize("verb", ["upload", "download"])
def test_copy_passes_the_same_words_as_the_driver(driver: CudaDriver, fake: Fake, verb: str) -> None:
    bind = driver.recorded_upload if verb == "upload" else driver.recorded_download
    recorded = bind(driver.stream_create(0, 0), 0x1000, 0x2000, 64)
    lease = lease_of(driver)
    fake.forget()
    recorded((), lease.handle)
    assert Native(native_of(recorded)).enqueue((), lease)
    copy, record, copied, recorded_again = fake.calls()
    assert copy.name.startswith("cuMemcpy")
    assert (copy.name, copy.arguments[:4]) == (copied.name, copied.arguments[:4])
    assert (record.name, record.arguments[:2]) == (recorded_again.name, recorded_again.arguments[:2])


@pytest.mark.parametrize("verb", ["upload", "download"])
def test_copy_that_another_context_refuses_is_made_in_that_of_its_stream(
    driver: CudaDriver, fake: Fake, verb: str
) -> None:
    bind = driver.recorded_upload if verb == "upload" else driver.recorded_download
    recorded = bind(driver.stream_create(0, 0), 0x1000, 0x2000, 64)
    lease, native = lease_of(driver), Native(native_of(recorded))
    call = "cuMemcpyHtoDAsync" if verb == "upload" else "cuMemcpyDtoHAsync"
    for form in (lambda: recorded((), lease.handle), lambda: native.enqueue((), lease)):
        fake.forget()
        fake.answer(call, INVALID_VALUE, times=1)
        form()
        refused, made = fake.calls(call)
        assert refused.arguments[:4] == made.arguments[:4]
        assert made.context == driver.open_devices[0].primary
        assert fake.names()[-1] == "cuEventRecord"
        fake.answer(call, INVALID_VALUE)
        with pytest.raises(InvalidArgumentError, match=call):
            form()


def test_calls_are_counted(driver: CudaDriver) -> None:
    recorded = driver.recorded_upload(driver.stream_create(0, 0), 0x1000, 0x2000, 64)
    native, lease = Native(native_of(recorded)), lease_of(driver)
    before = driver.statistics()["calls"]
    assert native.enqueue((), lease)
    assert native.query(lease) == 1
    assert driver.statistics()["calls"] == before + 3


def test_wait_passes_the_same_words_as_the_driver(driver: CudaDriver, fake: Fake) -> None:
    """Also for the event of another stream that was never recorded through these functions."""
    stream = driver.stream_create(0, 0)
    native, lease = Native(native_of(driver.recorder(stream))), lease_of(driver)
    fake.forget()
    before = driver.statistics()["calls"]
    driver.stream_wait(stream, lease.handle)
    assert native.wait(lease)
    by_driver, by_words = fake.calls()
    assert by_driver.name == by_words.name == "cuStreamWaitEvent"
    assert by_driver.arguments[:2] == by_words.arguments[:2]
    assert by_driver.arguments[2] & 0xFFFFFFFF == by_words.arguments[2] & 0xFFFFFFFF == 0
    assert by_words.kept_gil
    assert driver.statistics()["calls"] == before + 2


def test_refused_wait_raises_the_error_of_the_driver(driver: CudaDriver, fake: Fake) -> None:
    native, lease = Native(native_of(driver.recorder(driver.stream_create(0, 0)))), lease_of(driver)
    fake.answer("cuStreamWaitEvent", OUT_OF_MEMORY)
    with pytest.raises(DeviceOutOfMemory, match="cuStreamWaitEvent"):
        native.wait(lease)
    with pytest.raises(StaleHandleError, match="event 99 "):
        native.wait(Lease(99, False, []))


def test_query(driver: CudaDriver, fake: Fake) -> None:
    """A code that is neither success nor "not ready" is left to the driver, which asks again and raises the error."""
    native, lease = Native(native_of(driver.recorder(driver.stream_create(0, 0)))), lease_of(driver)
    assert native.query(lease) == -1  # the event was never recorded through these functions
    lease.word = driver.events[lease.handle].handle
    assert native.query(lease) == 1
    fake.answer("cuEventQuery", NOT_READY)
    assert native.query(lease) == 0
    fake.answer("cuEventQuery", ILLEGAL_ADDRESS)
    assert native.query(lease) == -1


def test_refused_work_raises_the_error_of_the_driver(driver: CudaDriver, fake: Fake) -> None:
    recorded = driver.recorded_upload(driver.stream_create(0, 0), 0x1000, 0x2000, 64)
    native, lease = Native(native_of(recorded)), lease_of(driver)
    fake.answer("cuMemcpyHtoDAsync", OUT_OF_MEMORY)
    with pytest.raises(DeviceOutOfMemory, match="cuMemcpyHtoDAsync"):
        native.enqueue((), lease)
    assert not fake.calls("cuEventRecord")


def test_refused_record_says_that_the_work_was_accepted(driver: CudaDriver, fake: Fake) -> None:
    stream = driver.stream_create(0, 0)
    native, lease = Native(native_of(driver.recorded_upload(stream, 0x1000, 0x2000, 64))), lease_of(driver)
    fake.answer("cuEventRecord", OUT_OF_MEMORY)
    with pytest.raises(RecordRefused) as refused:
        native.enqueue((), lease)
    assert isinstance(refused.value.error, DeviceOutOfMemory)
    with pytest.raises(DeviceOutOfMemory):  # without work there is nothing that the stream has accepted
        native_of(driver.recorder(stream)).refuse("cuEventRecord", OUT_OF_MEMORY)


def test_fault_closes_the_functions_of_all_streams(driver: CudaDriver, fake: Fake) -> None:
    native, other = (
        Native(native_of(driver.recorded_upload(driver.stream_create(0, 0), 0x1000, 0x2000, 64))) for _ in range(2)
    )
    lease = lease_of(driver)
    fake.answer("cuMemcpyHtoDAsync", ILLEGAL_ADDRESS)
    with pytest.raises(DeviceFault):
        native.enqueue((), lease)
    fake.forget()
    assert not other.enqueue((), lease)
    assert not other.wait(lease)
    assert other.query(lease) == -1
    assert fake.calls() == []


def test_destroyed_stream_closes_its_functions(driver: CudaDriver, fake: Fake) -> None:
    stream, other = driver.stream_create(0, 0), driver.stream_create(0, 0)
    native, apart = (Native(native_of(driver.recorded_upload(each, 0x1000, 0x2000, 64))) for each in (stream, other))
    lease = lease_of(driver)
    driver.stream_destroy(stream)
    fake.forget()
    assert not native.enqueue((), lease)
    assert not native.wait(lease)
    assert fake.calls() == []
    assert apart.enqueue((), lease)
    assert apart.wait(lease)


def test_event_that_does_not_exist_is_refused_before_the_work(driver: CudaDriver, fake: Fake) -> None:
    native = Native(native_of(driver.recorded_upload(driver.stream_create(0, 0), 0x1000, 0x2000, 64)))
    fake.forget()
    with pytest.raises(StaleHandleError, match="event 99 "):
        native.enqueue((), Lease(99, False, []))
    assert fake.calls() == []


def test_streams_whose_calls_release_the_gil_have_none(
    driver: CudaDriver, fake: Fake, made: Things, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported and default streams always release the GIL; all streams do so with ``AIOCUDA_GIL=release``."""
    for stream in (IMPORTED, driver.stream_default(0)):
        assert native_call(driver.recorder(stream)) is None
        assert native_call(driver.recorded_upload(stream, 0x1000, 0x2000, 64)) is None
    monkeypatch.setenv("AIOCUDA_GIL", "release")
    released = CudaDriver(fake.path)
    released.device_open(0)
    assert native_call(released.recorder(released.stream_create(0, 0))) is None


def test_memory_of_the_functions_lives_as_long_as_they_do(driver: CudaDriver) -> None:
    """The words of the driver and of the stream outlive the stream."""
    stream = driver.stream_create(0, 0)
    native = native_of(driver.recorded_upload(stream, 0x1000, 0x2000, 64))
    assert [read_word(address) for address in native.closed] == [0, 0]
    driver.stream_destroy(stream)
    assert [read_word(address) for address in native.closed] == [0, 1]
    assert list((ctypes.c_uint64 * 4).from_address(native.block))[:3] == [0x1000, 0x2000, 64]
