"""Faults: a driver keeps the first one, raises it in every later call, and stays unusable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import pytest

from ...errors import ClosedError, DeviceFault
from ..kernels import TRAP
from ._base import VERBS, Conformance, probe
from ._rig import Rig

if TYPE_CHECKING:
    from ...driver.protocol import Driver

__all__ = ["Factory", "FaultConformance"]

Factory: TypeAlias = "Callable[[], Driver]"


class FaultConformance(Conformance):
    """Rules for faults. Each test leaves its driver unusable, so a subclass defines a fixture that makes new ones.

    On CUDA a fault ends CUDA for the whole process: run each of these tests in a process of its own.
    """

    @pytest.fixture
    def make_driver(self) -> Factory:
        """A function that makes a driver. A subclass overrides this fixture."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture 'make_driver': define one that makes drivers")

    @pytest.fixture
    def driver(self, make_driver: Factory) -> Iterator[Driver]:
        """A new driver for this test."""
        driver = make_driver()
        yield driver
        driver.close()

    def test_fault_is_latched_and_raised(self, rig: Rig) -> None:
        """The first query after a fault raises `DeviceFault`, and `fault` keeps it."""
        driver = rig.driver
        raised = self._fault(rig)
        latched = driver.fault
        assert latched is not None
        assert (raised.code, raised.device, str(raised)) == (latched.code, rig.device, str(latched))

    def test_each_call_raises_a_new_error(self, rig: Rig) -> None:
        """Each call after a fault raises a new exception with the same data."""
        first = self._fault(rig)
        with pytest.raises(DeviceFault) as caught:
            rig.driver.stream_create(rig.device, 0)
        second = caught.value
        assert second is not first
        assert (second.code, second.device, str(second)) == (first.code, first.device, str(first))

    def test_first_blamed_operation_is_kept(self, rig: Rig) -> None:
        """The first call of `blame` names the operation; later ones change nothing."""
        self._fault(rig)
        rig.driver.blame("launch trap, operation 7")
        rig.driver.blame("download, operation 8")
        assert rig.driver.fault is not None
        assert rig.driver.fault.operation == "launch trap, operation 7"
        with pytest.raises(DeviceFault) as caught:
            rig.driver.stream_create(rig.device, 0)
        assert caught.value.operation == "launch trap, operation 7"

    def test_no_call_reaches_the_device_after_a_fault(self, rig: Rig) -> None:
        """After a fault every verb raises `DeviceFault` and calls nothing."""
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

    def test_work_after_a_fault_is_never_done(self, rig: Rig) -> None:
        """Events after the fault never count as done, in any stream."""
        # The hold lets the stream accept all of it before the fault.
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

    def test_offloaded_work_runs_after_a_fault(self, rig: Rig) -> None:
        """`offload` still runs functions after a fault."""
        self._fault(rig)
        assert rig.offload(lambda: 42) == 42

    def test_exception_of_a_host_implementation_is_the_cause(self, rig: Rig) -> None:
        """If a host implementation has raised, its exception is the cause of the fault."""
        raised = self._fault(rig)
        if not rig.driver.wants_image:  # a GPU runs no host implementation
            assert isinstance(raised.__cause__, ZeroDivisionError)
            assert rig.driver.fault is not None
            assert rig.driver.fault.__cause__ is raised.__cause__

    def test_new_driver_works_after_a_fault(self, rig: Rig, make_driver: Factory) -> None:
        """A new driver works in the same process. On CUDA it cannot."""
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
        """A closed driver has no threads, and every verb raises `ClosedError`."""
        other = make_driver()
        with Rig(other, patience=self.patience) as rig:
            rig.witness()
        other.close()
        other.close()
        if other.wants_image:
            return  # CUDA is closed when the process ends
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
                assert not rig.driver.event_query(event), "an event after a fault is done"
            except DeviceFault as error:
                raised.append(error)
            return bool(raised)

        rig.wait_until(faulted, "the fault is raised")
        return raised[0]
