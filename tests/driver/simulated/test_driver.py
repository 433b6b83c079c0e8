"""What `SimulatedDriver` adds to the rules that every driver keeps: time, devices, twins, jobs, limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aiocuda
from aiocuda import ClosedError, DeviceFault, InvalidTypeError
from aiocuda._base._types import Span
from aiocuda.driver.protocol import Program
from aiocuda.driver.simulated import Clock, SimulatedDriver
from aiocuda.driver.simulated._driver import MOST_ENTRIES, WAITING
from aiocuda.testing import SimulatedLoop
from tests.driver.simulated.kit import Bench
from tests.helpers import SPIN


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_every_query_costs_a_microsecond(seed: int | None) -> None:
    bench = Bench(seed)
    driver, stream = bench.driver, bench.stream()
    event = bench.record(stream)
    queries: list[Callable[[], bool]] = [lambda: driver.event_query(event), lambda: driver.stream_query(stream)]
    for query in queries:
        for _ in range(10):
            before = driver.clock.now_ns
            query()
            assert driver.clock.now_ns == before + 1_000


def test_polling_alone_reaches_the_end() -> None:
    bench = Bench(1)
    stream = bench.stream()
    bench.launch(stream, lambda: None)
    event = bench.record(stream)
    queries = 1
    while not bench.driver.event_query(event):
        queries += 1
        assert queries < 1_000_000
    assert bench.ended() == [stream]


def test_other_methods_take_less_time_than_a_query_and_none_without_a_seed() -> None:
    for seed, most in ((None, 0), (3, 999)):
        driver = SimulatedDriver(seed)
        for _ in range(50):
            before = driver.clock.now_ns
            driver.stream_create(0, 0)
            assert 0 <= driver.clock.now_ns - before <= most


def test_without_a_seed_every_duration_is_that_of_the_model() -> None:
    bench = Bench(None, bandwidth=1e9, latency=10e-6)
    stream = bench.stream()
    target, source = bench.memory(stream, 1_000_000), bench.pinned(1_000_000)
    start = bench.record(stream, timing=True)
    bench.upload(stream, target, source)
    end = bench.record(stream, timing=True)
    bench.finish(stream)
    assert bench.driver.event_elapsed_ms(start, end) == pytest.approx(1.01)


@pytest.mark.parametrize("seed", [True, 1.0, "1"])
def test_seed_is_an_integer(seed: Any) -> None:
    with pytest.raises(InvalidTypeError, match=f"seed={seed!r} must be an int, or None"):
        SimulatedDriver(seed)


def test_two_devices_have_memory_and_engines_of_their_own() -> None:
    bench = Bench(None, devices=2, memory=1 << 20, latency=1e-3)
    assert bench.driver.device_count() == 2
    here, there = bench.stream(), bench.stream(device=1)
    pairs = [(here, bench.memory(here, 1 << 20)), (there, bench.memory(there, 1 << 20, device=1))]
    source = bench.pinned(64)
    before = bench.driver.clock.now_ns
    for stream, target in pairs:
        bench.upload(stream, target, source)
    bench.finish(here, there)
    assert bench.driver.clock.now_ns - before < 2_000_000  # side by side
    bench.driver.stream_wait(there, bench.record(here))
    bench.finish(there)


def test_a_fault_of_one_device_ends_the_other() -> None:
    bench = Bench(0, devices=2)
    here, there = bench.stream(), bench.stream(device=1)
    bench.launch(here, lambda: 1 // 0)
    while bench.driver.fault is None:
        assert bench.driver.run_next()
    with pytest.raises(DeviceFault):
        bench.driver.stream_query(there)


# Twins


def test_a_generator_kernel_runs_in_parts() -> None:
    bench = Bench(2)
    stream, other = bench.stream(), bench.stream()
    address = bench.memory(stream)
    told: list[tuple[int, int]] = []

    def steps(data: np.ndarray[Any, Any]) -> Generator[float, float, None]:
        for value in (1, 2):
            data[:] = value
            told.append((value, bench.driver.clock.now_ns))
            yield 0.5

    bench.launch(stream, steps, Span(address, (64,), "|u1"), format="P")
    event = bench.record(stream)
    while not told:
        assert bench.driver.run_next()
    assert (bench.bytes_of(address) == 1).all()
    bench.launch(other, lambda: None)  # a kernel that naps holds no other stream
    bench.finish(other)
    assert not bench.driver.event_query(event)
    bench.finish(stream)
    assert bench.driver.event_query(event)
    assert told[1][1] - told[0][1] == 500_000_000


def test_a_generator_kernel_waits_for_the_host() -> None:
    bench = Bench(4)
    stream = bench.stream()
    released: list[bool] = []

    def waits() -> Generator[float, float, None]:
        while not released:
            yield 1e-3

    bench.launch(stream, waits)
    for _ in range(200):
        assert bench.driver.run_next()
    assert not bench.idle(stream)
    released.append(True)
    bench.finish(stream)


@pytest.mark.parametrize("naps", [False, True])
def test_an_exception_in_a_kernel_is_a_fault_that_the_next_call_raises(naps: bool) -> None:
    bench = Bench(0)
    stream = bench.stream()

    def plain() -> None:
        raise ZeroDivisionError("on purpose")

    def napping() -> Generator[float, float, None]:
        yield 1e-6
        raise ZeroDivisionError("on purpose")

    bench.launch(stream, napping if naps else plain)
    while bench.driver.fault is None:
        assert bench.driver.run_next()
    with pytest.raises(DeviceFault, match="on purpose") as caught:
        bench.driver.stream_query(stream)
    assert caught.value.code == 719
    assert isinstance(bench.driver.fault.__cause__, ZeroDivisionError)


# What may block


class Running:
    """A simulated loop's clock, and a port."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.woken = 0
        self.port = bench.driver.open_port(self._wake)

    def _wake(self) -> None:
        self.woken += 1


