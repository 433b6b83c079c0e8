"""L2: what goes wrong on demand: each kind of `Upset`, once, when it was planned to."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable, Generator
from typing import Any

import pytest

from aiocuda import (
    AiocudaError,
    BusyError,
    DeviceFault,
    DeviceOutOfMemory,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    UnsupportedError,
)
from aiocuda._base._types import Span
from aiocuda.driver._codes import FAULTS, LOST, error_class
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.driver.simulated._upset import REFUSABLE, Upsets
from tests.driver.simulated.kit import Bench

CLEAN = {
    1: InvalidArgumentError,
    2: DeviceOutOfMemory,
    46: BusyError,
    600: BusyError,
    720: InvalidArgumentError,
    801: UnsupportedError,
    802: BusyError,
    900: BusyError,
    12_345: DriverError,  # of a newer driver
}


def test_nth_call_of_a_method_is_refused_and_no_other() -> None:
    bench = Bench(0, upsets=[Upset("refuse", 3, "event_create", 801)])
    driver = bench.driver
    bench.stream()  # of another verb: not counted
    for _ in range(2):
        driver.event_create(0, False)
    with pytest.raises(UnsupportedError, match="event_create: refused") as caught:
        driver.event_create(0, False)
    assert getattr(caught.value, "code", 0) == 801
    driver.event_create(0, False)
    assert driver.upsets.happened == {"refuse 801": 1}


def test_nth_call_of_any_method_is_refused() -> None:
    driver = SimulatedDriver(0, upsets=[Upset("refuse", 3, code=1)])
    driver.stream_create(0, 0)
    driver.event_create(0, False)
    with pytest.raises(InvalidArgumentError, match="priority_range: refused"):
        driver.priority_range(0)
    driver.priority_range(0)


@pytest.mark.parametrize(("code", "kind"), CLEAN.items())
def test_a_clean_refusal_changes_nothing(code: int, kind: type[AiocudaError]) -> None:
    bench = Bench(0, upsets=[Upset("refuse", 1, "fill", code)])
    stream = bench.stream()
    address = bench.memory(stream)
    bench.bytes_of(address)[:] = 0
    with pytest.raises(kind) as caught:
        bench.driver.fill(stream, address, b"\x01", 64)
    assert (type(caught.value), getattr(caught.value, "code", 0)) == (kind, code)
    bench.finish(stream)
    assert (bench.bytes_of(address) == 0).all()
    assert bench.driver.fault is None
    bench.driver.fill(stream, address, b"\x01", 64)
    bench.finish(stream)
    assert (bench.bytes_of(address) == 1).all()


@pytest.mark.parametrize("code", sorted(LOST))
def test_a_handle_that_is_lost_is_refused_and_the_rest_goes_on(code: int) -> None:
    bench = Bench(0, upsets=[Upset("refuse", 1, "event_record", code)])
    stream = bench.stream()
    with pytest.raises(StaleHandleError) as caught:
        bench.record(stream)
    assert getattr(caught.value, "code", 0) == code
    bench.record(stream)


@pytest.mark.parametrize("code", sorted(FAULTS))
def test_a_sticky_refusal_is_latched(code: int) -> None:
    bench = Bench(0, upsets=[Upset("refuse", 1, "event_record", code)])
    stream = bench.stream()
    verbs: list[Callable[[], object]] = [
        lambda: bench.record(stream),
        lambda: bench.driver.stream_query(stream),
        bench.stream,
    ]
    for verb in verbs:
        with pytest.raises(DeviceFault) as caught:
            verb()
        assert caught.value.code == code
    assert bench.driver.fault is not None
    assert bench.driver.refused == ["stream_query", "stream_create"]


def test_a_sticky_refusal_ends_what_runs() -> None:
    bench = Bench(0, upsets=[Upset("refuse", 2, "stream_create", 719)])
    stream = bench.stream()
    bench.launch(stream, lambda: None)
    with pytest.raises(DeviceFault):
        bench.stream()
    while bench.driver.run_next():
        pass
    assert bench.ended() == []


def test_a_launch_is_refused_by_its_name() -> None:
    bench = Bench(0, upsets=[Upset("refuse", 1, "launch", 1)])
    stream = bench.stream()
    with pytest.raises(InvalidArgumentError, match="launch: refused"):
        bench.launch(stream, lambda: None)


def test_ring_can_be_refused() -> None:
    bench = Bench(0, upsets=[Upset("refuse", 1, "ring", 802)])
    stream = bench.stream()
    notifier = bench.driver.notifier(0, bench.driver.open_port(lambda: None))
    event = bench.record(stream)
    with pytest.raises(BusyError, match="ring: refused"):
        notifier.ring(event, 1)
    notifier.ring(event, 1)


@pytest.mark.parametrize("verb", sorted(REFUSABLE - {"launch", "ring"}))
def test_every_method_can_be_refused(verb: str) -> None:
    driver = SimulatedDriver(0, upsets=[Upset("refuse", 1, verb, 801)])
    call = getattr(driver, verb)
    arguments = [0] * len(inspect.signature(call).parameters)
    if verb == "notifier":
        arguments[1] = driver.open_port(lambda: None)  # type: ignore[call-overload]
    with pytest.raises(UnsupportedError, match=f"^{verb}: refused"):
        call(*arguments)


def test_out_of_memory_error_has_the_free_bytes() -> None:
    bench = Bench(0, memory=1 << 20, upsets=[Upset("refuse", 2, "allocate", 2)])
    stream = bench.stream()
    bench.memory(stream, 1 << 19)
    with pytest.raises(DeviceOutOfMemory) as caught:
        bench.memory(stream)
    assert caught.value.free == 1 << 19
    bench.memory(stream)


def test_giving_back_is_never_refused() -> None:
    """`Upset` refuses no call that destroys, and does not count it: the caller could not act upon an error there."""
    driver = SimulatedDriver(0, upsets=[Upset("refuse", 2, code=1)])
    driver.event_destroy(driver.event_create(0, False))
    with pytest.raises(InvalidArgumentError, match="event_create: refused"):
        driver.event_create(0, False)


@pytest.mark.parametrize("code", [700, 719])
def test_nth_command_faults_and_the_next_query_sees_it(code: int) -> None:
    bench = Bench(0, upsets=[Upset("fault", 2, code=code)])
    stream = bench.stream()
    address = bench.memory(stream)
    bench.bytes_of(address)[:] = 0
    for value in (1, 2, 3):
        bench.driver.fill(stream, address, bytes([value]), 64)
    while bench.driver.fault is None:
        assert bench.driver.run_next()
    assert (bench.bytes_of(address) == 1).all()  # the second did nothing, and the third never ran
    with pytest.raises(DeviceFault) as caught:
        bench.driver.stream_query(stream)
    assert caught.value.code == code
    assert bench.driver.upsets.happened == {f"fault {code}": 1}


def test_nth_command_is_slow() -> None:
    bench = Bench(None, upsets=[Upset("slow", 2, seconds=0.25)])
    stream = bench.stream()
    events = [bench.record(stream, timing=True)]
    for _ in range(3):
        bench.launch(stream, lambda: None)
        events.append(bench.record(stream, timing=True))
    bench.finish(stream)
    took = [bench.driver.event_elapsed_ms(*pair) for pair in itertools.pairwise(events)]
    assert took == pytest.approx([0.02, 250.02, 0.02])


def naps() -> Generator[float, float, None]:
    yield 0.5


def test_a_generator_kernel_can_be_slow() -> None:
    bench = Bench(None, upsets=[Upset("slow", 1, seconds=0.25)])
    stream = bench.stream()
    start = bench.record(stream, timing=True)
    bench.launch(stream, naps)
    end = bench.record(stream, timing=True)
    bench.finish(stream)
    assert bench.driver.event_elapsed_ms(start, end) == pytest.approx(750)


def test_a_generator_kernel_can_fault() -> None:
    bench = Bench(None, upsets=[Upset("fault", 2)])
    stream = bench.stream()
    bench.launch(stream, naps)
    event = bench.record(stream)
    bench.launch(stream, naps)
    while bench.driver.fault is None:
        assert bench.driver.run_next()
    assert bench.driver._machine.event(event).is_done
    assert not bench.idle(stream)


def test_an_unfinished_generator_kernel_is_closed_quietly() -> None:
    """Its driver is closed, or loses its device, while it naps: that is no failure of the twin's."""
    bench = Bench(None)
    stream = bench.stream()
    bench.launch(stream, naps)
    while not bench.driver._paused_kernels:
        assert bench.driver.run_next()
    bench.driver.close()
    bench.driver._paused_kernels.clear()  # what raises here is an unraisable error, and that one of the test's
    gc.collect()


