from __future__ import annotations

from collections.abc import Callable

import pytest

from aiocuda.driver.software._model import COMPUTE_SLOTS
from aiocuda.errors import BusyError, InvalidArgumentError, InvalidTypeError, StaleHandleError, WrongDeviceError
from tests.driver.host.kit import Rig


def test_held_stream_delays_its_later_work_and_no_other_stream(rig: Rig) -> None:
    held, other = rig.stream(), rig.stream()
    gate = rig.hold(held)
    log: list[str] = []
    rig.launch(held, lambda: log.append("held"))
    behind = rig.record(held)
    rig.launch(other, lambda: log.append("other"))
    rig.finish(other)
    assert log == ["other"]
    assert not rig.driver.event_query(behind)
    assert not rig.driver.stream_query(held)
    assert rig.driver.stream_query(other)
    gate.open()
    rig.finish(held)
    assert log == ["other", "held"]
    assert rig.driver.event_query(behind)


def test_sixteen_kernels_are_held_at_once_and_another_runs(rig: Rig) -> None:
    held = [rig.stream() for _ in range(16)]
    gates = [rig.hold(stream) for stream in held]
    other = rig.stream()
    ran: list[int] = []
    rig.launch(other, lambda: ran.append(1))
    rig.finish(other)
    assert ran
    assert not any(rig.driver.stream_query(stream) for stream in held)
    for gate in gates:
        gate.open()


def test_high_priority_goes_first_once_a_slot_is_free(rig: Rig) -> None:
    gates = [rig.hold(rig.stream()) for _ in range(COMPUTE_SLOTS)]
    low, high = rig.stream(priority=0), rig.stream(priority=-5)
    log: list[str] = []
    rig.launch(low, lambda: log.append("low"))
    rig.launch(high, lambda: log.append("high"))
    gates[0].open()
    rig.finish(low, high)
    assert log == ["high", "low"]
    for gate in gates:
        gate.open()


def test_priority_is_clamped(rig: Rig) -> None:
    assert rig.driver.priority_range(0) == (0, -5)
    asked = [3, 0, -2, -5, -9]
    assert [rig.driver.stream_priority(rig.stream(priority=each)) for each in asked] == [0, 0, -2, -5, -5]


def test_wait_holds_on_the_record_it_saw(rig: Rig) -> None:
    first, second, waiting = rig.stream(), rig.stream(), rig.stream()
    gates = [rig.hold(first), rig.hold(second)]
    event = rig.record(first)
    rig.driver.stream_wait(waiting, event)
    rig.driver.event_record(event, second)
    rig.driver.event_destroy(event)
    behind = rig.record(waiting)
    assert not rig.driver.event_query(behind)
    gates[0].open()
    rig.finish(waiting)
    assert rig.driver.event_query(behind)
    assert not rig.driver.stream_query(second)
    gates[1].open()


def test_wait_across_devices_holds(rig: Rig) -> None:
    here, there = rig.stream(0), rig.stream(1)
    gate = rig.hold(here)
    rig.driver.stream_wait(there, rig.record(here))
    assert not rig.driver.stream_query(there)
    gate.open()
    rig.finish(there)
    assert rig.driver.stream_query(here)


def test_record_across_devices_is_refused(rig: Rig) -> None:
    with pytest.raises(WrongDeviceError):
        rig.driver.event_record(rig.event(device=1), rig.stream(0))


def test_destroyed_stream_runs_on(rig: Rig) -> None:
    stream = rig.stream()
    gate = rig.hold(stream)
    event = rig.record(stream)
    rig.driver.stream_destroy(stream)
    other = rig.stream()
    rig.driver.stream_wait(other, event)
    gate.open()
    rig.finish(other)
    assert rig.driver.event_query(event)


