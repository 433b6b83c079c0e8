"""Streams: order within a stream, independence of other streams, waits, priorities, imports, exports, overlap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ...errors import StaleHandleError
from ..kernels import SPIN, STAMP
from ._base import VERBS, Conformance, probe
from ._native import waits
from ._rig import Rig, address_of, span

__all__ = ["OverlapConformance", "StreamConformance"]


class StreamConformance(Conformance):
    """Rules for streams."""

    def test_new_stream_is_idle(self, rig: Rig) -> None:
        """A new stream has no work, is not being captured, and its handle is not 0."""
        stream = rig.stream()
        assert stream != 0
        assert rig.driver.stream_query(stream)
        assert not rig.driver.stream_capturing(stream)

    def test_reserved_streams_belong_to_nobody(self, rig: Rig) -> None:
        """`stream_reserve` may be called several times, and no stream of it counts."""
        before = rig.driver.statistics()
        for count in (8, 8, 4):
            rig.offload(lambda: rig.driver.stream_reserve(rig.device, count))  # noqa: B023 - called at once
        after = rig.driver.statistics()
        assert [after[name] - before[name] for name in ("streams", "streams_created", "streams_kept")] == [0, 0, 0]
        assert rig.driver.stream_query(rig.stream())

    def test_handles_are_never_used_twice(self, rig: Rig) -> None:
        """A handle of a destroyed stream or event never names another one."""
        seen: set[int] = set()
        for _ in range(20):
            made = rig.stream(), rig.event()
            assert not seen & set(made)
            seen.update(made)
            rig.destroy_stream(made[0])
            rig.destroy_event(made[1])

    @pytest.mark.parametrize("verb", VERBS)
    def test_work_after_a_held_kernel_is_not_visible(self, rig: Rig, verb: str) -> None:
        """Work writes nothing while an earlier kernel of its stream runs."""
        work = probe(rig, verb)
        stream = rig.stream()
        hold = rig.hold(stream)
        with rig.unblocked(verb):
            work.enqueue(stream)
        rig.witness()
        assert work.untouched()
        assert not rig.driver.stream_query(stream)
        assert hold.running
        hold.release()
        rig.finish(stream)
        assert work.complete()

    @pytest.mark.parametrize("verb", VERBS)
    def test_other_streams_proceed(self, rig: Rig, verb: str) -> None:
        """A held stream delays no work of another stream."""
        work = probe(rig, verb)
        held, free = rig.stream(), rig.stream()
        hold = rig.hold(held)
        with rig.unblocked(verb):
            work.enqueue(free)
        rig.finish(free)
        assert work.complete()
        assert hold.running
        assert not rig.driver.stream_query(held)

    def test_kernels_of_eight_streams_run_concurrently(self, rig: Rig) -> None:
        """Kernels of eight streams run at the same time."""
        holds = [rig.hold_later(rig.stream()) for _ in range(8)]
        rig.wait_until(lambda: all(hold.started for hold in holds), "kernels of eight streams run at once")
        assert all(hold.running for hold in holds)

    def test_stream_keeps_order(self, rig: Rig) -> None:
        """100 operations of one stream run in their order, whatever engine each of them uses."""
        # Each operation reads what the one before it has written.
        stream = rig.stream()
        first, second = rig.memory(256), rig.memory(256)
        up, down = rig.small(64, "u4"), rig.small(64, "u4")
        expected = np.zeros(64, "u4")
        hold = rig.hold(stream)
        with rig.unblocked("enqueueing 100 operations"):
            for step in range(20):
                rig.affine(stream, first, 64, 3, step)
                rig.driver.copy(stream, second, first, 256)
                rig.affine(stream, second, 64, 5, 1)
                rig.driver.download(stream, down.ctypes.data, second, 256)
                rig.driver.upload(stream, first, down.ctypes.data, 256)
                expected = (expected * np.uint32(3) + np.uint32(step)) * np.uint32(5) + np.uint32(1)
        rig.driver.upload(stream, second, up.ctypes.data, 256)
        hold.release()
        rig.finish(stream)
        assert (down == expected).all()
        assert (rig.look(first, 64, "u4") == expected).all()
        assert not rig.look(second, 64, "u4").any()

    @pytest.mark.parametrize("verb", VERBS)
    def test_work_after_a_wait_is_not_visible(self, rig: Rig, verb: str) -> None:
        """Work after `stream_wait`, or its function in C, writes nothing before the event is done."""
        first, second = rig.stream(), rig.stream()
        for wait in waits(rig.driver, second):
            work = probe(rig, verb)
            hold = rig.hold(first)
            event = rig.record(first)
            with rig.unblocked(f"a wait and {verb}"):
                wait(event)
                work.enqueue(second)
            rig.witness()
            assert work.untouched()
            assert not rig.driver.stream_query(second)
            hold.release()
            rig.finish(second)
            assert work.complete()

    def test_waits_order_memory_across_streams(self, rig: Rig) -> None:
        """Two streams write one buffer in turn, ordered by one event that is recorded again and again."""
        streams = rig.stream(), rig.stream()
        memory, event = rig.memory(256), rig.event()
        expected = np.zeros(64, "u4")
        hold = rig.hold(streams[0])
        with rig.unblocked("enqueueing 50 hand-overs"):
            for step in range(50):
                stream, other = streams[step % 2], streams[1 - step % 2]
                rig.affine(stream, memory, 64, 3, step)
                rig.driver.event_record(event, stream)
                rig.driver.stream_wait(other, event)
                expected = expected * np.uint32(3) + np.uint32(step)
        hold.release()
        rig.finish(*streams)
        assert (rig.look(memory, 64, "u4") == expected).all()

    def test_fork_and_join(self, rig: Rig) -> None:
        """Three streams wait for one, and that one waits for all three."""
        trunk, branches = rig.stream(), [rig.stream() for _ in range(3)]
        memory = rig.memory(4 * 256)
        hold = rig.hold(trunk)
        rig.driver.fill(trunk, memory, b"\x01\x00\x00\x00", 4 * 64)
        forked = rig.record(trunk)
        for index, branch in enumerate(branches):
            rig.driver.stream_wait(branch, forked)
            rig.affine(branch, memory + 256 * index, 64, 10, index)
            rig.driver.stream_wait(trunk, rig.record(branch))
        rig.affine(trunk, memory, 4 * 64, 2, 0)
        rig.witness()
        assert not rig.look(memory, 4 * 64, "u4").any()
        hold.release()
        rig.finish(trunk)
        rows = rig.look(memory, 4 * 64, "u4").reshape(4, 64)
        assert (rows == np.array([[20], [22], [24], [2]])).all()

    def test_synchronize_waits_for_the_whole_stream(self, rig: Rig) -> None:
        """`stream_synchronize` returns when all work of the stream is done, and not before."""
        work = probe(rig, "launch")
        stream = rig.stream()
        hold = rig.hold(stream)
        work.enqueue(stream)
        tag = rig.tag()
        rig.driver.offload(lambda: rig.driver.stream_synchronize(stream), rig.port, tag)
        rig.witness()
        assert tag not in rig.tags()
        hold.release()
        rig.wait_tags(tag)
        assert rig.driver.stream_query(stream)
        assert work.complete()

    def test_destroyed_stream_finishes_its_work(self, rig: Rig) -> None:
        """`stream_destroy` does not block, and the work of the stream still runs."""
        work = probe(rig, "launch")
        stream = rig.stream()
        hold = rig.hold(stream)
        work.enqueue(stream)
        event = rig.record(stream)
        with rig.unblocked("stream_destroy"):
            rig.destroy_stream(stream)
        rig.witness()
        assert not rig.driver.event_query(event)
        assert work.untouched()
        hold.release()
        rig.finish_event(event)
        assert work.complete()

    def test_enqueueing_400_kernels_does_not_block(self, rig: Rig) -> None:
        """400 launches into a held stream do not block."""
        # A hardware queue of a GPU takes about 1 021 entries before it blocks its caller.
        stream, memory = rig.stream(), rig.memory(256)
        hold = rig.hold(stream)
        with rig.unblocked("the launch of one of 400 kernels"):
            for _ in range(400):
                rig.affine(stream, memory, 64, 1, 1)
        assert not rig.look(memory, 64, "u4").any()
        hold.release()
        rig.finish(stream)
        assert (rig.look(memory, 64, "u4") == 400).all()

    def test_priority_is_clamped_and_can_be_read(self, rig: Rig) -> None:
        """A priority outside of `priority_range` is moved into it; `stream_priority` returns the result."""
        least, greatest = rig.driver.priority_range(rig.device)
        assert least > greatest  # a smaller number is a higher priority
        for asked, given in ((greatest, greatest), (least, least), (greatest - 100, greatest), (least + 100, least)):
            assert rig.driver.stream_priority(rig.stream(asked)) == given

    def test_high_priority_goes_first(self, rig: Rig) -> None:
        """Of two kernels that wait for the device, the one in the stream of higher priority runs first."""
        least, greatest = rig.driver.priority_range(rig.device)
        low, high = rig.stream(least), rig.stream(greatest)
        blocks = 2 * rig.properties.multiprocessors
        block = (rig.properties.max_threads_per_block, 1, 1)
        count, order = rig.memory(4), rig.memory(8 * blocks)
        holds = [rig.hold_later(rig.stream(), grid=(2 * blocks, 1, 1), block=block) for _ in range(self.full_house)]
        rig.wait_until(lambda: all(hold.started for hold in holds), "the kernels that fill the device start")
        for who, stream in ((1, low), (2, high)):
            arguments = span(count, 1, "u4"), span(order, 2 * blocks, "u4"), who, 200_000
            rig.launch(stream, STAMP, *arguments, grid=(blocks, 1, 1), block=block)
        rig.release_all()
        rig.finish(low, high)
        stamps = int(rig.look(count, 1, "u4")[0])
        first_half = rig.look(order, stamps, "u4")[: stamps // 2]
        # Blocks of both kernels may start when the device becomes free, so only the majority counts.
        assert (first_half == 2).mean() > 0.5

    def test_imported_stream_is_the_same_queue(self, rig: Rig) -> None:
        """`stream_import` names the same queue of work; destroying the import leaves the stream alone."""
        driver, stream = rig.driver, rig.stream()
        work = probe(rig, "fill")
        name = driver.stream_handle(stream)
        assert driver.stream_import(rig.device, name) == name
        hold = rig.hold(stream)
        with rig.unblocked("fill"):
            work.enqueue(name)
        rig.witness()
        assert work.untouched()
        assert not driver.stream_query(name)
        hold.release()
        rig.finish(stream)
        assert work.complete()
        if name != stream:
            driver.stream_destroy(name)  # removes the import, not the stream
        assert driver.stream_query(stream)

    def test_default_stream_is_one_queue_with_several_handles(self, rig: Rig) -> None:
        """Each call of `stream_default` returns a new handle of the same queue."""
        driver = rig.driver
        before = driver.statistics()
        first, second = driver.stream_default(rig.device), driver.stream_default(rig.device)
        after = driver.statistics()
        assert (after["streams"], after["streams_created"]) == (before["streams"], before["streams_created"])
        assert first != second
        assert driver.stream_handle(first) == driver.stream_handle(second)
        work = probe(rig, "fill")
        hold = rig.hold(first)
        with rig.unblocked("fill"):
            work.enqueue(second)
        rig.witness()
        assert work.untouched()  # both handles name one queue
        assert not driver.stream_query(second)
        hold.release()
        rig.finish(second)
        assert work.complete()
        driver.stream_destroy(first)
        assert driver.stream_query(second)  # only the handle was removed
        with pytest.raises(StaleHandleError):
            driver.stream_query(first)
        driver.stream_destroy(second)

    def test_exported_stream_is_reused_under_a_new_handle(self, rig: Rig) -> None:
        """A destroyed stream with an exported handle is kept and reused, with a new handle of this driver."""
        driver = rig.driver
        names = set()
        before = driver.statistics()
        for _ in range(50):
            stream = rig.stream()
            driver.stream_handle(stream)
            rig.destroy_stream(stream)
            names.add(stream)
        after = driver.statistics()
        assert len(names) == 50
        assert after["streams"] == before["streams"]
        assert after["streams_created"] <= before["streams_created"] + 1
        made = after["streams_created"] - before["streams_created"]
        assert after["streams_kept"] == before["streams_kept"] + made

    def test_comparing_a_handle_exports_no_stream(self, rig: Rig) -> None:
        """`stream_has_handle` compares handles, and does not count as an export."""
        driver, first, second = rig.driver, rig.stream(), rig.stream()
        handle = driver.stream_handle(first)
        assert driver.stream_has_handle(first, handle)
        assert not driver.stream_has_handle(second, handle)
        before = driver.statistics()["streams_kept"]
        rig.destroy_stream(first)
        rig.destroy_stream(second)
        # The second stream may be one that an earlier test has exported.
        assert driver.statistics()["streams_kept"] in (before + 1, before + 2)

    def test_exported_stream_lives_on_when_it_is_destroyed(self, rig: Rig) -> None:
        """The exported handle stays valid after `stream_destroy`: another library may still use it."""
        # PyTorch records an event in such a stream when it frees a pinned tensor.
        driver, stream = rig.driver, rig.stream()
        work = probe(rig, "fill")
        handle = driver.stream_handle(stream)
        rig.destroy_stream(stream)
        driver.stream_import(rig.device, handle)
        try:
            work.enqueue(handle)
            rig.finish_event(rig.record(handle))
            assert work.complete()
        finally:
            driver.stream_destroy(handle)
        with pytest.raises(StaleHandleError):
            driver.stream_query(handle)
        driver.stream_import(rig.device, handle)
        driver.stream_destroy(handle)

    def test_exported_stream_is_not_reused_while_it_is_busy(self, rig: Rig) -> None:
        """A destroyed exported stream is not reused before its work is done."""
        driver, stream = rig.driver, rig.stream()
        work = probe(rig, "launch")
        hold = rig.hold(stream)
        end = rig.record(stream)
        handle = driver.stream_handle(stream)
        rig.destroy_stream(stream)
        others = [rig.stream() for _ in range(3)]
        assert not any(driver.stream_has_handle(other, handle) for other in others)
        work.enqueue(others[0])
        rig.finish(others[0])
        assert work.complete()
        assert hold.running
        assert not driver.event_query(end)
        hold.release()
        rig.finish_event(end)

    def test_exported_stream_is_not_reused_while_it_is_imported(self, rig: Rig) -> None:
        """A destroyed exported stream is not reused while an import names it."""
        driver, stream = rig.driver, rig.stream()
        handle = driver.stream_handle(stream)
        rig.destroy_stream(stream)
        driver.stream_import(rig.device, handle)
        try:
            assert not any(driver.stream_has_handle(rig.stream(), handle) for _ in range(3))
        finally:
            driver.stream_destroy(handle)

    def test_exported_stream_keeps_its_priority(self, rig: Rig) -> None:
        """A reused stream has the priority that the new stream asks for."""
        least, greatest = rig.driver.priority_range(rig.device)
        for priority in (greatest, least, greatest, least):
            stream = rig.stream(priority)
            assert rig.driver.stream_priority(stream) == priority
            rig.driver.stream_handle(stream)
            rig.destroy_stream(stream)

    @pytest.mark.parametrize("verb", ["launch", "record", "wait", "recorded wait"])
    def test_bound_call_is_stale_when_its_stream_is_reused(self, rig: Rig, verb: str) -> None:
        """A launcher, recorder or waiter of a destroyed stream never writes into the stream that reuses it."""
        driver, stream = rig.driver, rig.stream()
        handle, event = driver.stream_handle(stream), rig.event()
        launch = driver.launcher(stream, rig.function(SPIN), (1, 1, 1), (1, 1, 1), 0)
        record, wait, recorded_wait = driver.recorder(stream), driver.waiter((stream,)), driver.recorded_wait(stream)
        rig.destroy_stream(stream)
        for _ in range(50):
            again = rig.stream()
            if driver.stream_has_handle(again, handle):
                break
        assert driver.stream_has_handle(again, handle)
        use: dict[str, Callable[[], object]] = {
            "launch": lambda: launch((1,)),
            "record": lambda: record(event),
            "wait": lambda: wait(event),
            "recorded wait": lambda: recorded_wait((event,), event),
        }
        with pytest.raises(StaleHandleError):
            use[verb]()

    def test_destroyed_stream_cannot_be_imported(self, rig: Rig) -> None:
        """`stream_import` refuses the handle of a destroyed stream that was never exported."""
        stream = rig.stream()
        rig.destroy_stream(stream)
        with pytest.raises(StaleHandleError):
            rig.driver.stream_import(rig.device, stream)

    @pytest.mark.parametrize("verb", [*VERBS, "query", "destroy", "priority", "capturing", "record", "wait"])
    def test_destroyed_stream_is_stale(self, rig: Rig, verb: str) -> None:
        """Every verb refuses the handle of a destroyed stream."""
        driver, stream, event = rig.driver, rig.stream(), rig.event()
        use: dict[str, Callable[[int], object]] = {
            "query": driver.stream_query,
            "destroy": driver.stream_destroy,
            "priority": driver.stream_priority,
            "capturing": driver.stream_capturing,
            "record": lambda stream: driver.event_record(event, stream),
            "wait": lambda stream: driver.stream_wait(stream, event),
        }
        if verb in VERBS:
            use[verb] = probe(rig, verb).enqueue
        rig.destroy_stream(stream)
        rig.stream()  # must not get the handle of the destroyed one
        with pytest.raises(StaleHandleError):
            use[verb](stream)


#: Enqueues the work of one leg into a stream. Alone it takes `Conformance.leg_seconds`.
_Leg = Callable[[int], None]


class OverlapConformance(Conformance):
    """Rules about overlap. Each test compares the times of its legs, alone and together, measured in the same run."""

    def test_upload_compute_and_download_overlap(self, rig: Rig) -> None:
        """An upload, a kernel and a download together take about as long as the longest of them."""
        legs = [self._copies(rig, "upload"), self._spin(rig), self._copies(rig, "download")]
        alone = [self._together(rig, leg) for leg in legs]
        # On a GPU the two directions slow each other down a little: to 0.92 of full speed on an H200.
        assert self._least(rig, legs, (sum(alone) + max(alone)) / 2)

    @pytest.mark.parametrize("verb", ["upload", "download"])
    def test_two_copies_of_one_direction_share_an_engine(self, rig: Rig, verb: str) -> None:
        """Two copies in the same direction take as long as one after the other."""
        legs = [self._copies(rig, verb), self._copies(rig, verb)]
        alone = [min(self._together(rig, leg) for _ in range(2)) for leg in legs]
        # Two engines would take half of the sum.
        assert self._together(rig, *legs) > 0.75 * sum(alone)

    def test_kernels_of_eight_streams_overlap(self, rig: Rig) -> None:
        """Eight kernels of eight streams take less than four times as long as one."""
        legs = [self._spin(rig)] * 8
        alone = self._together(rig, legs[0])
        assert self._least(rig, legs, 4 * alone)

    def _least(self, rig: Rig, legs: list[_Leg], bound: float) -> bool:
        """True if one of three runs of all legs takes less than ``bound``. A busy machine delays single runs."""
        return any(self._together(rig, *legs) < bound for _ in range(3))

    def _together(self, rig: Rig, *legs: _Leg) -> float:
        """Return the seconds from the first enqueue until all legs are done, each in its own stream."""
        streams = [rig.stream() for _ in legs]
        start = rig.driver.now()
        with rig.unblocked("enqueueing a leg"):
            for stream, leg in zip(streams, legs, strict=True):
                leg(stream)
        rig.finish(*streams)
        return rig.driver.now() - start

    def _spin(self, rig: Rig) -> _Leg:
        nanoseconds = int(self.leg_seconds * 1e9)
        return lambda stream: rig.launch(stream, SPIN, nanoseconds)

    def _copies(self, rig: Rig, verb: str) -> _Leg:
        nbytes = self.leg_bytes
        host, device = address_of(rig.pinned(nbytes)), rig.memory(nbytes)

        def copy(stream: int, count: int) -> None:
            for _ in range(count):
                if verb == "upload":
                    rig.driver.upload(stream, device, host, nbytes)
                else:
                    rig.driver.download(stream, host, device, nbytes)

        copy_seconds = min(self._together(rig, lambda stream: copy(stream, 2)) for _ in range(2)) / 2
        count = max(1, min(400, round(self.leg_seconds / copy_seconds)))
        return lambda stream: copy(stream, count)
