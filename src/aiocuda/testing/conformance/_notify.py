"""The clock, ports, notifiers and worker threads."""

from __future__ import annotations

import functools
import select
import threading
from typing import TYPE_CHECKING

import pytest

from ._base import VERBS, Conformance, probe
from ._rig import Rig

if TYPE_CHECKING:
    from ...driver.protocol import Driver

__all__ = ["NotifyConformance"]


class NotifyConformance(Conformance):
    """Rules for the clock, ports, notifiers and offloaded functions."""

    def test_clock_moves_forward_in_seconds(self, rig: Rig) -> None:
        """`now` returns seconds and increases."""
        start = rig.driver.now()
        rig.witness()
        end = rig.driver.now()
        assert start < end < start + 60

    @pytest.mark.parametrize("verb", VERBS)
    def test_notifier_after_a_held_kernel_is_silent(self, rig: Rig, verb: str) -> None:
        """A notifier rings when its event is done, and not before."""
        work = probe(rig, verb)
        stream = rig.stream()
        hold = rig.hold(stream)
        work.enqueue(stream)
        with rig.unblocked("ring"):
            tag = rig.ring(rig.record(stream))
        rig.witness()
        assert tag not in rig.tags()
        hold.release()
        rig.wait_tags(tag)
        assert rig.driver.stream_query(stream)
        assert work.complete()

    def test_notifier_of_a_done_event_rings(self, rig: Rig) -> None:
        """A notifier that is armed on a done event rings, too."""
        event = rig.record(rig.stream())
        rig.finish_event(event)
        rig.wait_tags(rig.ring(event))

    def test_tag_comes_once_and_unchanged(self, rig: Rig) -> None:
        """A tag of up to 63 bits arrives once."""
        largest = 2**63 - 1 - rig.tag()
        event = rig.record(rig.stream())
        rig.wait_tags(rig.ring(event, largest))
        rig.wait_tags(rig.ring(event))  # a second tag would have arrived before this one
        assert rig.tags().count(largest) == 1

    def test_notifier_keeps_the_record_that_it_was_armed_on(self, rig: Rig) -> None:
        """A later record of the event does not change when the notifier rings."""
        held, other = rig.stream(), rig.stream()
        event = rig.event()
        hold = rig.hold(held)
        rig.driver.event_record(event, held)
        behind = rig.ring(event)
        rig.driver.event_record(event, other)
        # Three, because one of them may share a hardware queue with the notifier that waits.
        beside = [rig.ring(event) for _ in range(3)]
        rig.wait_until(lambda: bool(set(beside) & set(rig.tags())), "a notifier of the later record rings")
        assert behind not in rig.tags()
        hold.release()
        rig.wait_tags(behind, *beside)

    def test_notifier_can_be_armed_again(self, rig: Rig) -> None:
        """One notifier can be armed again as soon as its tag has arrived."""
        stream = rig.stream()
        given: list[int] = []
        for _ in range(50):
            given.append(rig.ring(rig.record(stream)))  # the rig reuses the notifier that rang last
            rig.wait_tags(given[-1])
        assert [tag for tag in rig.tags() if tag in given] == given

    def test_as_many_notifiers_as_the_limit_can_be_armed(self, rig: Rig) -> None:
        """`notifier_limit` notifiers can be armed at the same time."""
        stream, limit = rig.stream(), rig.driver.notifier_limit(rig.device)
        rig.make_notifiers(limit)
        hold = rig.hold(stream)
        with rig.unblocked("ring"):
            tags = [rig.ring(rig.record(stream)) for _ in range(limit)]
        assert not set(tags) & set(rig.tags())
        hold.release()
        rig.wait_tags(*tags)
        assert sorted(tag for tag in rig.tags() if tag in tags) == tags

    def test_each_port_gets_its_own_tags(self, rig: Rig) -> None:
        """Ports of several threads get the tags of their own notifiers, in order."""
        heard: list[tuple[list[int], list[int]]] = []

        def listen(stream: int, event: int) -> None:
            port = rig.driver.open_port(lambda: None)
            given: list[int] = []
            got: list[int] = []

            def came() -> bool:
                got.extend(port.drain())
                return len(got) >= len(given)

            try:
                notifier = rig.driver.notifier(rig.device, port)
                for _ in range(20):
                    rig.driver.event_record(event, stream)
                    given.append(rig.tag())
                    notifier.ring(event, given[-1])
                    rig.wait_until(came, "a tag of this thread arrives")
            finally:
                port.close()
                heard.append((given, got))

        threads = [threading.Thread(target=listen, args=(rig.stream(), rig.event())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(heard) == 3
        for given, got in heard:
            assert len(given) == 20
            assert got == given

    def test_port_wakes_its_loop_for_a_tag(self, driver: Driver, rig: Rig) -> None:
        """A port wakes its loop when a tag has arrived."""
        woken = threading.Event()
        port = driver.open_port(woken.set)

        def ready() -> bool:
            descriptor = port.fileno()
            if descriptor is None:
                return woken.is_set()
            return bool(select.select([descriptor], [], [], 0)[0])

        try:
            stream, notifier, tag = rig.stream(), driver.notifier(rig.device, port), rig.tag()
            hold = rig.hold(stream)
            notifier.ring(rig.record(stream), tag)
            rig.witness()
            assert not (self.quiet_port and ready())
            assert port.drain() == []
            hold.release()
            heard: list[int] = []

            def came() -> bool:
                if ready():
                    heard.extend(port.drain())
                return bool(heard)

            rig.wait_until(came, "the port wakes its loop")
            assert heard == [tag]
            woken.clear()
            assert not (self.quiet_port and ready())
            assert port.drain() == []
        finally:
            port.close()

    def test_port_can_be_reused(self, driver: Driver, rig: Rig) -> None:
        """A port works for another loop after its loop has ended while a notifier was armed."""
        # The loop ends while a notifier is armed. The next owner of the port may get the late tag, and gets its own.
        stream = rig.stream()
        hold = rig.hold(stream)
        port = driver.open_port(lambda: None)
        late = rig.tag()
        driver.notifier(rig.device, port).ring(rig.record(stream), late)
        port.close()
        again = driver.open_port(lambda: None)
        try:
            assert again.drain() == []
            hold.release()
            rig.finish(stream)
            tag, heard = rig.tag(), []
            driver.notifier(rig.device, again).ring(rig.record(stream), tag)

            def came() -> bool:
                heard.extend(again.drain())
                return tag in heard

            rig.wait_until(came, "the new owner's tag")
            assert heard.count(tag) == 1
            assert set(heard) <= {tag, late}
        finally:
            again.close()

    def test_offloaded_work_runs_on_another_thread(self, rig: Rig) -> None:
        """`offload` runs its function on another thread."""
        assert rig.offload(threading.get_ident) != threading.get_ident()

    def test_offloaded_work_does_not_block_its_caller(self, rig: Rig) -> None:
        """`offload` does not block; the tag arrives when the function has returned."""
        gate = threading.Event()
        tag = rig.tag()
        with rig.unblocked("offload"):
            rig.driver.offload(lambda: gate.wait(rig.hold_seconds), rig.port, tag)
        rig.witness()
        assert tag not in rig.tags()
        gate.set()
        rig.wait_tags(tag)

    def test_each_offloaded_function_runs_once(self, rig: Rig) -> None:
        """50 offloaded functions run once each, and each tag arrives once."""
        done: list[int] = []
        tags = [rig.tag() for _ in range(50)]
        for tag in tags:
            rig.driver.offload(functools.partial(done.append, tag), rig.port, tag)
        rig.wait_tags(*tags)
        assert sorted(done) == tags
        assert sorted(tag for tag in rig.tags() if tag in tags) == tags

    def test_offloaded_functions_run_concurrently(self, rig: Rig) -> None:
        """Two offloaded functions run at the same time."""
        meeting = threading.Barrier(2)
        tags = [rig.tag(), rig.tag()]
        met: list[int] = []
        for tag in tags:
            rig.driver.offload(lambda: met.append(meeting.wait(rig.patience)), rig.port, tag)
        rig.wait_tags(*tags)
        assert sorted(met) == [0, 1]
