"""Devices: properties, statistics, the CUDA context of the calling thread, and several devices of one driver."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ...driver.protocol import Advice, ManagedAttributes
from ...errors import WrongDeviceError
from ._base import VERBS, Conformance, probe
from ._rig import Rig, address_of

if TYPE_CHECKING:
    from ...driver.protocol import Driver

__all__ = ["DeviceConformance", "PeerConformance"]


class DeviceConformance(Conformance):
    """Rules for properties, statistics and the calling thread's context."""

    def test_driver_names_itself(self, driver: Driver) -> None:
        """A driver has a name, at least one device, versions, and no fault."""
        assert driver.name
        assert driver.fault is None
        assert driver.device_count() >= 1
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in driver.versions().items())

    def test_driver_has_a_registry(self, driver: Driver) -> None:
        """`registry` keeps values for aiocuda."""
        driver.registry["a test"] = self
        assert driver.registry.pop("a test") is self

    def test_device_has_plausible_properties(self, rig: Rig) -> None:
        """The properties of a device are within the limits that aiocuda relies on."""
        properties = rig.properties
        assert properties.name
        assert properties.total_memory > 0
        assert properties.multiprocessors >= 1
        assert properties.copy_engines >= 1
        assert properties.hardware_queues >= 1
        assert properties.max_threads_per_block >= 32
        assert min(*properties.max_grid, *properties.max_block) >= 1
        assert 0 < properties.default_shared_bytes <= properties.max_shared_bytes

    def test_device_opens_more_than_once(self, rig: Rig) -> None:
        """Opening a device again returns the same properties."""
        assert rig.offload(lambda: rig.driver.device_open(rig.device)) == rig.properties

    def test_statistics_count_streams_and_events(self, rig: Rig) -> None:
        """`statistics` counts streams, events and calls."""
        before = rig.driver.statistics()
        assert {"streams", "events", "streams_created", "streams_kept", "threads", "calls"} <= set(before)
        streams = [rig.stream() for _ in range(3)]
        events = [rig.record(streams[0]) for _ in range(5)]
        made = rig.driver.statistics()
        assert made["streams"] == before["streams"] + 3
        reused = before["streams_kept"] - made["streams_kept"]  # streams that earlier tests have exported
        assert made["streams_created"] + reused == before["streams_created"] + 3
        assert made["events"] == before["events"] + 5
        assert made["calls"] >= before["calls"] + 13
        rig.finish(streams[0])
        for event in events:
            rig.destroy_event(event)
        for stream in streams:
            rig.destroy_stream(stream)
        after = rig.driver.statistics()
        assert after["streams"] == before["streams"]
        assert after["streams_created"] == made["streams_created"]
        assert after["events"] == before["events"]

    def test_threads_do_not_grow_with_work(self, rig: Rig) -> None:
        """The number of threads does not depend on the number of operations."""
        rig.witness()
        before = rig.driver.statistics()["threads"]
        for _ in range(50):
            rig.witness()
        # A driver may have a thread for each operation that runs at the same time: a few, never 50.
        assert rig.driver.statistics()["threads"] < before + 25

    @pytest.mark.parametrize("foreign", [False, True], ids=["no-context", "foreign-context"])
    def test_context_of_the_calling_thread_is_left_alone(self, rig: Rig, foreign: bool) -> None:
        """No verb changes the current CUDA context of the calling thread."""
        changed: list[str] = []
        through: list[bool] = []

        def work() -> None:
            with self.foreign_context() if foreign else contextlib.nullcontext():
                self._note_changes(rig, changed)
            through.append(True)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert through, "a verb failed in that thread"
        assert changed == []

    def _note_changes(self, rig: Rig, changed: list[str]) -> None:
        """Call each verb that does not block, and note the verbs after which another context is current."""
        driver, device = rig.driver, rig.device
        before = self.current_context()

        def step(verb: str, call: Callable[[], object]) -> None:
            call()
            if self.current_context() != before:
                changed.append(verb)

        stream, event, timed = rig.stream(), rig.event(), rig.event(timing=True)
        step("stream_create and event_create", lambda: None)
        for verb in VERBS:
            work = probe(rig, verb)
            step(f"preparing {verb}", lambda: None)
            step(verb, lambda: work.enqueue(stream))  # noqa: B023 - called at once
        step("event_record", lambda: driver.event_record(event, stream))
        step("event_record, timed", lambda: driver.event_record(timed, stream))
        step("stream_wait", lambda: driver.stream_wait(stream, event))
        step("event_query", lambda: driver.event_query(event))
        step("stream_query", lambda: driver.stream_query(stream))
        step("stream_capturing", lambda: driver.stream_capturing(stream))
        step("stream_priority", lambda: driver.stream_priority(stream))
        step("priority_range", lambda: driver.priority_range(device))
        step("memory_info", lambda: driver.memory_info(device))
        step("pool_reserved", lambda: driver.pool_reserved(device))
        step("begin_queries", driver.begin_queries)
        step("end_queries", driver.end_queries)
        step("ring", lambda: rig.ring(event))
        rig.finish(stream)
        step("event_elapsed_ms", lambda: driver.event_elapsed_ms(timed, timed))
        memory = driver.allocate(device, 64, stream)
        step("allocate", lambda: None)
        step("deallocate", lambda: driver.deallocate(memory, stream))
        notifier = driver.notifier(device, rig.port)
        step("notifier", lambda: notifier)
        step("event_destroy", lambda: rig.destroy_event(timed))
        step("stream_destroy", lambda: rig.destroy_stream(stream))