BLOCKING: dict[str, Callable[[Bench, int], Callable[[], object]]] = {
    "stream_synchronize": lambda bench, stream: lambda: bench.driver.stream_synchronize(stream),
    "pinned_deallocate": lambda bench, stream: _bound(bench.driver.pinned_deallocate, bench.driver.pinned_allocate(64)),
    "managed_deallocate": lambda bench, stream: _bound(
        bench.driver.managed_deallocate, bench.driver.managed_allocate(0, 64)
    ),
    "unpin": lambda bench, stream: _bound(bench.driver.unpin, _pinned_own(bench)),
}

_KEPT: list[object] = []


def _bound(function: Callable[[int], object], address: int) -> Callable[[], object]:
    return lambda: function(address)


def _pinned_own(bench: Bench) -> int:
    array = np.zeros(4096, np.uint8)
    _KEPT.append(array)
    bench.driver.pin(array.ctypes.data, array.nbytes)
    return int(array.ctypes.data)


@pytest.mark.parametrize("verb", BLOCKING)
def test_a_blocking_method_in_a_job_ends_with_the_devices_work(verb: str) -> None:
    """In virtual time: the job's tag comes after the work, and no thread blocks."""
    clock = Clock()
    with clock:
        bench = Bench(1)
        running, stream = Running(bench), bench.stream()
        block = BLOCKING[verb](bench, stream)
        released: list[bool] = []

        def waits() -> Generator[float, float, None]:
            while not released:
                yield 1e-3

        bench.launch(stream, waits)
        bench.driver.offload(block, running.port, 5)
        clock.advance(clock.now_ns + 1_000_000_000)
        assert (running.woken, running.port.drain()) == (0, [])
        released.append(True)
        while not running.woken:
            assert bench.driver.run_next()
        assert running.port.drain() == [5]
        assert bench.idle(stream)
    assert bench.driver.violations == []


@pytest.mark.parametrize("verb", BLOCKING)
def test_a_blocking_method_lets_time_pass_for_its_caller(verb: str) -> None:
    bench = Bench(1)
    stream = bench.stream()
    bench.launch(stream, lambda: None)
    BLOCKING[verb](bench, stream)()
    assert bench.ended() == [stream]


def test_a_fault_ends_a_waiting_job() -> None:
    clock = Clock()
    with clock:
        bench = Bench(1)
        running, stream = Running(bench), bench.stream()
        address = bench.driver.pinned_allocate(64)
        bench.launch(stream, lambda: 1 // 0)
        bench.driver.offload(lambda: bench.driver.pinned_deallocate(address), running.port, 5)
        while not running.woken:
            assert bench.driver.run_next()
        assert running.port.drain() == [5]
        assert bench.driver.fault is not None
        assert len(bench.driver._pages._ranges) == 0


def test_a_job_on_a_loop_that_is_not_simulated_is_a_threads() -> None:
    bench = Bench(1)
    woken = threading.Event()
    port = bench.driver.open_port(woken.set)
    threads: list[int] = []
    bench.driver.offload(lambda: threads.append(threading.get_ident()), port, 5)
    assert woken.wait(60)
    assert port.drain() == [5]
    assert threads[0] != threading.get_ident()
    bench.driver.close()


# Limits and misuse


def test_more_than_a_hardware_queue_takes_is_reported() -> None:
    bench = Bench(0)
    stream = bench.stream()
    released: list[bool] = []

    def waits() -> Generator[float, float, None]:
        while not released:
            yield 1.0

    bench.launch(stream, waits)
    for _ in range(MOST_ENTRIES - 1):
        bench.launch(stream, lambda: None)
    assert (MOST_ENTRIES, bench.driver.violations) == (1_021, [])
    bench.launch(stream, lambda: None)
    assert bench.driver.violations == ["V12: stream 1 was given 1022 operations: the caller would block"]
    released.append(True)
    bench.finish(stream)


def test_a_method_call_from_a_callback_is_reported() -> None:
    """A notifier's own host function may not call the driver. Here `wake` stands for one that does."""
    bench = Bench(None)
    stream = bench.stream()

    def wake() -> None:
        bench.driver.stream_query(stream)

    with bench.driver.clock:
        port = bench.driver.open_port(wake)
        bench.driver.notifier(0, port).ring(bench.record(stream), 1)
        assert bench.driver.violations == []
        while not bench.driver.violations:
            assert bench.driver.run_next()
    assert bench.driver.violations == ["V8: stream_query was called by a driver's own callback"]


def _call_that_waits(driver: SimulatedDriver, method: str, array: npt.NDArray[Any]) -> Callable[[], object]:
    """Prepare a call of a method, and return it."""
    address, nbytes = array.ctypes.data, array.nbytes
    if method == "unpin":
        driver.pin(address, nbytes)
        return lambda: driver.unpin(address)
    if method.endswith("_deallocate"):
        pinned = method == "pinned_deallocate"
        own = driver.pinned_allocate(nbytes) if pinned else driver.managed_allocate(0, nbytes)
        return lambda: getattr(driver, method)(own)
    program = Program("work", "", host=lambda: None)
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: driver.load(0, program),
        "pin": lambda: driver.pin(address, nbytes),
        "pinned_allocate": lambda: driver.pinned_allocate(nbytes),
    }
    return calls[method]


