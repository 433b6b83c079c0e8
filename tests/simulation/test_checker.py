"""Each invariant is checked: a test breaks one on purpose, and the checker reports its id."""

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
from aiocuda._base._failure import Poison
from aiocuda._core import DONE, SUBMITTED, StreamOperation, new_operation, stream_operation
from aiocuda.completion._reactor import Reactor
from aiocuda.device._resources import resources_of
from aiocuda.device.streams._memory_access import MemoryAccess
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.driver.simulated._choices import SeededChoices
from tests.helpers import SPIN, TRAP
from tests.simulation import actions, pipelines
from tests.simulation.actions import Actions
from tests.simulation.buffers import TrackedBuffer
from tests.simulation.checker import MOST_CALLS, MOST_RESOLVED, Checker
from tests.simulation.program import Program
from tests.simulation.run import simulate, sweep, watch

Breach = Callable[[Device, Checker], Awaitable[object]]


def outcome(breach: Breach, driver: SimulatedDriver | None = None, **options: Any) -> list[str]:
    """Return the ids of the invariants that ``breach`` violates. The device is opened and closed properly."""
    driver = SimulatedDriver(None) if driver is None else driver
    checker = Checker(driver)

    async def main() -> None:
        async with aiocuda.open_device(driver=driver, **options) as device:
            checker.watch(device)
            await device.load(SPIN)
            await breach(device, checker)

    watch(main, checker)
    return sorted({text.partition(" ")[0].rstrip(":") for text in checker.violations})


async def breaks_nothing(device: Device, checker: Checker) -> None:
    async with device.stream() as stream:
        array = np.ones(64, np.uint8)
        buffer = stream.empty(64, np.uint8)
        operation = stream.copy(buffer, array)
        checker.follow(operation)
        checker.borrow(operation, weakref.ref(array))
        assert (await stream.download(buffer) == 1).all()


def test_correct_program_violates_nothing() -> None:
    assert outcome(breaks_nothing) == []


# V1


async def changes_state_after_its_end(device: Device, checker: Checker) -> None:
    stream = device.stream()
    operation = stream.launch(SPIN, 1, 1, 1)
    checker.follow(operation)
    await operation
    stream_operation(operation).status = SUBMITTED


async def ends_while_the_device_works(device: Device, checker: Checker) -> None:
    stream = device.stream()
    operation = stream.launch(SPIN, 1, 1, 1)
    checker.follow(operation)
    await operation
    stream_operation(operation).detached = True


async def calls_back_twice(device: Device, checker: Checker) -> None:
    operation = device.stream().launch(SPIN, 1, 1, 1)
    checker.follow(operation)
    checker.follow(operation)
    await operation
    await asyncio.sleep(0)


async def never_calls_back(device: Device, checker: Checker) -> None:
    operation = device.stream().launch(SPIN, 1, 1, 1)
    checker.follow(operation)
    stream_operation(operation).waiters = None
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
    """Answers every query of an event with "done"."""

    def event_query(self, event: int) -> bool:
        super().event_query(event)
        return True


async def awaits_a_kernel(device: Device, checker: Checker) -> None:
    async with device.stream() as stream:
        await asyncio.sleep(0)  # from here on the checker watches the queue
        await stream.launch(SPIN, 1, 1, 1_000_000)


async def overtakes(device: Device, checker: Checker) -> None:
    queue = device.stream()._queue
    first, second = (new_operation(queue, "fill", None, None) for _ in range(2))
    await asyncio.sleep(0)  # from here on the checker watches the queue
    queue.submit(second, None, ())
    queue.submit(first, None, ())
    await asyncio.sleep(0)


async def ends_out_of_order(device: Device, checker: Checker) -> None:
    stream = device.stream()
    operations = [stream.launch(SPIN, 1, 1, 1_000_000) for _ in range(2)]
    for operation in operations:
        checker.follow(operation)
    stream_operation(operations[1]).status = DONE
    await asyncio.sleep(0)


# V4, V5, V6


async def drops_a_borrowed_array(device: Device, checker: Checker) -> None:
    stream = device.stream()
    array = np.ones(64, np.uint8)
    operation = stream.copy(stream.empty(64, np.uint8), array)
    checker.borrow(operation, weakref.ref(array))
    stream_operation(operation).keep = None
    del array
    await asyncio.sleep(0)


async def faults(device: Device, checker: Checker) -> None:
    await _expect(DeviceFault, device.stream().launch(TRAP, 1, 1))


async def gives_an_event_back_twice(device: Device, checker: Checker) -> None:
    await device.stream().launch(SPIN, 1, 1, 1)
    plain = resources_of(device).device_state.leases.plain
    plain.append(plain[-1])
    await asyncio.sleep(0)


async def gives_an_event_back_that_is_in_use(device: Device, checker: Checker) -> None:
    operation = device.stream().launch(SPIN, 1, 1, 1_000_000)
    lease = stream_operation(operation).lease
    assert lease is not None
    resources_of(device).device_state.leases.give(lease)
    await asyncio.sleep(0)