def test_time_between_events_is_what_passed_between_them(rig: Rig) -> None:
    stream = rig.stream()
    start = rig.record(stream, timing=True)
    gate = rig.hold(stream)
    end = rig.record(stream, timing=True)
    with pytest.raises(BusyError, match=f"event {end} is not done"):
        rig.driver.event_elapsed_ms(start, end)
    gate.open()
    rig.finish(stream)
    elapsed = rig.driver.event_elapsed_ms(start, end)
    late = rig.record(stream, timing=True)
    assert 0.0 < elapsed < rig.driver.event_elapsed_ms(start, late) < 60_000.0
    assert rig.driver.event_elapsed_ms(end, start) == -elapsed


def test_event_without_time_has_no_time(rig: Rig) -> None:
    timed = rig.record(rig.stream(), timing=True)
    with pytest.raises(InvalidArgumentError, match="make it with timing=True"):
        rig.driver.event_elapsed_ms(timed, rig.record(rig.stream()))
    with pytest.raises(InvalidArgumentError, match="never recorded"):
        rig.driver.event_elapsed_ms(rig.event(timing=True), timed)


def test_default_stream_is_one_of_device_0(rig: Rig) -> None:
    gate = rig.hold(0)
    assert not rig.driver.stream_query(0)
    gate.open()
    rig.finish(0)
    assert rig.driver.statistics()["streams"] == 0


def test_unknown_handles_are_stale(rig: Rig) -> None:
    stream, event = rig.stream(), rig.event()
    rig.driver.stream_destroy(stream)
    rig.driver.event_destroy(event)
    driver = rig.driver
    using_stream: list[Callable[[], object]] = [
        lambda: driver.stream_destroy(stream),
        lambda: driver.stream_query(stream),
        lambda: driver.stream_priority(stream),
        lambda: driver.stream_synchronize(stream),
        lambda: driver.stream_capturing(stream),
        lambda: driver.stream_import(0, stream),
        lambda: driver.stream_handle(stream),
        lambda: driver.stream_wait(stream, rig.event()),
        lambda: driver.event_record(rig.event(), stream),
        lambda: driver.allocate(0, 1, stream),
    ]
    for call in using_stream:
        with pytest.raises(StaleHandleError, match=f"^{stream} is not a stream"):
            call()
    using_event: list[Callable[[], object]] = [
        lambda: driver.event_destroy(event),
        lambda: driver.event_query(event),
        lambda: driver.event_record(event, rig.stream()),
        lambda: driver.stream_wait(rig.stream(), event),
        lambda: driver.event_elapsed_ms(event, event),
    ]
    for call in using_event:
        with pytest.raises(StaleHandleError, match=f"^{event} is not an event"):
            call()


def test_stream_of_this_driver_can_be_imported(rig: Rig) -> None:
    stream = rig.stream(1)
    rig.driver.stream_import(1, stream)
    assert rig.driver.stream_handle(stream) == stream
    assert rig.driver.statistics()["streams_created"] == 1
    with pytest.raises(WrongDeviceError, match=f"stream {stream} belongs to device 1, not to device 0"):
        rig.driver.stream_import(0, stream)


def test_unknown_devices_are_refused(rig: Rig) -> None:
    for device in (-1, 2, 99):
        with pytest.raises(InvalidArgumentError, match=f"no device {device}: this driver has 2"):
            rig.driver.stream_create(device, 0)
    with pytest.raises(InvalidTypeError, match="device '0' must be an int"):
        rig.driver.event_create("0", False)  # type: ignore[arg-type]


def test_statistics_count_what_was_made(rig: Rig) -> None:
    before = rig.driver.statistics()
    assert before == dict.fromkeys(
        ("streams", "events", "graphs", "streams_created", "streams_kept", "threads", "calls"), 0
    )
    streams = [rig.stream() for _ in range(3)]
    rig.record(streams[0])
    rig.driver.stream_destroy(streams[2])
    assert rig.driver.statistics() == {
        "streams": 2,
        "events": 1,
        "graphs": 0,
        "streams_created": 3,
        "streams_kept": 0,
        "threads": 0,
        "calls": 6,
    }
