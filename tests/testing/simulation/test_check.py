"""Each invariant is looked at: a breach is planted, and its id is found."""

from __future__ import annotations

import asyncio
import contextvars
import random
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceFault, Pipeline
from aiocuda.completion._failure import Spoiled
from aiocuda.completion._operation import DONE, SUBMITTED, Operation, new_operation
from aiocuda.completion._reactor import Reactor
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.driver.simulated._choices import SeededChoices
from aiocuda.stream import _transfers
from aiocuda.testing.simulation import actions, carry, kernels
from aiocuda.testing.simulation.actions import Actions
from aiocuda.testing.simulation.check import MOST_CALLS, MOST_RESOLVED, Checker
from aiocuda.testing.simulation.content import Tracked
from aiocuda.testing.simulation.program import Program
from aiocuda.testing.simulation.run import simulate, sweep, watch
from tests.helpers import SPIN, TRAP

Breach = Callable[[Device, Checker], Awaitable[object]]


def outcome(breach: Breach, driver: SimulatedDriver | None = None, **options: Any) -> list[str]:
    """The ids of what is found while that runs on a device that is opened and closed as it should be."""
    driver = SimulatedDriver(None) if driver is None else driver
    checker = Checker(driver)

    async def main() -> None:
        async with aiocuda.open_device(driver=driver, **options) as device:
            checker.watch(device)
            await device.load(SPIN)
            await breach(device, checker)

    watch(main, checker)
    return sorted({text.partition(" ")[0].rstrip(":") for text in checker.violations})


async def nothing(device: Device, checker: Checker) -> None:
    async with device.stream() as stream:
        array = np.ones(64, np.uint8)
        buffer = stream.empty(64, np.uint8)
        operation = stream.copy(buffer, array)
        checker.follow(operation)
        checker.borrow(operation, weakref.ref(array))
        assert (await stream.download(buffer) == 1).all()


def test_no_breach_is_found_where_there_is_none() -> None:
    assert outcome(nothing) == []


# V1


async def ends_and_goes_on(device: Device, checker: Checker) -> None:
    stream = device.stream()
    operation = stream.launch(SPIN, 1, 1, 1)
    checker.follow(operation)
    await operation
    operation._state = SUBMITTED


async def passes_and_does_not(device: Device, checker: Checker) -> None:
    stream = device.stream()
    operation = stream.launch(SPIN, 1, 1, 1)
    checker.follow(operation)
    await operation
    operation._abandoned = True


async def tells_twice(device: Device, checker: Checker) -> None:
    operation = device.stream().launch(SPIN, 1, 1, 1)
    checker.follow(operation)
    checker.follow(operation)
    await operation
    await asyncio.sleep(0)


async def tells_nobody(device: Device, checker: Checker) -> None:
    operation = device.stream().launch(SPIN, 1, 1, 1)
    checker.follow(operation)
    operation._waiters = None
    await operation


async def loses_a_wake_up(device: Device, checker: Checker) -> None:
    await asyncio.Event().wait()


async def _expect(error: type[Exception], awaitable: Awaitable[object]) -> None:
    try:
        await awaitable
    except error:
        return


# V2, V3


class Hasty(SimulatedDriver):
    """Says that everything is done."""

    def event_query(self, event: int) -> bool:
        super().event_query(event)
        return True


async def awaits_a_kernel(device: Device, checker: Checker) -> None:
    async with device.stream() as stream:
        await asyncio.sleep(0)  # the queue is looked at from here on
        await stream.launch(SPIN, 1, 1, 1_000_000)


async def overtakes(device: Device, checker: Checker) -> None:
    queue = device.stream()._queue
    first, second = (new_operation(queue, "fill", None, None) for _ in range(2))
    await asyncio.sleep(0)  # the queue is looked at from here on
    queue.submit(second, None, ())
    queue.submit(first, None, ())
    await asyncio.sleep(0)


async def ends_out_of_order(device: Device, checker: Checker) -> None:
    stream = device.stream()
    operations = [stream.launch(SPIN, 1, 1, 1_000_000) for _ in range(2)]
    for operation in operations:
        checker.follow(operation)
    operations[1]._state = DONE
    await asyncio.sleep(0)


# V4, V5, V6


async def lets_go_of_an_array(device: Device, checker: Checker) -> None:
    stream = device.stream()
    array = np.ones(64, np.uint8)
    operation = stream.copy(stream.empty(64, np.uint8), array)
    checker.borrow(operation, weakref.ref(array))
    operation._keep = None
    del array
    await asyncio.sleep(0)


async def faults(device: Device, checker: Checker) -> None:
    await _expect(DeviceFault, device.stream().launch(TRAP, 1, 1))


async def gives_an_event_back_twice(device: Device, checker: Checker) -> None:
    await device.stream().launch(SPIN, 1, 1, 1)
    plain = device._device_state.leases.plain
    plain.append(plain[-1])
    await asyncio.sleep(0)


