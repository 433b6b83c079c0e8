"""Streams with an exported handle: the calls of libcuda when they are destroyed, and when they are used again."""

from __future__ import annotations

import pytest

from aiocuda.driver._kept_streams import MOST_TESTED
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.errors import DeviceFault, StaleHandleError
from tests.driver.cuda.fake import Fake

_INT = 2**32 - 1


def exported(driver: CudaDriver, device: int = 0, priority: int = 0) -> tuple[int, int]:
    """A stream that another library may use: its handle here, and its ``CUstream``."""
    stream = driver.stream_create(device, priority)
    return stream, driver.stream_handle(stream)


def test_exported_stream_is_never_destroyed(driver: CudaDriver, fake: Fake) -> None:
    stream, _ = exported(driver)
    plain = driver.stream_create(0, 0)
    fake.forget()
    driver.stream_destroy(stream)
    assert fake.calls() == []
    driver.stream_destroy(plain)
    assert fake.names() == ["cuStreamDestroy"]
    driver.close()
    assert fake.names() == ["cuStreamDestroy"]  # nor is the primary context released
    counts = driver.statistics()
    assert (counts["streams"], counts["streams_created"], counts["streams_kept"]) == (0, 2, 1)


def test_primary_context_is_never_released(fake: Fake) -> None:
    driver = CudaDriver(fake.path)
    for _ in range(2):
        driver.device_open(0)
        driver.stream_destroy(exported(driver)[0])
        driver.close()
    assert len(fake.calls("cuDevicePrimaryCtxRetain")) == 1
    assert fake.calls("cuDevicePrimaryCtxRelease") == []


def test_ten_thousand_loans_make_one_stream(driver: CudaDriver, fake: Fake) -> None:
    names = set()
    for _ in range(10_000):
        stream, handle = exported(driver)
        names.add(stream)
        driver.stream_destroy(stream)
    assert driver.statistics()["streams_created"] == 1
    assert len(names) == 10_000
    assert driver.stream_handle(driver.stream_create(0, 0)) == handle


def test_name_of_a_stream_that_serves_again_is_stale(driver: CudaDriver, fake: Fake) -> None:
    stream, handle = exported(driver)
    event = driver.event_create(0, False)
    record = driver.recorder(stream)
    driver.stream_destroy(stream)
    again = driver.stream_create(0, 0)
    assert driver.stream_has_handle(again, handle)
    fake.forget()
    with pytest.raises(StaleHandleError):
        record(event)
    with pytest.raises(StaleHandleError):
        driver.stream_query(stream)
    assert fake.calls() == []
    driver.event_record(event, again)
    assert fake.only("cuEventRecord").arguments[1] == handle


def test_captured_stream_is_not_queried_and_does_not_serve(driver: CudaDriver, fake: Fake) -> None:
    stream, handle = exported(driver)
    driver.stream_destroy(stream)
    for status in (1, 2):  # active, and invalidated
        fake.value("cuStreamIsCapturing", status)
        fake.forget()
        assert not driver.stream_has_handle(driver.stream_create(0, 0), handle)
        assert fake.calls("cuStreamQuery") == []
    fake.value("cuStreamIsCapturing", 0)
    assert driver.stream_has_handle(driver.stream_create(0, 0), handle)


def test_query_leaves_other_captures_alone(driver: CudaDriver, fake: Fake) -> None:
    driver.stream_destroy(exported(driver)[0])
    fake.capture_mode(0)
    fake.forget()
    driver.stream_create(0, 0)
    exchange = "cuThreadExchangeStreamCaptureMode"
    assert fake.names() == ["cuStreamIsCapturing", exchange, "cuStreamQuery", exchange]
    assert fake.capture_mode() == 0


def test_busy_stream_does_not_serve(driver: CudaDriver, fake: Fake) -> None:
    stream, handle = exported(driver)
    driver.stream_destroy(stream)
    fake.answer("cuStreamQuery", 600)
    assert not driver.stream_has_handle(driver.stream_create(0, 0), handle)
    fake.answer("cuStreamQuery", 0)
    assert driver.stream_has_handle(driver.stream_create(0, 0), handle)


def test_imported_stream_does_not_serve(driver: CudaDriver, fake: Fake) -> None:
    stream, handle = exported(driver)
    driver.stream_destroy(stream)
    driver.stream_import(0, handle)
    assert not driver.stream_has_handle(driver.stream_create(0, 0), handle)
    driver.stream_destroy(handle)
    assert driver.stream_has_handle(driver.stream_create(0, 0), handle)


def test_stream_serves_its_own_device_and_priority(driver: CudaDriver, fake: Fake) -> None:
    driver.device_open(1)
    kinds = [(device, priority) for device in (0, 1) for priority in (0, -5)]
    streams = [exported(driver, *kind) for kind in kinds]
    for stream, _ in streams:
        driver.stream_destroy(stream)
    again = [driver.stream_create(*kind) for kind in reversed(kinds)]
    assert [driver.stream_handle(stream) for stream in again] == [handle for _, handle in reversed(streams)]
    assert driver.statistics()["streams_created"] == 4


def test_stream_that_the_driver_refuses_to_query_is_left_alone(driver: CudaDriver, fake: Fake) -> None:
    stream, handle = exported(driver)
    driver.stream_destroy(stream)
    for call in ("cuStreamIsCapturing", "cuStreamQuery"):
        fake.answer(call, 400)
        assert not driver.stream_has_handle(driver.stream_create(0, 0), handle)
        fake.answer(call, 0)
    assert driver.fault is None
    assert driver.statistics()["streams_kept"] == 1


def test_fault_that_the_query_finds_is_raised(driver: CudaDriver, fake: Fake) -> None:
    driver.stream_destroy(exported(driver)[0])
    fake.answer("cuStreamQuery", 700)
    with pytest.raises(DeviceFault):
        driver.stream_create(0, 0)
    fake.forget()
    with pytest.raises(DeviceFault):
        driver.stream_create(0, 0)
    assert fake.calls() == []


def test_nothing_is_destroyed_after_a_fault(driver: CudaDriver, fake: Fake) -> None:
    stream, _ = exported(driver)
    fake.answer("cuStreamQuery", 700)
    with pytest.raises(DeviceFault):
        driver.stream_query(stream)
    fake.forget()
    driver.stream_destroy(stream)
    assert fake.calls() == []


def test_cost_of_opening_beside_busy_streams_is_linear(driver: CudaDriver, fake: Fake) -> None:
    def calls(count: int) -> int:
        for stream in [exported(driver)[0] for _ in range(count)]:
            driver.stream_destroy(stream)
        fake.answer("cuStreamQuery", 600)
        before = driver.statistics()["calls"]
        for stream in [driver.stream_create(0, 0) for _ in range(count)]:
            driver.stream_destroy(stream)
        fake.answer("cuStreamQuery", 0)
        return driver.statistics()["calls"] - before

    few = calls(4 * MOST_TESTED)
    assert calls(16 * MOST_TESTED) <= 6 * few
