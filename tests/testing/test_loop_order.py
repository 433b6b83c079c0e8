"""The order of `SimulatedLoop`: asyncio's own, and the same in every process."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from aiocuda.testing import SimulatedLoop

Program: TypeAlias = Callable[[list[object]], Coroutine[Any, Any, None]]

#: A timer of asyncio's may be a few ms late where the machine is busy.
APART = 0.02


async def callbacks(trace: list[object]) -> None:
    loop = asyncio.get_running_loop()

    def again(name: str, times: int) -> None:
        trace.append((name, times))
        if times:
            loop.call_soon(again, name, times - 1)

    for name in "abc":
        loop.call_soon(again, name, ord(name) % 4)
    loop.call_soon(trace.append, "cancelled").cancel()
    later = loop.call_soon(trace.append, "cancelled by b")
    loop.call_soon(later.cancel)
    for turn in range(5):
        await asyncio.sleep(0)
        trace.append(turn)


async def timers(trace: list[object]) -> None:
    loop = asyncio.get_running_loop()
    for number in (5, 1, 3, 2, 4):
        loop.call_later(number * APART, trace.append, number)
    loop.call_at(loop.time() - 1, trace.append, "past")
    loop.call_later(2.5 * APART, trace.append, "cancelled").cancel()
    loop.call_soon(trace.append, "soon")
    await asyncio.sleep(6 * APART)


async def primitives(trace: list[object]) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(2)
    lock, event, semaphore = asyncio.Lock(), asyncio.Event(), asyncio.Semaphore(2)
    condition, barrier = asyncio.Condition(), asyncio.Barrier(3)

    async def worker(name: str) -> None:
        await event.wait()
        for _ in range(2):
            async with semaphore:
                item = await queue.get()
                trace.append((name, "got", item))
            async with lock:
                await asyncio.sleep(0)
                trace.append((name, "locked"))
        trace.append((name, await barrier.wait()))
        async with condition:
            await condition.wait()
            trace.append((name, "notified"))

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(worker(name))
        await asyncio.sleep(0)
        event.set()
        for item in range(6):
            await queue.put(item)
            trace.append(("put", item))
        while "notified" not in str(trace[-3:]) or sum("notified" in str(entry) for entry in trace) < 3:
            async with condition:
                condition.notify(1)
            await asyncio.sleep(0)


async def cancellations(trace: list[object]) -> None:
    async def waits(name: str) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            trace.append((name, "cancelled"))
            await asyncio.sleep(0)
            trace.append((name, "cleaned up"))
            raise

    tasks = [asyncio.create_task(waits(name)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    trace.append([type(result) for result in await asyncio.gather(tasks[1], return_exceptions=True)])
    gathered = asyncio.gather(*tasks[::2])
    asyncio.get_running_loop().call_soon(gathered.cancel)
    try:
        await gathered
    except asyncio.CancelledError:
        trace.append("gathered")
    try:
        async with asyncio.timeout(APART):
            await waits("timed out")
    except TimeoutError:
        trace.append("timeout")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waits("waited for"), APART)
    shielded = asyncio.create_task(waits("shielded"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(shielded), APART)
    shielded.cancel()
    await asyncio.wait([shielded])


async def futures(trace: list[object]) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    for number in range(3):
        future.add_done_callback(lambda _, number=number: trace.append(number))  # type: ignore[misc]
    future.add_done_callback(trace.append)
    future.remove_done_callback(trace.append)
    loop.call_soon(future.set_result, 7)
    trace.append(await future)
    trace.append(await asyncio.to_thread(str.upper, "x"))
    done, pending = await asyncio.wait(
        [asyncio.create_task(asyncio.sleep(seconds)) for seconds in (0, 3600)], return_when=asyncio.FIRST_COMPLETED
    )
    trace.append((len(done), len(pending)))
    for task in pending:
        task.cancel()


def run(program: Callable[[list[object]], Coroutine[Any, Any, None]], factory: Any) -> list[object]:
    trace: list[object] = []
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(program(trace))
    trace.append("closed")
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("program", [callbacks, timers, primitives, cancellations, futures])
def test_order_is_asyncios_own(program: Program) -> None:
    trace = run(program, SimulatedLoop)
    assert len(trace) > 5
    assert trace == run(program, asyncio.new_event_loop)


def _random_program(seed: int) -> Program:
    """Tasks that do at random what tasks do; what hangs at the end is cancelled in order."""

    async def program(trace: list[object]) -> None:
        choices = random.Random(seed)
        loop = asyncio.get_running_loop()
        events = [asyncio.Event() for _ in range(3)]
        queues: list[asyncio.Queue[int]] = [asyncio.Queue(choices.randrange(3)) for _ in range(2)]
        handles: list[asyncio.Handle] = []
        tasks: list[asyncio.Task[None]] = []

        async def task(name: int, script: list[tuple[int, int]]) -> None:
            try:
                for step, (action, which) in enumerate(script):
                    trace.append((name, step))
                    if action == 0:
                        await asyncio.sleep(0)
                    elif action == 1:
                        await events[which % 3].wait()
                    elif action == 2:
                        events[which % 3].set()
                    elif action == 3:
                        events[which % 3].clear()
                    elif action == 4:
                        await queues[which % 2].put(step)
                    elif action == 5:
                        trace.append((name, "got", await queues[which % 2].get()))
                    elif action == 6:
                        handles.append(loop.call_soon(trace.append, (name, "soon", step)))
                    elif action == 7:
                        handles.append(loop.call_later(0, trace.append, (name, "later", step)))
                    elif action == 8 and handles:
                        handles[which % len(handles)].cancel()
                    elif action == 9 and which % 4 == 0:
                        tasks[which % len(tasks)].cancel()
            finally:
                trace.append((name, "ends"))

        for name in range(6):
            script = [(choices.randrange(10), choices.randrange(100)) for _ in range(12)]
            tasks.append(asyncio.create_task(task(name, script)))
        for turn in range(40):
            await asyncio.sleep(0)
            trace.append(turn)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return program


@pytest.mark.slow
def test_order_of_random_programs_is_asyncios_own() -> None:
    for seed in range(100):
        trace = run(_random_program(seed), SimulatedLoop)
        assert trace == run(_random_program(seed), asyncio.new_event_loop), seed


def _note(loop: SimulatedLoop, fired: list[tuple[int, int, int]], when: int, order: int) -> None:
    fired.append((loop.clock.now_ns, when, order))


def test_timers_fire_by_time_and_then_by_order() -> None:
    for seed in range(50):
        choices = random.Random(seed)
        loop = SimulatedLoop()
        fired: list[tuple[int, int, int]] = []
        note = functools.partial(_note, loop, fired)
        made: list[tuple[int, int]] = []
        for order in range(300):
            when = choices.randrange(2, 40) * 1_000_000
            timer = loop.call_at(when / 1e9, note, when, order)
            if choices.random() < 0.4:
                timer.cancel()
            else:
                made.append((when, order))
        loop.call_later(1, loop.stop)
        loop.run_forever()
        loop.close()
        assert fired == [(when, when, order) for when, order in sorted(made)]


_PROGRAM = """
import asyncio, random, sys
from aiocuda.testing import LostWakeupError, SimulatedLoop