async def gives_an_event_back_that_is_in_use(device: Device, checker: Checker) -> None:
    operation = device.stream().launch(SPIN, 1, 1, 1_000_000)
    assert operation._lease is not None
    device._device_state.leases.give(operation._lease)
    await asyncio.sleep(0)


async def uses_what_was_freed(device: Device, checker: Checker) -> None:
    stream = device.stream()
    buffer = stream.empty(16, np.uint32)
    buffer.free()
    buffer._block.revive()
    toys = Actions(0, [device], checker)
    toys._use_stale(Tracked(buffer, stream))
    await asyncio.sleep(0)


async def leaks_a_stream(device: Device, checker: Checker) -> None:
    device.driver.stream_create(0, 0)


async def leaks_an_event(device: Device, checker: Checker) -> None:
    device.driver.event_create(0, False)


async def leaks_memory(device: Device, checker: Checker) -> None:
    device.driver.allocate(0, 64, device.stream()._queue.handle)


async def leaks_pinned_memory(device: Device, checker: Checker) -> None:
    device.driver.pinned_allocate(64)


async def counts_wrong(device: Device, checker: Checker) -> None:
    async with device.stream() as stream:
        stream._queue.reactor.resolved -= 1


# V7, V8


async def calls_behind_a_fault(device: Device, checker: Checker) -> None:
    await _expect(DeviceFault, device.stream().launch(SPIN, 1, 1, 1))
    await asyncio.sleep(0)
    await _expect(DeviceFault, _call(lambda: device.driver.event_create(0, False)))


async def _call(verb: Callable[[], object]) -> None:
    verb()


async def calls_in_a_callback(device: Device, checker: Checker) -> None:
    assert isinstance(device.driver, SimulatedDriver)
    port: Any = device.driver._ports[0]
    wake = port._wake
    port._wake = lambda: (device.driver.priority_range(0), wake())
    await device.stream().launch(SPIN, 1, 1, 100_000_000)  # parked: a notifier tells its end


# V9, V10


async def skips_without_a_cause(device: Device, checker: Checker) -> None:
    stream = device.stream()
    running = stream.launch(SPIN, 1, 1, 1_000_000)
    skipped = stream.synchronize()
    error = aiocuda.SkippedError("for no reason")
    stream._queue.spoil(skipped, error, Spoiled(error, running._queue.loop, "x").failure())
    await _expect(aiocuda.SkippedError, Actions(0, [device], checker)._told(skipped))


class Deep(Pipeline):
    """Has a slot too many."""

    def __init__(self, device: Device, stages: Any, depth: int = 3) -> None:
        super().__init__(device, stages, depth + 1)


class Crossed(Pipeline):
    """Confuses its items."""

    def run(self, source: Any, **options: Any) -> Any:
        return super().run(list(reversed(list(source))), **options)


async def _pipes(device: Device, checker: Checker) -> None:
    for seed in range(12):
        await carry.carry(Actions(seed, [device], checker), device, checker, kernels.AFFINE)


# V11, V12, V13, V14


async def uses_without_waiting(device: Device, checker: Checker) -> None:
    async with device.stream() as one, device.stream() as other:
        buffer = one.empty(16)
        buffer._block.allocation_event = None
        await other.fill(buffer, 1)


async def submits_without_a_limit(device: Device, checker: Checker) -> None:
    stream = device.stream()
    device._device_state.limit = 10_000
    for _ in range(100):
        stream.synchronize()
    await asyncio.sleep(0)


async def fills_a_hardware_queue(device: Device, checker: Checker) -> None:
    stream = device.stream()
    device._device_state.limit = 10_000
    for _ in range(1_022):
        stream.launch(SPIN, 1, 1, 1)
    await asyncio.sleep(0)


async def calls_back(device: Device, checker: Checker) -> None:
    toys = Actions(0, [device], checker)
    actions.actor.set(7)
    await toys._call_back()
    await device.drain()
    await asyncio.sleep(0)


async def resolves_too_much(device: Device, checker: Checker) -> None:
    stream = device.stream()
    await asyncio.sleep(0)
    for _ in range(MOST_RESOLVED + 1):
        stream._queue.mark()
    await asyncio.sleep(0)
    stream._queue.poll(10_000)
    await asyncio.sleep(0)


async def asks_too_much(device: Device, checker: Checker) -> None:
    for _ in range(MOST_CALLS + 1):
        device.driver.priority_range(0)
    await asyncio.sleep(0)


async def complains(device: Device, checker: Checker) -> None:
    device._loop_states.here().reactor.tell("planted", ValueError("planted"))
    await asyncio.sleep(0)


async def leaves_a_failure_unread(device: Device, checker: Checker) -> None:
    async with device.stream() as stream:
        device.driver._machine.streams[stream._queue.handle].device = 1  # type: ignore[attr-defined]
        await asyncio.wait([asyncio.ensure_future(stream.record().wait())])