@pytest.mark.parametrize("method", WAITING)
def test_call_that_waits_for_running_work_is_reported_on_the_thread_of_a_loop(method: str) -> None:
    bench = Bench(None)
    driver, stream = bench.driver, bench.stream()
    array = np.zeros(48)
    idle, in_job, on_loop = (_call_that_waits(driver, method, part) for part in np.split(array, 3))

    def work() -> Generator[float, float, None]:
        yield 1.0

    with driver.clock:
        port = driver.open_port(lambda: None)
        idle()
        bench.launch(stream, work)
        driver.offload(in_job, port, 1)
        while not port.drain():
            assert driver.run_next()
        bench.finish(stream)
        assert driver.violations == []
        bench.launch(stream, work)
        on_loop()
    assert driver.violations == [
        f"V16: {method} was called on the thread of the loop while streams [{stream}] have work: {WAITING[method]} "
        "waits for all running kernels, or holds all launches; call it in a job, by Driver.offload"
    ]


def test_function_of_submit_is_no_call_that_waits() -> None:
    """It is loaded as a kernel without a GPU only."""

    async def main() -> list[str]:
        driver = SimulatedDriver(None)
        async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
            await device.load(SPIN)
            stream.launch(SPIN, 1, 1, 1_000_000)
            await stream.submit(lambda: None)
        return driver.violations

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(main()) == []


class _Asked(SimulatedDriver):
    """It tells when a verb of another thread has come as far as the driver's lock."""

    asked: threading.Event

    def follow_running_clock(self) -> None:
        super().follow_running_clock()
        if threading.current_thread() is not threading.main_thread():
            self.asked.set()


def test_another_threads_call_during_a_callback_is_not_reported() -> None:
    """Where no simulated loop runs, a worker may page-lock memory just then."""
    bench = Bench(None)
    driver = bench.driver = _Asked(None)
    driver.asked = threading.Event()
    stream = bench.stream()
    worker = threading.Thread(target=lambda: driver.stream_query(stream))

    def wake() -> None:
        worker.start()
        assert driver.asked.wait(60)

    with driver.clock:
        port = driver.open_port(wake)
        driver.notifier(0, port).ring(bench.record(stream), 1)
        while not worker.is_alive() and not driver.asked.is_set():
            assert driver.run_next()
    worker.join()
    assert driver.violations == []


def test_calls_after_a_fault_are_recorded() -> None:
    bench = Bench(0)
    stream = bench.stream()
    bench.launch(stream, lambda: 1 // 0)
    while bench.driver.fault is None:
        assert bench.driver.run_next()
    assert bench.driver.refused == []
    with pytest.raises(DeviceFault):
        bench.driver.stream_query(stream)
    with pytest.raises(DeviceFault):
        bench.driver.event_create(0, False)
    assert bench.driver.refused == ["stream_query", "event_create"]


def test_a_closed_driver_does_nothing_more() -> None:
    bench = Bench(0)
    stream = bench.stream()
    bench.launch(stream, lambda: None)
    bench.driver.close()
    with pytest.raises(ClosedError):
        bench.driver.stream_query(stream)
    while bench.driver.run_next():
        pass
    assert bench.ended() == []


def test_repr_has_the_seed() -> None:
    assert repr(SimulatedDriver(12)) == "SimulatedDriver(seed=12)"
