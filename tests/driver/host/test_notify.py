from __future__ import annotations

import threading
import time

import pytest

from aiocuda.driver._port import open_port
from aiocuda.errors import InvalidTypeError, StaleHandleError
from tests.driver.host.kit import Mailbox, Rig


def test_tag_arrives_when_the_event_is_done_and_not_before(rig: Rig) -> None:
    mailbox, stream = Mailbox(), rig.stream()
    gate = rig.hold(stream)
    notifier = rig.driver.notifier(0, mailbox.port)
    notifier.ring(rig.record(stream), 7)
    other = rig.stream()
    rig.launch(other, lambda: None)
    rig.finish(other)
    assert mailbox.look() == []
    gate.open()
    assert mailbox.wait(1) == [7]
    assert rig.driver.stream_query(stream)


def test_tag_of_a_done_event_arrives_immediately_and_without_a_thread(rig: Rig) -> None:
    mailbox = Mailbox()
    notifier = rig.driver.notifier(1, mailbox.port)
    notifier.ring(rig.event(device=1), 1)
    assert mailbox.look() == [1]
    notifier.ring(rig.record(rig.stream()), 2)
    assert mailbox.look() == [1, 2]
    assert rig.driver.statistics()["threads"] == 0


def test_notifier_waits_for_the_record_at_the_time_of_ring(rig: Rig) -> None:
    mailbox, first, second = Mailbox(), rig.stream(), rig.stream()
    gates = [rig.hold(first), rig.hold(second)]
    event = rig.record(first)
    rig.driver.notifier(0, mailbox.port).ring(event, 1)
    rig.driver.event_record(event, second)
    gates[0].open()
    assert mailbox.wait(1) == [1]
    assert not rig.driver.event_query(event)
    gates[1].open()


def test_tags_arrive_in_the_order_in_which_events_are_done(rig: Rig) -> None:
    mailbox, stream = Mailbox(), rig.stream()
    gate = rig.hold(stream)
    for tag in range(rig.driver.notifier_limit(0)):
        rig.launch(stream, lambda: None)
        rig.driver.notifier(0, mailbox.port).ring(rig.record(stream), tag)
    gate.open()
    assert mailbox.wait(24) == list(range(24))


def test_ring_with_an_unknown_event_is_stale_and_the_notifier_stays_usable(rig: Rig) -> None:
    mailbox = Mailbox()
    notifier = rig.driver.notifier(0, mailbox.port)
    with pytest.raises(StaleHandleError, match="4711 is not an event"):
        notifier.ring(4711, 1)
    notifier.ring(rig.event(), 2)
    assert mailbox.look() == [2]


def test_notifiers_are_not_counted_as_streams(rig: Rig) -> None:
    rig.driver.notifier(0, Mailbox().port)
    assert rig.driver.statistics()["streams_created"] == rig.driver.statistics()["streams"] == 0


def test_offloaded_work_runs_elsewhere_then_the_tag_comes(rig: Rig) -> None:
    mailbox = Mailbox()
    threads: list[str] = []
    rig.driver.offload(lambda: threads.append(threading.current_thread().name), mailbox.port, 5)
    assert mailbox.wait(1) == [5]
    assert threads == ["aiocuda-worker-0"]
    assert rig.driver.statistics()["threads"] == 1


def test_other_ports_are_refused(rig: Rig) -> None:
    with pytest.raises(InvalidTypeError, match="no port of this driver"):
        rig.driver.offload(lambda: None, 3, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError):
        rig.driver.notifier(0, object())  # type: ignore[arg-type]


def test_clock_is_monotonic_and_in_seconds(rig: Rig) -> None:
    before = time.monotonic()
    assert before <= rig.driver.now() <= time.monotonic()


def test_host_functions_are_called_one_after_the_other(rig: Rig) -> None:
    """Two ports whose wakes take a while: one thread is never in a wake while another is."""
    inside = threading.Lock()
    overlaps: list[int] = []

    def wake() -> None:
        if not inside.acquire(blocking=False):
            overlaps.append(1)
            return
        threading.Event().wait(0.001)
        inside.release()

    streams = [rig.stream() for _ in range(4)]
    ports = [open_port(wake, watchable=False) for _ in streams]
    gates = [rig.hold(stream) for stream in streams]
    for tag, (stream, port) in enumerate(zip(streams, ports, strict=True)):
        rig.driver.notifier(0, port).ring(rig.record(stream), tag)
    for gate in gates:
        gate.open()
    rig.finish(*streams)
    mailbox = Mailbox()
    rig.driver.notifier(0, mailbox.port).ring(rig.event(), 99)
    mailbox.wait(1)
    assert [port.drain() for port in ports] == [[tag] for tag in range(4)]
    assert overlaps == []
    for port in ports:
        port.close()
