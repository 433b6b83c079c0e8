"""Faults: latched at once, told to everybody alike, and the end of that driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import pytest

from ...errors import ClosedError, DeviceFault
from ..kernels import TRAP
from ._base import Conformance
from ._probes import VERBS, probe
from ._rig import Rig

if TYPE_CHECKING:
    from ...driver.protocol import Driver

__all__ = ["Factory", "FaultConformance"]

Factory: TypeAlias = "Callable[[], Driver]"


class FaultConformance(Conformance):
    """What a fault does. Each test ruins its driver, so a subclass gives a fixture that makes fresh ones.

    On CUDA a fault is the end of the process: run these in a process of their own, one test each.
    """

    @pytest.fixture
    def make_driver(self) -> Factory:
        """A function that makes a driver. A subclass overrides this one."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture 'make_driver': define one that makes drivers")

    @pytest.fixture
    def driver(self, make_driver: Factory) -> Iterator[Driver]:
        """A driver of the test's own."""
        driver = make_driver()
        yield driver
        driver.close()

    def test_fault_is_latched_and_raised(self, rig: Rig) -> None:
        driver = rig.driver
        raised = self._fault(rig)
        latched = driver.fault
        assert latched is not None
        assert (raised.code, raised.device, str(raised)) == (latched.code, rig.device, str(latched))

    def test_each_caller_gets_an_error_of_his_own(self, rig: Rig) -> None:
        first = self._fault(rig)
        with pytest.raises(DeviceFault) as caught:
            rig.driver.stream_create(rig.device, 0)
        second = caught.value
        assert second is not first
        assert (second.code, second.device, str(second)) == (first.code, first.device, str(first))

    def test_first_name_stays(self, rig: Rig) -> None:
        self._fault(rig)
        rig.driver.blame("launch trap, operation 7")
        rig.driver.blame("download, operation 8")
        assert rig.driver.fault is not None
        assert rig.driver.fault.operation == "launch trap, operation 7"
        with pytest.raises(DeviceFault) as caught:
            rig.driver.stream_create(rig.device, 0)
        assert caught.value.operation == "launch trap, operation 7"

    def test_nothing_reaches_the_device_any_more(self, rig: Rig) -> None:
        driver = rig.driver
        stream, event = rig.stream(), rig.event()
        works = [probe(rig, verb) for verb in VERBS]
        self._fault(rig)
        before = driver.statistics()["calls"]
        refused: list[Callable[[], object]] = [
            *(lambda work=work: work.enqueue(stream) for work in works),
            lambda: driver.stream_create(rig.device, 0),
            lambda: driver.stream_query(stream),
            lambda: driver.stream_wait(stream, event),
            lambda: driver.event_create(rig.device, False),
            lambda: driver.event_record(event, stream),
            lambda: driver.event_query(event),
            lambda: driver.allocate(rig.device, 64, stream),
        ]
        for call in refused:
            with pytest.raises(DeviceFault):
                call()
        assert driver.statistics()["calls"] == before

    def test_work_behind_a_fault_is_never_done(self, rig: Rig) -> None:
        # Held first, so that all of it is accepted before the fault.
        driver, stream, other = rig.driver, rig.stream(), rig.stream()
        rig.function(TRAP)
        hold = rig.hold(stream)
        rig.launch(stream, TRAP)
        behind, elsewhere = rig.record(stream), rig.event()
        driver.stream_wait(other, behind)
        driver.event_record(elsewhere, other)
        hold.release()
        self._wait_fault(rig, behind)
        for event in (behind, elsewhere):
            with pytest.raises(DeviceFault):
                driver.event_query(event)

    def test_offloaded_work_still_tells(self, rig: Rig) -> None:
        self._fault(rig)
        assert rig.offload(lambda: 42) == 42

    def test_cause_is_kept_where_there_is_one(self, rig: Rig) -> None:
        raised = self._fault(rig)
        if not rig.driver.wants_image:  # a twin raised something; a GPU has no such thing
            assert isinstance(raised.__cause__, ZeroDivisionError)
            assert rig.driver.fault is not None
            assert rig.driver.fault.__cause__ is raised.__cause__

    def test_new_driver_works_at_once(self, rig: Rig, make_driver: Factory) -> None:
        self._fault(rig)
        if rig.driver.wants_image:
            return  # a GPU is lost to the whole process
        driver = make_driver()
        try:
            assert driver.fault is None
            with Rig(driver, patience=self.patience) as fresh:
                fresh.witness()
        finally:
            driver.close()

    def test_closed_driver_refuses(self, make_driver: Factory) -> None:
        other = make_driver()
        with Rig(other, patience=self.patience) as rig:
            rig.witness()
        other.close()
        other.close()
        if other.wants_image:
            return  # CUDA is closed by the process's end
        rig.wait_until(lambda: other.statistics()["threads"] == 0, "the threads end")
        for call in (other.device_count, lambda: other.device_open(0), lambda: other.stream_create(0, 0)):
            with pytest.raises(ClosedError):
                call()

    def _fault(self, rig: Rig) -> DeviceFault:
        stream = rig.stream()
        rig.launch(stream, TRAP)
        return self._wait_fault(rig, rig.record(stream))

    def _wait_fault(self, rig: Rig, event: int) -> DeviceFault:
        raised: list[DeviceFault] = []

        def faulted() -> bool:
            try:
                assert not rig.driver.event_query(event), "an event behind a fault is done"
            except DeviceFault as error:
                raised.append(error)
            return bool(raised)

        rig.wait_until(faulted, "the fault is raised")
        return raised[0]