async def generator(name):
    try:
        while True:
            yield name
    finally:
        print(name, "closed")

async def worker(name, generators):
    generators.append(generator(name))
    await anext(generators[-1])
    try:
        seconds = random.Random(name).random()
        await asyncio.sleep(0.3 if name == 'worker 7' else seconds)
        if name[:4] == 'left':
            await asyncio.Event().wait()
        print(name, asyncio.get_running_loop().clock.now_ns)
        if name == "worker 7":
            raise ValueError(name)
    except asyncio.CancelledError:
        print(name, "cancelled")
        raise

async def main(generators):
    padding = [object() for _ in range(int(sys.argv[1]))]
    background = [asyncio.create_task(worker(f"background {n}", generators)) for n in range(10)]
    done, pending = await asyncio.wait(background, timeout=0.5)
    print([task.get_name() for task in done], [task.get_name() for task in pending])
    try:
        async with asyncio.TaskGroup() as group:
            for n in range(40):
                padding.append(bytearray(random.SystemRandom().randrange(2000)))
                group.create_task(worker(f"worker {n}", generators))
    except* ValueError as errors:
        print(errors.exceptions)
    left = [asyncio.create_task(worker(f"left {n}", generators)) for n in range(10)]
    await asyncio.sleep(0)
    await asyncio.Event().wait()

generators = []
try:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        loop = runner.get_loop()
        runner.run(main(generators))
except LostWakeupError as error:
    print(error)
print(loop.steps, loop.clock.now_ns)
"""


@pytest.mark.slow
def test_same_trace_in_every_process() -> None:
    traces = set()
    for seed in range(4):
        finished = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(seed * 1000)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert finished.stderr == ""
        traces.add(finished.stdout)
    (trace,) = traces
    assert trace.count("cancelled") > 20
    assert "lost wake-up" in trace