async def uses_freed_memory(device: Device, checker: Checker) -> None:
    stream = device.stream()
    buffer = stream.empty(16, np.uint32)
    buffer.free()
    buffer._block.revive()
    shared = Actions(0, [device], checker)
    shared._use_freed(TrackedBuffer(buffer, stream))
    await asyncio.sleep(0)


async def leaks_a_stream(device: Device, checker: Checker) -> None:
    device.driver.stream_create(0, 0)


async def leaks_an_event(device: Device, checker: Checker) -> None:
    device.driver.event_create(0, False)


async def leaks_memory(device: Device, checker: Checker) -> None:
    device.driver.allocate(0, 64, device.stream()._queue.handle)


async def leaks_pinned_memory(device: Device, checker: Checker) -> None:
    device.driver.pinned_allocate(64)


async def miscounts_resolved_operations(device: Device, checker: Checker) -> None:
    async with device.stream() as stream:
        stream._queue.reactor_hot.resolved -= 1


# V7, V8


async def calls_the_driver_after_a_fault(device: Device, checker: Checker) -> None:
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
    await device.stream().launch(SPIN, 1, 1, 100_000_000)  # parked: a notifier wakes the loop at its end


# V9, V10


async def skips_without_a_cause(device: Device, checker: Checker) -> None:
    stream = device.stream()
    running = stream.launch(SPIN, 1, 1, 1_000_000)
    skipped = stream.synchronize()
    error = aiocuda.SkippedError("for no reason")
    stream._queue.rare.place_failed(
        stream_operation(skipped), error, Poison(error, stream_operation(running).queue.loop, "x").failure()
    )
    await _expect(aiocuda.SkippedError, Actions(0, [device], checker)._await(skipped))


class Deep(Pipeline):
    """A pipeline with one slot too many."""

    def __init__(self, device: Device, stages: Any, depth: int = 3) -> None:
        super().__init__(device, stages, depth + 1)


class Crossed(Pipeline):
    """A pipeline that returns its results in the wrong order."""

    def run(self, source: Any, **options: Any) -> Any:
        return super().run(list(reversed(list(source))), **options)


async def _pipes(device: Device, checker: Checker) -> None:
    for seed in range(12):
        await pipelines.run_pipeline(Actions(seed, [device], checker), device)


# V11, V12, V13, V14, V16


async def uses_without_waiting(device: Device, checker: Checker) -> None:
    async with device.stream() as one, device.stream() as other:
        buffer = one.empty(16)
        buffer._block.allocation_event = None
        await other.fill(buffer, 1)


async def submits_without_a_limit(device: Device, checker: Checker) -> None:
    stream = device.stream()
    resources_of(device).device_state.hot.limit = 10_000
    for _ in range(100):
        stream.synchronize()
    await asyncio.sleep(0)


async def fills_a_hardware_queue(device: Device, checker: Checker) -> None:
    stream = device.stream()
    resources_of(device).device_state.hot.limit = 10_000
    for _ in range(1_022):
        stream.launch(SPIN, 1, 1, 1)
    await asyncio.sleep(0)


async def calls_back(device: Device, checker: Checker) -> None:
    shared = Actions(0, [device], checker)
    actions.current_task.set(7)
    await shared._add_callback()
    await device.drain()
    await asyncio.sleep(0)


async def resolves_too_many_operations(device: Device, checker: Checker) -> None:
    stream = device.stream()
    await asyncio.sleep(0)
    for _ in range(MOST_RESOLVED + 1):
        stream._queue.submit_marker()
    await asyncio.sleep(0)
    stream._queue.poll(10_000)
    await asyncio.sleep(0)


async def calls_the_driver_too_often(device: Device, checker: Checker) -> None:
    for _ in range(MOST_CALLS + 1):
        device.driver.priority_range(0)
    await asyncio.sleep(0)


async def locks_memory_on_the_loop(device: Device, checker: Checker) -> None:
    await device.load(SPIN)
    async with device.stream() as stream:
        stream.launch(SPIN, 1, 1, 1_000_000)
        array = np.zeros(16)
        device.driver.pin(array.ctypes.data, array.nbytes)
        await asyncio.sleep(0)


async def reports_an_error_to_the_loop(device: Device, checker: Checker) -> None:
    resources_of(device).loop_states.here().reactor.report("planted", ValueError("planted"))
    await asyncio.sleep(0)


async def leaves_a_failure_unseen(device: Device, checker: Checker) -> None:
    async with device.stream() as stream:
        device.driver._machine.streams[stream._queue.handle].device = 1  # type: ignore[attr-defined]
        await asyncio.wait([asyncio.ensure_future(stream.record().wait())])


