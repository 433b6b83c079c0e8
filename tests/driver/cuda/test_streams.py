from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.protocol import RecordRefused
from aiocuda.errors import (
    BusyError,
    DeviceOutOfMemory,
    InvalidArgumentError,
    StaleHandleError,
    WrongDeviceError,
)
from tests.driver.cuda.fake import Fake
from tests.driver.cuda.methods import IMPORTED, Things

_INT = 2**32 - 1


def test_stream_is_made_in_its_devices_context(driver: CudaDriver, fake: Fake) -> None:
    driver.device_open(1)
    primary = {}
    for device in (0, 1):
        fake.forget()
        driver.stream_create(device, -3)
        made = fake.only("cuStreamCreateWithPriority")
        assert made.arguments[1] & _INT == 1  # CU_STREAM_NON_BLOCKING
        assert ctypes.c_int(made.arguments[2] & _INT).value == -3
        primary[device] = made.context
    assert 0 not in primary.values()
    assert primary[0] != primary[1]


def test_reserved_streams_are_made_once_and_given_back(fake: Fake) -> None:
    driver = CudaDriver(fake.path)
    driver.device_open(0)
    driver.device_open(1)
    assert fake.calls("cuStreamCreateWithPriority") == []
    fake.value("cuStreamCreateWithPriority", 0x5001)
    for device, count, made in ((0, 64, 64), (0, 64, 0), (0, 10, 0), (1, 10, 10), (0, 65, 65)):
        fake.forget()
        driver.stream_reserve(device, count)
        assert len(fake.calls("cuStreamCreateWithPriority")) == made
        names = [name for name in fake.names() if name.startswith("cuStream")]
        assert names == ["cuStreamCreateWithPriority"] * made + ["cuStreamDestroy"] * made  # they live at one time
    assert driver.statistics()["streams"] == driver.statistics()["streams_created"] == 0