async def loses_a_task(device: Device, checker: Checker) -> None:
    loop = asyncio.get_running_loop()
    lost = {"message": "Task was destroyed", "task": asyncio.current_task()}
    loop.call_soon(loop.call_exception_handler, lost)  # not from within: from 3.12 on it takes the task's own context
    await asyncio.sleep(0)


BREACHES: list[tuple[str, Breach]] = [
    *[("V1", each) for each in (ends_and_goes_on, passes_and_does_not, tells_twice, tells_nobody)],
    *[("V1", each) for each in (loses_a_wake_up,)],
    *[("V3", each) for each in (overtakes, ends_out_of_order)],
    *[("V4", each) for each in (lets_go_of_an_array, faults)],
    *[("V5", each) for each in (gives_an_event_back_twice, gives_an_event_back_that_is_in_use, uses_what_was_freed)],
    *[("V6", each) for each in (leaks_a_stream, leaks_an_event, leaks_memory, leaks_pinned_memory, counts_wrong)],
    ("V8", calls_in_a_callback),
    ("V9", skips_without_a_cause),
    ("V11", uses_without_waiting),
    ("V12", fills_a_hardware_queue),
    *[("V14", each) for each in (resolves_too_much, asks_too_much)],
    *[("P27", each) for each in (complains, leaves_a_failure_unread, loses_a_task)],
]


@pytest.mark.parametrize(("found", "breach"), BREACHES, ids=lambda value: getattr(value, "__name__", value))
def test_breach_is_found(found: str, breach: Breach) -> None:
    assert found in outcome(breach)


def test_v2_is_found_where_the_driver_is_hasty() -> None:
    assert outcome(awaits_a_kernel) == []
    assert outcome(awaits_a_kernel, Hasty(None)) == ["V2"]


def test_v2_is_found_where_content_is_wrong() -> None:
    class Forgetful(SimulatedDriver):
        """Kernels do nothing."""

        def load(self, device: int, program: Any) -> int:
            handle = super().load(device, program)
            self._functions[handle].host = lambda *values: None
            return handle

    found = [simulate(seed, driver=Forgetful(seed)).violations for seed in range(10)]
    assert any(violation.startswith(("V2 ", "V10 ")) for violations in found for violation in violations)


def test_v7_is_found_behind_a_fault() -> None:
    assert outcome(calls_behind_a_fault, SimulatedDriver(None, upsets=[Upset("fault")])) == ["V7"]


@pytest.mark.parametrize("wrong", [Deep, Crossed])
def test_v10_is_found_where_a_pipeline_is_wrong(monkeypatch: pytest.MonkeyPatch, wrong: type[Pipeline]) -> None:
    assert outcome(_pipes) == []
    monkeypatch.setattr(carry, "Pipeline", wrong)
    assert outcome(_pipes) == ["V10"]


def test_v12_is_found_where_a_stream_takes_what_it_likes() -> None:
    assert outcome(submits_without_a_limit, max_in_flight=3) == ["V12"]


def test_v13_is_found_where_a_callback_loses_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(calls_back) == []
    add = Operation.add_done_callback
    monkeypatch.setattr(
        Operation, "add_done_callback", lambda self, fn, *, context=None: add(self, fn, context=contextvars.Context())
    )
    assert outcome(calls_back) == ["V13"]


def test_v15_is_found_where_chance_is_no_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeededChoices, "call_ns", lambda self: random.SystemRandom().randrange(1_000))
    result = sweep(0, 1, None)
    assert result.violations == ["seed 0: V15 it does something else when it is run again"]


def test_p27_is_found_where_something_else_is_raised() -> None:
    async def raises(device: Device, checker: Checker) -> None:
        raise ZeroDivisionError

    assert outcome(raises) == ["P27"]


async def parks(device: Device, checker: Checker) -> None:
    await device.stream().launch(SPIN, 1, 1, 1_000_000)


def test_p27_is_found_where_nobody_is_told_of_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing() -> SimulatedDriver:
        return SimulatedDriver(None, upsets=[Upset("refuse", 1, "ring", 801)])

    driver = refusing()
    assert outcome(parks, driver) == []
    assert driver.upsets.happened == {"refuse 801": 1}
    monkeypatch.setattr(Reactor, "tell", lambda self, what, error: None)
    assert outcome(parks, refusing()) == ["P27"]


def test_p27_is_found_where_a_stream_takes_another_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_transfers, "meet", lambda queue, memory, device: None)
    seeds = [seed for seed in range(200) if Program.devices(seed) == 2]
    assert any(violation.startswith("P27 ") for seed in seeds for violation in simulate(seed).violations)


def test_the_first_breach_ends_the_run() -> None:
    async def goes_on(device: Device, checker: Checker) -> None:
        checker.found("V0 planted")
        for _ in range(100):
            await asyncio.sleep(0)
            turns.append(time)

    turns: list[object] = []
    assert outcome(goes_on) == ["V0"]
    assert turns == []