async def loses_a_task(device: Device, checker: Checker) -> None:
    loop = asyncio.get_running_loop()
    lost = {"message": "Task was destroyed", "task": asyncio.current_task()}
    loop.call_soon(
        loop.call_exception_handler, lost
    )  # not from within the task: from 3.12 on the handler runs in the task's context
    await asyncio.sleep(0)


BREACHES: dict[str, list[Breach]] = {
    "V1": [
        changes_state_after_its_end,
        ends_while_the_device_works,
        calls_back_twice,
        never_calls_back,
        loses_a_wake_up,
    ],
    "V3": [overtakes, ends_out_of_order],
    "V4": [drops_a_borrowed_array, faults],
    "V5": [gives_an_event_back_twice, gives_an_event_back_that_is_in_use, uses_freed_memory],
    "V6": [leaks_a_stream, leaks_an_event, leaks_memory, leaks_pinned_memory, miscounts_resolved_operations],
    "V8": [calls_in_a_callback],
    "V9": [skips_without_a_cause],
    "V11": [uses_without_waiting],
    "V12": [fills_a_hardware_queue],
    "V14": [resolves_too_many_operations, calls_the_driver_too_often],
    "V16": [locks_memory_on_the_loop],
    "P27": [reports_an_error_to_the_loop, leaves_a_failure_unseen, loses_a_task],
}


@pytest.mark.parametrize(
    ("found", "breach"),
    [(invariant, breach) for invariant, breaches in BREACHES.items() for breach in breaches],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_breach_is_found(found: str, breach: Breach) -> None:
    assert found in outcome(breach)


def test_v2_is_found_if_the_driver_answers_done_too_early() -> None:
    assert outcome(awaits_a_kernel) == []
    assert outcome(awaits_a_kernel, Hasty(None)) == ["V2"]


def test_v2_is_found_if_content_is_wrong() -> None:
    class Forgetful(SimulatedDriver):
        """A driver with kernels that do nothing."""

        def load(self, device: int, program: Any) -> int:
            handle = super().load(device, program)
            self._functions[handle].host = lambda *values: None
            return handle

    found = (simulate(seed, driver=Forgetful(seed)).violations for seed in range(10))
    assert any(violation.startswith(("V2 ", "V10 ")) for violations in found for violation in violations)


def test_v7_is_found_after_a_fault() -> None:
    assert outcome(calls_the_driver_after_a_fault, SimulatedDriver(None, upsets=[Upset("fault")])) == ["V7"]


@pytest.mark.parametrize("wrong", [Deep, Crossed])
def test_v10_is_found_if_a_pipeline_is_wrong(monkeypatch: pytest.MonkeyPatch, wrong: type[Pipeline]) -> None:
    assert outcome(_pipes) == []
    monkeypatch.setattr(pipelines, "Pipeline", wrong)
    assert outcome(_pipes) == ["V10"]


def test_v12_is_found_if_a_stream_submits_without_limit() -> None:
    assert outcome(submits_without_a_limit, max_in_flight=3) == ["V12"]


def test_v13_is_found_if_a_callback_loses_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(calls_back) == []
    add = StreamOperation.add_done_callback
    monkeypatch.setattr(
        StreamOperation,
        "add_done_callback",
        lambda self, fn, *, context=None: add(self, fn, context=contextvars.Context()),
    )
    assert outcome(calls_back) == ["V13"]


def test_v15_is_found_if_the_seed_does_not_decide_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeededChoices, "call_ns", lambda self: random.SystemRandom().randrange(1_000))
    result = sweep(0, 1, None)
    assert result.violations == ["seed 0: V15 a second run of this seed differs from the first"]


def test_p27_is_found_if_an_unexpected_error_is_raised() -> None:
    async def raises(device: Device, checker: Checker) -> None:
        raise ZeroDivisionError

    assert outcome(raises) == ["P27"]


async def parks(device: Device, checker: Checker) -> None:
    await device.stream().launch(SPIN, 1, 1, 1_000_000)


def test_p27_is_found_if_a_refused_call_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing() -> SimulatedDriver:
        return SimulatedDriver(None, upsets=[Upset("refuse", 1, "ring", 801)])

    driver = refusing()
    assert outcome(parks, driver) == []
    assert driver.upsets.happened == {"refuse 801": 1}
    monkeypatch.setattr(Reactor, "report", lambda self, what, error: None)
    assert outcome(parks, refusing()) == ["P27"]


def test_p27_is_found_if_a_stream_uses_memory_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryAccess, "prepare", lambda self, memory: None)
    seeds = [seed for seed in range(200) if Program.device_count(seed) == 2]
    assert any(violation.startswith("P27 ") for seed in seeds for violation in simulate(seed).violations)


def test_first_violation_ends_the_program() -> None:
    async def goes_on(device: Device, checker: Checker) -> None:
        checker.report("V0 planted")
        for _ in range(100):
            await asyncio.sleep(0)
            turns.append(time)

    turns: list[object] = []
    assert outcome(goes_on) == ["V0"]
    assert turns == []