def test_streams_that_cannot_be_reserved_are_tried_again(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuStreamCreateWithPriority", 2, times=1)
    with pytest.raises(DeviceOutOfMemory, match="cuStreamCreateWithPriority"):
        driver.stream_reserve(0, 8)
    fake.forget()
    driver.stream_reserve(0, 8)
    assert len(fake.calls("cuStreamCreateWithPriority")) == 8


def test_priorities(driver: CudaDriver, fake: Fake) -> None:
    assert driver.priority_range(0) == (0, -5)
    fake.value("cuStreamGetPriority", _INT - 4)
    assert driver.stream_priority(driver.stream_create(0, 0)) == -5


def test_a_name_is_never_used_twice(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuStreamCreateWithPriority", 0xAAA0)  # as the driver does with the address of one that is gone
    fake.value("cuEventCreate", 0xBBB0)
    streams, events = set(), set()
    for _ in range(3):
        streams.add(stream := driver.stream_create(0, 0))
        events.add(event := driver.event_create(0, False))
        assert driver.stream_handle(stream) == 0xAAA0
        driver.stream_destroy(stream)
        driver.event_destroy(event)
    assert len(streams | events) == 6
    assert not {0, 1, 2} & (streams | events)
    for stream in streams:
        with pytest.raises(StaleHandleError, match=f"stream {stream} is unknown or has been destroyed"):
            driver.stream_query(stream)
    for event in events:
        with pytest.raises(StaleHandleError, match=f"event {event} is unknown or has been destroyed"):
            driver.event_query(event)


def test_which_of_the_two_is_stale(driver: CudaDriver, fake: Fake, made: Things) -> None:
    with pytest.raises(StaleHandleError, match="stream 99 is"):
        driver.event_record(made.event, 99)
    with pytest.raises(StaleHandleError, match="event 99 is"):
        driver.event_record(99, made.stream)
    with pytest.raises(StaleHandleError, match="stream 99 is"):
        driver.stream_wait(99, made.event)
    with pytest.raises(StaleHandleError, match="event 99 is"):
        driver.stream_wait(made.stream, 99)
    assert fake.calls() == []


def test_record_wait_query_name_what_they_were_given(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuStreamCreateWithPriority", 0xAAA0)
    fake.value("cuEventCreate", 0xBBB0)
    stream, event = driver.stream_create(0, 0), driver.event_create(0, True)
    assert fake.only("cuEventCreate").arguments[1] & _INT == 0
    driver.event_create(0, False)
    assert fake.calls("cuEventCreate")[1].arguments[1] & _INT == 2  # CU_EVENT_DISABLE_TIMING
    driver.event_record(event, stream)
    driver.stream_wait(stream, event)
    assert driver.event_query(event)
    assert fake.only("cuEventRecord").starts(0xBBB0, 0xAAA0)
    assert fake.only("cuStreamWaitEvent").starts(0xAAA0, 0xBBB0)
    assert fake.only("cuStreamWaitEvent").arguments[2] & _INT == 0
    assert fake.only("cuEventQuery").starts(0xBBB0)
    driver.stream_destroy(stream)
    driver.event_destroy(event)
    assert fake.only("cuStreamDestroy").starts(0xAAA0)
    assert fake.only("cuEventDestroy").starts(0xBBB0)


def test_bound_waits_make_their_calls_in_order(driver: CudaDriver, fake: Fake) -> None:
    hub, *others = [driver.stream_create(0, 0) for _ in range(3)]
    *events, joined = [driver.event_create(0, False) for _ in range(3)]
    fake.forget()
    before = driver.statistics()["calls"]
    driver.recorded_wait(hub)(events, joined)
    driver.waiter(others)(joined)
    assert fake.names() == ["cuStreamWaitEvent"] * 2 + ["cuEventRecord"] + ["cuStreamWaitEvent"] * 2
    assert driver.statistics()["calls"] - before == 5


def test_bound_waits_end_at_the_wait_that_is_refused(driver: CudaDriver, fake: Fake) -> None:
    streams = [driver.stream_create(0, 0), driver.stream_create(0, 0)]
    event, joined = driver.event_create(0, False), driver.event_create(0, False)
    recorded_wait, wait = driver.recorded_wait(streams[0]), driver.waiter(streams)
    fake.forget()
    fake.answer("cuStreamWaitEvent", 400)
    with pytest.raises(StaleHandleError):
        recorded_wait((event, event), joined)
    with pytest.raises(StaleHandleError):
        wait(event)
    assert fake.names() == ["cuStreamWaitEvent"] * 2


def test_recorded_wait_whose_record_is_refused(driver: CudaDriver, fake: Fake) -> None:
    stream, event = driver.stream_create(0, 0), driver.event_create(0, False)
    fake.answer("cuEventRecord", 400)
    with pytest.raises(RecordRefused) as refused:
        driver.recorded_wait(stream)((event,), driver.event_create(0, False))
    assert isinstance(refused.value.error, StaleHandleError)
    assert len(fake.calls("cuStreamWaitEvent")) == 1


def test_hot_calls_carry_all_64_bits(driver: CudaDriver, fake: Fake) -> None:
    """They are passed on as they were prepared: an int would arrive as 32 bits."""
    fake.value("cuStreamCreateWithPriority", 0x7FFF_AAAA_8000_0010)
    fake.value("cuEventCreate", 0x7FFF_BBBB_8000_0020)
    stream, event = driver.stream_create(0, 0), driver.event_create(0, True)
    driver.event_record(event, stream)
    driver.recorder(stream)(event)
    driver.stream_wait(stream, event)
    driver.waiter((stream,))(event)
    driver.recorded_wait(stream)((event,), event)
    driver.event_query(event)
    for call in fake.calls("cuEventRecord"):
        assert call.starts(0x7FFF_BBBB_8000_0020, 0x7FFF_AAAA_8000_0010)
    assert len(fake.calls("cuEventRecord")) == 3
    for call in fake.calls("cuStreamWaitEvent"):
        assert call.starts(0x7FFF_AAAA_8000_0010, 0x7FFF_BBBB_8000_0020)
        assert call.arguments[2] & _INT == 0
    assert len(fake.calls("cuStreamWaitEvent")) == 3
    assert fake.only("cuEventQuery").starts(0x7FFF_BBBB_8000_0020)


def test_not_ready_is_an_answer(driver: CudaDriver, fake: Fake, made: Things) -> None:
    fake.answer("cuEventQuery", 600)
    fake.answer("cuStreamQuery", 600)
    assert not driver.event_query(made.event)
    assert not driver.stream_query(made.stream)
    fake.answer("cuEventQuery", 0)
    fake.answer("cuStreamQuery", 0)
    assert driver.event_query(made.event)
    assert driver.stream_query(made.stream)


def test_event_of_another_device(driver: CudaDriver, fake: Fake) -> None:
    driver.device_open(1)
    stream, event = driver.stream_create(0, 0), driver.event_create(1, False)
    with pytest.raises(WrongDeviceError, match="event of device 1 cannot be recorded on a stream of device 0"):
        driver.event_record(event, stream)
    assert fake.calls("cuEventRecord") == []
    driver.stream_wait(stream, event)  # which may cross
    assert len(fake.calls("cuStreamWaitEvent")) == 1


def test_elapsed(driver: CudaDriver, fake: Fake, made: Things) -> None:
    fake.value("cuEventElapsedTime", int.from_bytes(bytes(ctypes.c_float(2.5)), "little"))
    assert driver.event_elapsed_ms(made.event, made.other) == 2.5
    plain = driver.event_create(0, False)
    for pair in ((plain, made.event), (made.event, plain)):
        with pytest.raises(InvalidArgumentError, match=f"event {plain} was made without timing"):
            driver.event_elapsed_ms(*pair)
    fake.answer("cuEventElapsedTime", 400)
    with pytest.raises(InvalidArgumentError, match="never recorded"):
        driver.event_elapsed_ms(made.event, made.other)
    fake.answer("cuEventElapsedTime", 600)
    with pytest.raises(BusyError, match="not done"):
        driver.event_elapsed_ms(made.event, made.other)


@pytest.mark.parametrize("status", [0, 1, 2])
def test_capturing(driver: CudaDriver, fake: Fake, made: Things, status: int) -> None:
    fake.value("cuStreamIsCapturing", status)
    assert driver.stream_capturing(made.stream) == (status != 0)


def test_queries_exchange_the_capture_mode_of_their_own_thread(driver: CudaDriver, fake: Fake) -> None:
    seen: dict[str, list[int]] = {}

    def work(name: str, before: int) -> None:
        fake.capture_mode(before)
        modes = []
        for _ in range(2):
            driver.begin_queries()
            modes.append(fake.capture_mode())
            driver.end_queries()
            modes.append(fake.capture_mode())
        seen[name] = modes

    work("here", 0)
    thread = threading.Thread(target=work, args=("there", 1))
    thread.start()
    thread.join(60)
    assert seen == {"here": [2, 0, 2, 0], "there": [2, 1, 2, 1]}  # 2: RELAXED


def test_failure_to_make_leaves_nothing(driver: CudaDriver, fake: Fake) -> None:
    before = driver.statistics()
    fake.answer("cuStreamCreateWithPriority", 2)
    fake.answer("cuEventCreate", 2)
    with pytest.raises(DeviceOutOfMemory, match=r"CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        driver.stream_create(0, 0)
    with pytest.raises(DeviceOutOfMemory, match=r"CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        driver.event_create(0, False)
    after = driver.statistics()
    assert {**after, "calls": 0} == {**before, "calls": 0}


def test_statistics(driver: CudaDriver, fake: Fake) -> None:
    stream, event = driver.stream_create(0, 0), driver.event_create(0, False)
    driver.stream_create(0, 0)
    driver.stream_import(0, IMPORTED)
    driver.stream_destroy(stream)
    counted = driver.statistics()
    assert (counted["streams"], counted["streams_created"], counted["imported"]) == (1, 2, 1)
    assert counted["events"] == 1
    driver.event_destroy(event)
    assert driver.statistics()["events"] == 0


# Streams of others


@pytest.mark.parametrize("method", ["query", "record", "wait", "priority", "upload", "fill"])
def test_imported_stream_never_keeps_the_gil(driver: CudaDriver, fake: Fake, made: Things, method: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "query": lambda: driver.stream_query(IMPORTED),
        "record": lambda: driver.event_record(made.event, IMPORTED),
        "wait": lambda: driver.stream_wait(IMPORTED, made.event),
        "priority": lambda: driver.stream_priority(IMPORTED),
        "upload": lambda: driver.upload(IMPORTED, 1, 2, 3),
        "fill": lambda: driver.fill(IMPORTED, 0x1000, b"\x01", 3),
    }
    calls[method]()
    (call,) = fake.calls()
    assert IMPORTED in call.arguments
    assert not call.kept_gil


def test_imported_stream_is_only_forgotten(driver: CudaDriver, fake: Fake, made: Things) -> None:
    driver.stream_import(0, IMPORTED)  # again: by another opening of the device, say
    driver.stream_destroy(IMPORTED)
    assert fake.calls() == []
    assert driver.stream_query(IMPORTED)
    driver.stream_destroy(IMPORTED)
    with pytest.raises(StaleHandleError):
        driver.stream_query(IMPORTED)
    driver.stream_import(0, IMPORTED)
    assert driver.stream_query(IMPORTED)


def test_import_checks_the_streams_device(driver: CudaDriver, fake: Fake) -> None:
    driver.device_open(1)
    fake.value("cuStreamGetDevice", 1)
    with pytest.raises(WrongDeviceError, match="of device 1, not 0"):
        driver.stream_import(0, IMPORTED)
    driver.stream_import(1, IMPORTED)
    with pytest.raises(WrongDeviceError, match="of device 1, not 0"):
        driver.stream_import(0, IMPORTED)
    fake.answer("cuStreamGetDevice", 400)
    with pytest.raises(StaleHandleError, match=r"\(400\)"):
        driver.stream_import(0, IMPORTED + 16)


def test_own_handle_cannot_be_imported(driver: CudaDriver, fake: Fake) -> None:
    stream = driver.stream_create(0, 0)
    for wrong in (stream, -2, 7):
        with pytest.raises(StaleHandleError, match="not the handle of a CUDA stream"):
            driver.stream_import(0, wrong)
    assert fake.calls("cuStreamGetDevice") == []


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_imported_default_stream_has_its_devices_context(driver: CudaDriver, fake: Fake, handle: int) -> None:
    driver.device_open(1)
    fake.forget()
    driver.stream_create(1, 0)
    primary = fake.only("cuStreamCreateWithPriority").context
    event = driver.event_create(1, False)
    imported, other = driver.stream_import(1, handle), driver.stream_import(0, handle)
    fake.forget()
    driver.event_record(event, imported)
    driver.fill(imported, 0x1000, b"\x01", 5)
    for name in ("cuEventRecord", "cuMemsetD8Async"):
        assert fake.only(name).context == primary
        assert not fake.only(name).kept_gil
    assert fake.only("cuEventRecord").arguments[1] == handle
    assert fake.current() == 0
    with pytest.raises(WrongDeviceError):
        driver.event_record(driver.event_create(0, False), imported)
    driver.event_record(driver.event_create(0, False), other)
    assert driver.stream_has_handle(other, handle)
    driver.stream_destroy(imported)
    with pytest.raises(StaleHandleError):
        driver.stream_query(imported)
    assert driver.stream_query(other)


def test_default_stream_is_the_legacy_one_of_its_device(driver: CudaDriver, fake: Fake) -> None:
    driver.device_open(1)
    fake.forget()
    driver.stream_create(1, 0)
    primary = fake.only("cuStreamCreateWithPriority").context
    event = driver.event_create(1, False)
    before = driver.statistics()
    fake.forget()
    first, second = driver.stream_default(1), driver.stream_default(1)
    assert fake.calls() == []  # nothing is made
    assert {key: driver.statistics()[key] for key in ("streams", "streams_created", "notifiers")} == {
        key: before[key] for key in ("streams", "streams_created", "notifiers")
    }
    assert first != second
    assert driver.stream_handle(first) == driver.stream_handle(second) == 1  # CU_STREAM_LEGACY
    driver.event_record(event, first)
    driver.fill(second, 0x1000, b"\x01", 5)
    for name in ("cuEventRecord", "cuMemsetD8Async"):
        assert fake.only(name).context == primary
        assert not fake.only(name).kept_gil  # its launch queue may be full, and the call would wait
    assert fake.only("cuEventRecord").arguments[1] == 1
    assert fake.current() == 0
    with pytest.raises(WrongDeviceError):
        driver.event_record(driver.event_create(0, False), first)
    assert driver.stream_handle(driver.stream_default(0)) == 1  # another device's, beside it


def test_default_stream_is_only_forgotten(driver: CudaDriver, fake: Fake) -> None:
    first, second = driver.stream_default(0), driver.stream_default(0)
    fake.forget()
    driver.stream_destroy(first)
    assert fake.calls() == []
    with pytest.raises(StaleHandleError):
        driver.stream_query(first)
    assert driver.stream_query(second)


def test_stream_0_is_that_of_the_current_context(driver: CudaDriver, fake: Fake) -> None:
    event = driver.event_create(0, False)
    fake.push(0xC0DE)
    driver.event_record(event, 0)
    assert fake.only("cuEventRecord").context == 0xC0DE
    assert not fake.only("cuEventRecord").kept_gil
    with pytest.raises(StaleHandleError):
        driver.stream_destroy(0)
    assert driver.stream_query(0)
    fake.answer("cuEventRecord", 400)
    with pytest.raises(StaleHandleError, match=r"\(400\)"):
        driver.event_record(event, 0)


def test_event_of_another_library(driver: CudaDriver, fake: Fake) -> None:
    """It is queried and waited for by a handle of its own, which is only forgotten."""
    event = driver.event_import(0, 0xE7E90)
    assert driver.event_query(event)
    driver.stream_wait(driver.stream_create(0, 0), event)
    assert fake.only("cuEventQuery").arguments[0] == 0xE7E90
    assert fake.only("cuStreamWaitEvent").arguments[1] == 0xE7E90
    assert driver.statistics()["events"] == 0
    driver.event_destroy(event)
    assert not fake.calls("cuEventDestroy")
    with pytest.raises(StaleHandleError):
        driver.event_query(event)


def test_device_of_a_stream_of_another_library(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuStreamGetDevice", 3)
    fake.value("cuCtxGetDevice", 2)
    assert driver.stream_device(IMPORTED) == 3
    assert [driver.stream_device(handle) for handle in (0, 1, 2)] == [0] * 3  # no context is current
    fake.push(0xC0)
    assert [driver.stream_device(handle) for handle in (0, 1, 2)] == [2] * 3


def test_device_of_a_captured_stream_is_not_asked_for(driver: CudaDriver, fake: Fake) -> None:
    """The question would make the capture fail."""
    fake.value("cuStreamIsCapturing", 1)
    with pytest.raises(BusyError, match="captured"):
        driver.stream_device(IMPORTED)
    assert not fake.calls("cuStreamGetDevice")
