"""Events: done when the work before their last record is done, and not before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ...driver.protocol import RecordRefused, native_call
from ...errors import StaleHandleError
from ..kernels import AFFINE, SPIN
from ._base import VERBS, Conformance, probe
from ._native import by_ctypes, forms
from ._rig import Rig, address_of, span

__all__ = ["EventConformance"]


class EventConformance(Conformance):
    """Rules for events and waits for them."""

    def test_never_recorded_event_is_done(self, rig: Rig) -> None:
        """An event that was never recorded counts as done."""
        assert rig.driver.event_query(rig.event())

    def test_never_recorded_event_delays_nothing(self, rig: Rig) -> None:
        """Waiting for an event that was never recorded does nothing."""
        work = probe(rig, "fill")
        stream = rig.stream()
        rig.driver.stream_wait(stream, rig.event())
        work.enqueue(stream)
        rig.finish(stream)
        assert work.complete()

    @pytest.mark.parametrize("verb", VERBS)
    def test_event_is_not_done_early(self, rig: Rig, verb: str) -> None:
        """An event is not done before the work that was enqueued before it."""
        work = probe(rig, verb)
        stream = rig.stream()
        hold = rig.hold(stream)
        work.enqueue(stream)
        event = rig.record(stream)
        rig.witness()
        assert not rig.driver.event_query(event)
        hold.release()
        rig.finish_event(event)
        assert work.complete()

    @pytest.mark.parametrize("verb", ["launch", "upload", "download"])
    def test_recorded_call_enqueues_its_work_and_then_its_event(self, rig: Rig, verb: str) -> None:
        """A recorded launch or copy does its work in the stream's order; its event is done after it, not before.

        So do the functions in C that the driver may have for it.
        """
        driver, stream, event = rig.driver, rig.stream(), rig.event()
        memory, host = rig.memory(64), rig.pinned(16, "u4")
        values: Sequence[Any] = ()
        if verb == "launch":
            recorded = driver.recorded_launch(stream, rig.function(AFFINE), (1, 1, 1), (32, 1, 1), 0)
            values = rig.arguments(span(memory, 16, "u4"), 16, 0, 5)
        else:
            bind = driver.recorded_upload if verb == "upload" else driver.recorded_download
            ends = (memory, address_of(host)) if verb == "upload" else (address_of(host), memory)
            recorded = bind(stream, *ends, 64)
        for call in forms(recorded):
            rig.clear(memory, 64)
            host[:] = 7
            hold = rig.hold(stream)
            with rig.unblocked("enqueueing"):
                call(values, event)
            rig.witness()
            assert not driver.event_query(event)
            assert host.tolist() == [7] * 16
            hold.release()
            rig.finish_event(event)
            if verb == "download":
                assert host.tolist() == [0] * 16
            else:
                assert rig.look(memory, 16, "u4").tolist() == [5 if verb == "launch" else 7] * 16

    def test_functions_in_c_are_closed_with_their_stream(self, rig: Rig) -> None:
        """The functions in C of a recorded call must not be called after the stream was destroyed."""
        stream, memory, host = rig.stream(), rig.memory(64), rig.pinned(16, "u4")
        native = native_call(rig.driver.recorded_upload(stream, memory, address_of(host), 64))
        record = native_call(rig.driver.recorder(stream))
        rig.destroy_stream(stream)
        for each in (native, record):
            if each is not None:  # a driver need not have them
                with pytest.raises(AssertionError, match="must not be called"):
                    by_ctypes(each)((), rig.event())

    def test_recorded_call_with_an_unknown_event_is_accepted(self, rig: Rig) -> None:
        """If only the record fails, `RecordRefused` has the error, and the stream has accepted the work."""
        stream, memory, host = rig.stream(), rig.memory(64), rig.pinned(16, "u4")
        host[:] = 7
        call = rig.driver.recorded_upload(stream, memory, address_of(host), 64)
        unknown = rig.driver.event_create(rig.device, False)
        rig.driver.event_destroy(unknown)
        with pytest.raises(RecordRefused) as refused:
            call((), unknown)
        assert isinstance(refused.value.error, StaleHandleError)
        rig.finish(stream)
        assert rig.look(memory, 16, "u4").tolist() == [7] * 16

    def test_recorded_wait_waits_for_each_event_and_then_records(self, rig: Rig) -> None:
        """The recorded event of several waits is done after all the work that they wait for, and later work, too."""
        work = probe(rig, "fill")
        stream, joined = rig.stream(), rig.event()
        call = rig.driver.recorded_wait(stream)
        holds, events = [], []
        for _ in range(2):
            held = rig.stream()
            holds.append(rig.hold(held))
            events.append(rig.record(held))
        with rig.unblocked("enqueueing"):
            call(events, joined)
        work.enqueue(stream)
        holds[0].release()
        rig.finish_event(events[0])
        rig.witness()
        assert not rig.driver.event_query(joined)
        work.check_waits_for(holds[1], rig, stream)
        rig.finish_event(joined)

    def test_recorded_wait_for_no_event_only_records(self, rig: Rig) -> None:
        """A recorded wait for no events is a record."""
        stream, joined = rig.stream(), rig.event()
        hold = rig.hold(stream)
        rig.driver.recorded_wait(stream)((), joined)
        assert not rig.driver.event_query(joined)
        hold.release()
        rig.finish_event(joined)

    def test_recorded_wait_with_an_unknown_event(self, rig: Rig) -> None:
        """If a wait fails, nothing is recorded. If only the record fails, the stream waits."""
        driver, stream, held, unknown = rig.driver, rig.stream(), rig.stream(), rig.event()
        work = probe(rig, "fill")
        hold = rig.hold(held)
        event, joined = rig.record(held), rig.record(held)
        rig.destroy_event(unknown)
        call = driver.recorded_wait(stream)
        with pytest.raises(StaleHandleError):
            call((unknown, event), rig.record(held))
        with pytest.raises(RecordRefused) as refused:
            call((event,), unknown)
        assert isinstance(refused.value.error, StaleHandleError)
        assert not driver.event_query(joined)
        work.enqueue(stream)
        work.check_waits_for(hold, rig, stream)

    def test_waiter_makes_each_stream_wait(self, rig: Rig) -> None:
        """A waiter makes all its streams wait for an event, each time that it is called."""
        works = [probe(rig, "fill") for _ in range(2)]
        streams, held = [rig.stream() for _ in works], rig.stream()
        wait = rig.driver.waiter(streams)
        wait(rig.event())
        hold = rig.hold(held)
        event = rig.record(held)
        with rig.unblocked("waiting"):
            wait(event)
        for work, stream in zip(works, streams, strict=True):
            work.enqueue(stream)
        rig.witness()
        assert works[1].untouched()
        works[0].check_waits_for(hold, rig, streams[0])
        rig.finish(*streams)
        assert works[1].complete()

    def test_event_of_an_idle_stream_is_done(self, rig: Rig) -> None:
        """An event in an idle stream is done soon, even if another stream is held."""
        held, idle = rig.stream(), rig.stream()
        hold = rig.hold(held)
        rig.finish_event(rig.record(idle))
        assert hold.running

    def test_events_are_done_one_after_the_other(self, rig: Rig) -> None:
        """The events of one stream are done in their order."""
        stream = rig.stream()
        holds, events = [], []
        for _ in range(4):
            holds.append(rig.hold_later(stream))
            events.append(rig.record(stream))
        for done, hold in enumerate(holds):
            hold.wait_running()
            assert [rig.driver.event_query(event) for event in events] == [True] * done + [False] * (4 - done)
            hold.release()
        rig.finish_event(events[-1])

    def test_recording_again_is_not_done_before_the_new_work(self, rig: Rig) -> None:
        """A second record makes a done event wait for the new work."""
        stream = rig.stream()
        event = rig.record(stream)
        rig.finish_event(event)
        hold = rig.hold(stream)
        rig.driver.event_record(event, stream)
        rig.witness()
        assert not rig.driver.event_query(event)
        hold.release()
        rig.finish_event(event)

    def test_recording_again_elsewhere_forgets_the_old_work(self, rig: Rig) -> None:
        """A second record in another stream replaces the first one."""
        held, idle = rig.stream(), rig.stream()
        hold = rig.hold(held)
        event = rig.record(held)
        assert not rig.driver.event_query(event)
        rig.driver.event_record(event, idle)
        rig.finish_event(event)
        assert hold.running

    def test_wait_keeps_the_record_that_it_saw(self, rig: Rig) -> None:
        """A wait is for the record at the time of the call, not for later ones."""
        work = probe(rig, "fill")
        first, second, waiter = rig.stream(), rig.stream(), rig.stream()
        hold, later = rig.hold(first), rig.hold(second)
        event = rig.record(first)
        rig.driver.stream_wait(waiter, event)
        rig.driver.event_record(event, second)
        work.enqueue(waiter)
        work.check_waits_for(hold, rig, waiter)
        assert later.running
        assert not rig.driver.event_query(event)

    def test_wait_holds_when_the_event_is_recorded_again(self, rig: Rig) -> None:
        """A wait still holds after the event was recorded again in an idle stream."""
        work = probe(rig, "fill")
        held, idle, waiter = rig.stream(), rig.stream(), rig.stream()
        hold = rig.hold(held)
        event = rig.record(held)
        rig.driver.stream_wait(waiter, event)
        rig.driver.event_record(event, idle)
        work.enqueue(waiter)
        rig.finish_event(event)
        work.check_waits_for(hold, rig, waiter)

    def test_wait_for_a_done_record_ignores_later_ones(self, rig: Rig) -> None:
        """A wait for a done event does not wait for a later record of it."""
        work = probe(rig, "fill")
        stream, waiter = rig.stream(), rig.stream()
        event = rig.record(stream)
        rig.finish_event(event)
        hold = rig.hold(stream)
        rig.driver.stream_wait(waiter, event)
        rig.driver.event_record(event, stream)
        work.enqueue(waiter)
        rig.finish(waiter)
        assert work.complete()
        assert hold.running

    def test_wait_survives_the_event(self, rig: Rig) -> None:
        """Destroying an event does not block, and does not end the waits for it."""
        work = probe(rig, "fill")
        held, waiter = rig.stream(), rig.stream()
        hold = rig.hold(held)
        event = rig.record(held)
        rig.driver.stream_wait(waiter, event)
        with rig.unblocked("event_destroy"):
            rig.destroy_event(event)
        work.enqueue(waiter)
        work.check_waits_for(hold, rig, waiter)

    def test_elapsed_time_is_that_of_the_work_between(self, rig: Rig) -> None:
        """The elapsed time of two events covers a kernel of 20 ms between them."""
        stream = rig.stream()
        start, end = rig.event(timing=True), rig.event(timing=True)
        rig.driver.event_record(start, stream)
        rig.launch(stream, SPIN, 20_000_000)
        rig.driver.event_record(end, stream)
        rig.finish_event(end)
        # A device's timer has a resolution of about 1 µs, so a time of less than 19.5 ms is wrong.
        assert 19.5 <= rig.driver.event_elapsed_ms(start, end) <= rig.patience * 1e3

    def test_bracketed_queries_answer_alike(self, rig: Rig) -> None:
        """Queries between `begin_queries` and `end_queries` return the same as others."""
        stream = rig.stream()
        hold = rig.hold(stream)
        event = rig.record(stream)
        rig.driver.begin_queries()
        try:
            assert not rig.driver.event_query(event)
            assert not rig.driver.stream_query(stream)
            hold.release()
            rig.finish_event(event)
        finally:
            rig.driver.end_queries()

    @pytest.mark.parametrize("verb", ["query", "destroy", "record", "wait", "waiter", "elapsed", "ring"])
    def test_destroyed_event_is_stale(self, rig: Rig, verb: str) -> None:
        """Every verb refuses the handle of a destroyed event."""
        driver, stream, event = rig.driver, rig.stream(), rig.event(timing=True)
        driver.event_record(event, stream)
        rig.finish_event(event)
        rig.destroy_event(event)
        other = rig.event(timing=True)  # must not get the handle of the destroyed one
        driver.event_record(other, stream)
        rig.finish_event(other)
        use: dict[str, Callable[[], object]] = {
            "query": lambda: driver.event_query(event),
            "destroy": lambda: driver.event_destroy(event),
            "record": lambda: driver.event_record(event, stream),
            "wait": lambda: driver.stream_wait(stream, event),
            "waiter": lambda: driver.waiter((stream,))(event),
            "elapsed": lambda: driver.event_elapsed_ms(event, other),
            "ring": lambda: rig.ring(event),
        }
        with pytest.raises(StaleHandleError):
            use[verb]()
