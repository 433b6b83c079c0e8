"""The conformance suite, for every driver that there is; and the proof that it finds what is broken."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree as ET

import pytest

import aiocuda
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Driver
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.driver.software._model import COMPUTE_SLOTS
from aiocuda.testing.conformance import DriverConformance, FaultConformance, PeerConformance
from aiocuda.testing.conformance._faults import Factory
from tests.project.tree import python_path


class Patient:
    """The times of all classes: a machine may be busy."""

    patience: ClassVar[float] = 60.0
    hold_seconds: ClassVar[float] = 120.0


class OnHost(Patient):
    """What the host driver's classes share."""

    full_house: ClassVar[int] = COMPUTE_SLOTS
    leg_bytes: ClassVar[int] = 16 << 20  # 8 ms at the host driver's 2 GB/s


class TestHostConformance(OnHost, DriverConformance):
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = HostDriver()
        yield driver
        driver.close()


class TestHostPeers(OnHost, PeerConformance):
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = HostDriver(devices=2)
        yield driver
        driver.close()


class TestHostFaults(OnHost, FaultConformance):
    @pytest.fixture
    def make_driver(self) -> Factory:
        return HostDriver


class OnSimulated(OnHost):
    """What the simulated driver's classes share. Without a seed it keeps the model's times, which are compared."""

    quiet_port: ClassVar[bool] = False

    def pause(self, driver: Driver) -> None:
        assert isinstance(driver, SimulatedDriver)
        driver.advance_time(100e-6)
        time.sleep(0)  # noqa: TID251 - a worker thread of the driver gets the GIL, for which it waits 5 ms otherwise


@contextlib.contextmanager
def simulated(devices: int = 1) -> Iterator[SimulatedDriver]:
    """A driver that sees no rule broken."""
    driver = SimulatedDriver(None, devices=devices)
    yield driver
    driver.close()
    assert driver.violations == []


class TestSimulatedConformance(OnSimulated, DriverConformance):
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        with simulated() as driver:
            yield driver


class TestSimulatedPeers(OnSimulated, PeerConformance):
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        with simulated(devices=2) as driver:
            yield driver


class TestSimulatedFaults(OnSimulated, FaultConformance):
    @pytest.fixture
    def make_driver(self) -> Factory:
        return lambda: SimulatedDriver(None)


class OnCuda(Patient):
    """What the CUDA driver's classes share. The process has one driver, and its faults are not for this process."""

    @pytest.fixture
    def driver(self) -> Driver:
        return CudaDriver.get()

    def current_context(self) -> object:
        context = ctypes.c_void_p()
        assert _libcuda().cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value

    @contextlib.contextmanager
    def foreign_context(self) -> Iterator[None]:
        context = ctypes.c_void_p()
        assert _libcuda().cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
        try:
            yield
        finally:
            assert _libcuda().cuCtxDestroy_v2(context) == 0


@pytest.mark.gpu
class TestCudaConformance(OnCuda, DriverConformance):
    pass


@pytest.mark.gpu(2)
class TestCudaPeers(OnCuda, PeerConformance):
    pass


def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")


_BROKEN = Path(__file__).with_name("broken.py")

#: What each broken driver must fail.
_FAILS = {
    "RunsAtEnqueue": [
        "test_work_after_a_held_kernel_is_not_visible[upload]",
        "test_work_after_a_held_kernel_is_not_visible[launch]",
        "test_event_is_not_done_early[copy]",
        "test_graph_after_a_held_kernel_is_not_visible[upload]",
        "test_notifier_after_a_held_kernel_is_silent[fill]",
        "test_enqueueing_400_kernels_does_not_block",
    ],
    "OneQueue": [
        "test_other_streams_proceed[upload]",
        "test_other_streams_proceed[launch]",
        "test_kernels_of_eight_streams_run_concurrently",
        "test_event_of_an_idle_stream_is_done",
        "test_pending_free_keeps_the_memory_and_delays_no_other_stream",
    ],
    "EventsAlwaysDone": [
        "test_event_is_not_done_early[launch]",
        "test_events_are_done_one_after_the_other",
        "test_work_after_a_wait_is_not_visible[download]",
        "test_waits_order_memory_across_streams",
        "test_notifier_after_a_held_kernel_is_silent[launch]",
        "test_as_many_notifiers_as_the_limit_can_be_armed",
    ],
    "DestroysEveryStream": ["test_exported_stream_is_reused_under_a_new_handle"],
    "ServesBusyStreams": [
        "test_exported_stream_is_reused_under_a_new_handle",
        "test_exported_stream_is_not_reused_while_it_is_busy",
    ],
    "ForgetsEdges": ["test_edges_hold_and_branches_overlap"],
    "UpdatesLate": [
        "test_update_reaches_later_launches_only",
        "test_update_of_addresses_and_values",
        "test_random_graph_equals_sequential_execution[0]",
    ],
    "IgnoresPriority": ["test_high_priority_goes_first"],
    "ForgetsOtherDevices": [
        "test_wait_across_devices",
        "test_copies_in_a_ring_wait_for_each_other",
        "test_managed_memory_is_used_by_both_devices",
        "test_managed_memory_moves_to_any_device",
        "test_advice_names_any_device",
    ],
}

#: The broken drivers with two devices.
_OF_PEERS = {"ForgetsOtherDevices"}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each of `_FAILS`' tests: "passed", or why it did not."""
    report = tmp_path_factory.mktemp("broken") / "report.xml"
    tests = [f"{_BROKEN}::Test{driver}::{test}" for driver, tests in _FAILS.items() for test in tests]
    for broken, faithful in ((_FAILS.keys() - _OF_PEERS, "Faithful"), (_OF_PEERS, "FaithfulToPeers")):
        tests += [f"{_BROKEN}::Test{faithful}::{test}" for test in {test for each in broken for test in _FAILS[each]}]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": python_path(Path(aiocuda.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    verdicts = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        faults = [f"{each.tag}: {each.get('message')}" for each in case if each.tag in ("failure", "error", "skipped")]
        verdicts[name] = " and ".join(faults) or "passed"
    assert len(verdicts) == len(tests)
    return verdicts


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize(("driver", "test"), [(driver, test) for driver, tests in _FAILS.items() for test in tests])
def test_broken_driver_is_found(verdicts: dict[str, str], driver: str, test: str) -> None:
    assert verdicts[f"Test{driver}::{test}"].startswith(("failure: AssertionError", "failure: assert "))


@pytest.mark.heavy
@pytest.mark.slow
def test_what_breaks_nothing_passes(verdicts: dict[str, str]) -> None:
    faithful = {name: verdict for name, verdict in verdicts.items() if name.startswith("TestFaithful")}
    assert faithful
    assert set(faithful.values()) == {"passed"}