class Ringing:
    """A driver on a simulated loop's time, and two notifiers of it."""

    def __init__(self, *upsets: Upset) -> None:
        self.bench = Bench(None, upsets=upsets)
        self.stream = self.bench.stream()
        with self.bench.driver.clock:
            self.port = self.bench.driver.open_port(lambda: None)
            self.notifiers = [self.bench.driver.notifier(0, self.port) for _ in range(2)]

    def heard(self) -> list[tuple[int, int]]:
        """The tags, and after how many microseconds they came."""
        driver, came = self.bench.driver, []
        with driver.clock:
            event, began = self.bench.record(self.stream), driver.clock.now_ns
            for tag, notifier in enumerate(self.notifiers):
                notifier.ring(event, tag)
            while driver.run_next():
                came += [(tag, (driver.clock.now_ns - began) // 1_000) for tag in self.port.drain()]
        return came


def test_notifications_come_once_when_nothing_is_planned() -> None:
    assert Ringing().heard() == [(0, 1), (1, 1)]


def test_nth_notification_never_comes() -> None:
    ringing = Ringing(Upset("lose", 1))
    assert ringing.heard() == [(1, 1)]
    assert ringing.heard() == [(0, 1), (1, 1)]  # the notifier itself is as good as before
    assert ringing.bench.driver.upsets.happened == {"lose": 1}


def test_nth_notification_comes_late() -> None:
    assert Ringing(Upset("delay", 1, seconds=0.5)).heard() == [(1, 1), (0, 500_001)]


def test_nth_notification_comes_twice() -> None:
    assert Ringing(Upset("repeat", 2)).heard() == [(0, 1), (1, 1), (1, 1)]


def test_several_are_counted_apart() -> None:
    bench = Bench(None, upsets=[Upset("refuse", 1, "fill", 1), Upset("refuse", 2, "fill", 2), Upset("slow", 1)])
    stream = bench.stream()
    address = bench.memory(stream)
    for kind in (InvalidArgumentError, DeviceOutOfMemory):
        with pytest.raises(kind):
            bench.driver.fill(stream, address, b"\x01", 64)
    bench.driver.fill(stream, address, b"\x01", 64)
    assert bench.driver.upsets.happened == {"refuse 1": 1, "refuse 2": 1, "slow": 1}


def test_a_seed_draws_the_same_again_and_nothing_in_half_of_all_cases() -> None:
    def drawn(seed: int) -> list[Upset]:
        return SimulatedDriver(seed, upsets=None).upsets.planned

    plans = [drawn(seed) for seed in range(400)]
    assert plans == [drawn(seed) for seed in range(400)]
    assert 150 < sum(not plan for plan in plans) < 250
    assert max(map(len, plans)) == 3
    assert {upset.kind for plan in plans for upset in plan} == {"refuse", "fault", "slow", "lose", "delay", "repeat"}
    assert all(error_class(upset.code) for plan in plans for upset in plan)


def test_without_a_seed_nothing_is_drawn() -> None:
    assert SimulatedDriver(None, upsets=None).upsets.planned == []


def test_what_was_not_planned_costs_no_count() -> None:
    upsets = Upsets()
    assert upsets.due("slow") is None
    assert upsets.happened == {}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("explode",), InvalidArgumentError, "no upset is called 'explode'; there are refuse, fault, slow"),
        (("slow", True), InvalidTypeError, "nth=True must be an int"),
        (("slow", 1.0), InvalidTypeError, "nth=1.0 must be an int"),
        (("slow", 0), InvalidArgumentError, "nth and code are at least 1"),
        (("refuse", 1, None, 0), InvalidArgumentError, "nth and code are at least 1"),
        (("slow", 1, None, 700, -1.0), InvalidArgumentError, "seconds at least 0"),
        (("refuse", 1, "event_recrod"), InvalidArgumentError, "'event_recrod' is not a method that can be refused"),
        (("refuse", 1, "deallocate"), InvalidArgumentError, "'deallocate' is not a method that can be refused"),
        (("slow", 1, "launch"), InvalidArgumentError, "verb='launch' is for 'refuse'"),
        (("fault", 1, None, 2), InvalidArgumentError, "code=2 is no fault of a command; use one of"),
    ],
)
def test_a_plan_that_cannot_come_about_is_refused(
    arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Upset(*arguments)


def test_a_used_range_that_is_not_there_is_a_fault_without_any_plan() -> None:
    bench = Bench(0)
    stream = bench.stream()
    address = bench.memory(stream)
    bench.launch(stream, lambda data: None, Span(address, (65,), "|u1"), format="P")
    while bench.driver.fault is None:
        assert bench.driver.run_next()
    assert bench.driver.fault.code == 700