class PeerConformance(Conformance):
    """Rules for two devices of one driver: events, streams, copies and managed memory of devices 0 and 1."""

    @pytest.fixture
    def peer(self, driver: Driver, rig: Rig) -> Iterator[Rig]:
        """A `Rig` on device 1."""
        with Rig(driver, 1, patience=self.patience, hold_seconds=self.hold_seconds) as peer:
            yield peer
            rig.release_all()  # freeing page-locked memory waits for all devices

    def test_event_of_another_device_is_refused(self, rig: Rig, peer: Rig) -> None:
        """`event_record` refuses a stream of another device."""
        with pytest.raises(WrongDeviceError):
            rig.driver.event_record(peer.event(), rig.stream())

    def test_stream_of_another_device_is_not_imported(self, rig: Rig, peer: Rig) -> None:
        """`stream_import` refuses a stream of another device."""
        with pytest.raises(WrongDeviceError):
            rig.driver.stream_import(rig.device, rig.driver.stream_handle(peer.stream()))

    def test_wait_across_devices(self, rig: Rig, peer: Rig) -> None:
        """A stream waits for an event of another device."""
        work = probe(peer, "fill")
        held, waiter = rig.stream(), peer.stream()
        hold = rig.hold(held)
        rig.driver.stream_wait(waiter, rig.record(held))
        work.enqueue(waiter)
        work.check_waits_for(hold, peer, waiter)

    def test_held_device_does_not_hold_the_other(self, rig: Rig, peer: Rig) -> None:
        """A held stream of one device delays no work of the other device."""
        hold = rig.hold(rig.stream())
        peer.witness()
        assert hold.running

    def test_copy_between_devices_is_in_stream_order(self, rig: Rig, peer: Rig) -> None:
        """`copy_peer` waits for the earlier work of its stream."""
        content = np.arange(1000, dtype="u4")
        source, target = rig.uploaded(content), peer.memory(content.nbytes)
        stream = rig.stream()
        hold = rig.hold(stream)
        rig.driver.copy_peer(stream, target, 1, source, 0, content.nbytes)
        rig.witness()
        assert not peer.look(target, 1000, "u4").any()
        hold.release()
        rig.finish(stream)
        assert (peer.look(target, 1000, "u4") == content).all()

    def test_copies_in_a_ring_wait_for_each_other(self, rig: Rig, peer: Rig) -> None:
        """Copies to a device and back are in order if each stream waits for the event of the copy before."""
        content = np.arange(1000, dtype="u4")
        first, there, back = rig.uploaded(content), peer.memory(content.nbytes), rig.memory(content.nbytes)
        to, home = peer.stream(), rig.stream()
        hold = rig.hold(home)
        rig.affine(home, first, 1000, 2, 1)
        rig.driver.stream_wait(to, rig.record(home))
        rig.driver.copy_peer(to, there, 1, first, 0, content.nbytes)
        peer.affine(to, there, 1000, 3, 1)
        rig.driver.stream_wait(home, peer.record(to))
        rig.driver.copy_peer(home, back, 0, there, 1, content.nbytes)
        rig.witness()
        assert not rig.look(back, 1000, "u4").any()
        hold.release()
        rig.finish(home)
        assert (rig.look(back, 1000, "u4") == 3 * (2 * content + 1) + 1).all()

    def test_managed_memory_is_used_by_both_devices(self, rig: Rig, peer: Rig) -> None:
        """Kernels of both devices use the same managed memory, in the order of events."""
        if not (rig.properties.concurrent_managed_access and peer.properties.concurrent_managed_access):
            return  # such a device cannot use managed memory while another one runs
        words, here, there = rig.managed(1024, "u4"), rig.stream(), peer.stream()
        words[:] = np.arange(1024)
        address = address_of(words)
        hold = rig.hold(here)
        rig.affine(here, address, 1024, 2, 1)
        rig.driver.stream_wait(there, rig.record(here))
        peer.affine(there, address, 1024, 3, 5)
        rig.driver.stream_wait(here, peer.record(there))
        rig.affine(here, address, 1024, 1, 7)
        rig.witness()
        assert (words == np.arange(1024)).all()
        hold.release()
        rig.finish(here)
        assert (words == 3 * (2 * np.arange(1024) + 1) + 12).all()

    def test_managed_memory_moves_to_any_device(self, rig: Rig, peer: Rig) -> None:
        """A stream of either device prefetches managed memory, and `managed_attributes` returns its last place."""
        if not (rig.properties.concurrent_managed_access and peer.properties.concurrent_managed_access):
            return  # such a device cannot prefetch memory that the host may use
        words = rig.managed(1024, "u4")
        words[:] = np.arange(1024)
        for own, place in ((peer, 1), (rig, 0), (peer, 1), (rig, -1)):
            stream = own.stream()
            own.driver.prefetch(stream, address_of(words), words.nbytes, place)
            own.affine(stream, address_of(words), 1024, 1, 1)
            own.finish(stream)
            found = rig.offload(lambda: rig.driver.managed_attributes(address_of(words), words.nbytes))
            assert found.last_prefetch == place
        assert (words == np.arange(1024) + 4).all()

    def test_advice_names_any_device(self, rig: Rig, peer: Rig) -> None:
        """Managed memory takes advice for a device that has not allocated it."""
        if not (rig.properties.concurrent_managed_access and peer.properties.concurrent_managed_access):
            return  # such a device takes no advice
        words = rig.managed(16384, "u4")

        def advise(advice: Advice) -> ManagedAttributes:
            rig.offload(lambda: rig.driver.advise(address_of(words), words.nbytes, advice, peer.device))
            found: ManagedAttributes = rig.offload(
                lambda: rig.driver.managed_attributes(address_of(words), words.nbytes)
            )
            return found

        assert advise("set_preferred_location").preferred_location == 1
        assert advise("unset_preferred_location").preferred_location is None
        assert advise("set_accessed_by").accessed_by == {1}
        assert not advise("unset_accessed_by").accessed_by
