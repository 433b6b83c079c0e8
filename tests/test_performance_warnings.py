"""PerformanceWarning: each slow way to use a device is reported once, with the line and the cure."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, InvalidArgumentError, PerformanceWarning, Stream
from aiocuda.memory._copy_watch import CopyWatch
from tests.benchmarks.host_time import IdleDriver
from tests.benchmarks.kernels import empty
from tests.helpers import PATIENCE, FewQueues, Latch, until

#: Seconds after which advice that must come has not come. A busy machine is often too slow for a probe.
LONGEST = PATIENCE

#: Seconds in which a device is looked at several times: after that, twice as rarely each time.
LOOKS = 4.0

#: A function of a program: it gets a device, two streams and a buffer.
Program: TypeAlias = Callable[[Device, Stream, Stream, Any], Awaitable[None]]

_numbers = itertools.count()


def program(text: str) -> tuple[Program, str]:
    """Compile the function ``run(device, left, right, buffer)`` of a program. Return it and the name of its file.

    Each program has a file of its own: advice is given once for each line.
    """
    file = f"/program/{next(_numbers)}.py"
    names: dict[str, Any] = {"aiocuda": aiocuda, "asyncio": asyncio, "np": np, "time": time}
    body = "\n".join("    " + line for line in text.strip().splitlines())
    exec(compile(f"async def run(device, left, right, buffer):\n{body}\n", file, "exec"), names)
    return names["run"], file


@contextlib.contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """Record all performance warnings of the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerformanceWarning)
        yield caught
    caught[:] = [each for each in caught if each.category is PerformanceWarning]


@contextlib.asynccontextmanager
async def opened(*, slow_copies: bool = False) -> AsyncIterator[tuple[Device, Stream, Stream, Any]]:
    """Open a device, two streams and a buffer. By the clock of a slow host, a staged copy takes a third of the time."""
    async with (
        aiocuda.open_device(driver="host") as device,
        device.stream(name="left") as left,
        device.stream(name="right") as right,
    ):
        buffer = left.empty(16)
        await left.fill(buffer, 0)
        if slow_copies:
            watch = device._resources.loop_state().staging.copy_watch
            assert watch is not None
            watch.now = functools.partial(next, itertools.count(1.0, 1e-3))  # read three times for a copy
        yield device, left, right, buffer


async def advice_for(text: str, *, seconds: float, slow_copies: bool = False) -> list[tuple[str, int, str]]:
    """Run a program again and again, until there is advice, or for so many seconds.

    Return the advice, as (file, line, message), and check the file.
    """
    run, file = program(text)
    end = time.monotonic() + seconds
    with recorded() as caught:
        while True:
            async with opened(slow_copies=slow_copies) as things:
                end_of_looks = min(end, time.monotonic() + LOOKS)
                while not caught and time.monotonic() < end_of_looks:
                    await run(*things)
            if caught or time.monotonic() >= end:
                break
    assert all(each.filename == file for each in caught), caught
    return [(each.filename, each.lineno, str(each.message)) for each in caught]


#: Seconds for which a program without advice runs: a probe begins after 0.1 s, and ends 0.2 s later.
QUIET = 0.6

CHAIN = """
for _ in range(50):
    await left.fill(buffer, 1)
"""

COPIES = """
pinned = device.pinned(16)
for _ in range(50):
    await left.copy(buffer, pinned)
    await left.fill(buffer, 1)
"""

HOST_WAITS = """
for _ in range(50):
    await left.fill(buffer, 1)
    await right.fill(buffer, 2)
"""


@pytest.mark.asyncio
@pytest.mark.slow
async def test_awaiting_each_operation_of_a_chain() -> None:
    ((_, line, message),) = await advice_for(CHAIN, seconds=LONGEST)
    assert line == 3
    assert "awaited an operation of left before it enqueued the next one" in message
    assert "await only the last one, or aiocuda.gather" in message
    assert "AIOCUDA_WARN=0" in message


@pytest.mark.asyncio
@pytest.mark.slow
async def test_awaiting_each_copy_and_what_follows_it() -> None:
    ((_, line, message),) = await advice_for(COPIES, seconds=LONGEST)
    assert line in (4, 5)
    assert "awaited an operation of left before it enqueued the next one" in message


@pytest.mark.asyncio
@pytest.mark.slow
async def test_search_for_round_trips_holds_no_buffer() -> None:
    """An operation that has ended, and which the program has dropped, does not stay until the search ends."""
    async with opened() as (device, left, _, _), asyncio.timeout(LONGEST):
        searching = 0
        while searching < 300:  # uploads during searches, also when a search has seen enough
            buffer = await left.upload(np.zeros(4))
            reference = weakref.ref(buffer)
            del buffer
            assert reference() is None
            watch = device._resources.loop_state().round_trip_watch
            searching += watch is not None and watch._probe is not None


@pytest.mark.asyncio
@pytest.mark.slow
async def test_waiting_on_the_host_between_streams() -> None:
    ((_, line, message),) = await advice_for(HOST_WAITS, seconds=LONGEST)
    assert line in (3, 4)
    assert "on another stream (" in message
    assert "left" in message
    assert "right" in message
    assert "stream.wait(operation), or use an AsyncCoordinator or a Pipeline" in message


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            """
for _ in range(20):
    last = left.fill(buffer, 1)
await last
""",
            id="the last of a chain is awaited",
        ),
        pytest.param(
            """
await aiocuda.gather(*[left.fill(buffer, 1) for _ in range(5)])
""",
            id="gather",
        ),
        pytest.param(
            """
first = left.fill(buffer, 1)
right.wait(first)
await right.fill(buffer, 2)
left.wait(right.fill(buffer, 3))
""",
            id="the device waits",
        ),
        pytest.param(
            """
left.fill(buffer, 1)
if (await left.download(buffer))[0] < 0:
    raise ValueError
""",
            id="the host needs the result",
        ),
        pytest.param(
            """
async def request():
    await left.fill(buffer, 1)
await asyncio.create_task(request())
""",
            id="one await in each request",
        ),
        pytest.param(
            """
async def one(stream):
    for _ in range(20):
        await stream.fill(own[stream], 1)
own = {stream: stream.empty(16) for stream in (left, right)}
await asyncio.gather(*map(one, own))
""",
            id="two chains at the same time",
        ),
        pytest.param(
            """
await left.fill(buffer, 1)
await asyncio.sleep(0.002)
""",
            id="the program does other things",
        ),
    ],
)
async def test_no_advice_about_round_trips(text: str) -> None:
    assert await advice_for(text, seconds=QUIET) == []


@pytest.mark.heavy
@pytest.mark.asyncio
@pytest.mark.slow
async def test_advice_is_given_once() -> None:
    run, _ = program(CHAIN)
    for expected in (1, 0):
        with recorded() as caught:
            async with opened() as things:
                end = time.monotonic() + (LONGEST if expected else QUIET)
                while time.monotonic() < end and not (expected and caught):
                    await run(*things)
        assert len(caught) == expected


@pytest.mark.asyncio
@pytest.mark.slow
async def test_no_listener_is_left() -> None:
    run, _ = program(CHAIN)
    with recorded() as caught:
        async with opened() as things:
            state = things[0]._resources.device_state
            while not caught:
                await run(*things)
            assert state.hot.listeners is None


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_probe_ends_with_the_work() -> None:
    """Without unfinished operations the watchdog stops. A probe that goes on would keep the newest operation."""
    async with opened() as (device, left, _, buffer):
        state = device._resources.device_state
        while state.hot.listeners is None:
            await left.fill(buffer, 1)
        await until(lambda: state.hot.listeners is None, "the end of the probe")


@pytest.mark.slow
@pytest.mark.asyncio
async def test_operations_that_end_before_their_await_suspends() -> None:
    """The watchdog then finds no unfinished operation."""
    run, file = program(CHAIN)
    with recorded() as caught:
        async with aiocuda.open_device(driver=IdleDriver()) as device, device.stream() as stream:
            state, buffer = device._resources.device_state, stream.empty(16)
            end = time.monotonic() + LONGEST
            while not caught and time.monotonic() < end:
                await run(device, stream, stream, buffer)
            await until(lambda: state.hot.listeners is None, "the end of the probe")
    assert [each.filename for each in caught] == [file]


class TimingEvents(IdleDriver):
    """Counts the timing events that it makes."""

    timing_events = 0

    def event_create(self, device: int, timing: bool) -> int:
        self.timing_events += timing
        return super().event_create(device, timing)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_work_of_several_streams_gets_no_timing_events() -> None:
    """Between the kernels of 64 streams they make these take 61 ms instead of 31 (measured on an H200)."""
    driver = TimingEvents()
    async with aiocuda.open_device(driver=driver) as device, device.stream() as left, device.stream() as right:
        state = device._resources.device_state
        kernel = empty()

        async def work_while(condition: Callable[[], bool]) -> None:
            end = time.monotonic() + LONGEST
            while condition():
                assert time.monotonic() < end
                await aiocuda.gather(*[left.launch(kernel, 1, 1) for _ in range(4)], right.launch(kernel, 1, 1))

        await work_while(lambda: state.hot.listeners is None)  # until a probe begins
        await work_while(lambda: state.hot.listeners is not None)
        assert driver.timing_events == 0


@pytest.mark.asyncio
async def test_no_advice_without_asynchronous_streams() -> None:
    async with aiocuda.open_device(driver="host", asynchronous=False) as device, device.stream() as stream:
        await stream.fill(stream.empty(4), 1)
        assert device._resources.loop_state().round_trip_watch is None


@pytest.mark.heavy
@pytest.mark.asyncio
@pytest.mark.slow
async def test_two_loops_get_no_advice_about_each_other() -> None:
    """A loop cannot know whether the device has had work of another loop."""
    run, _ = program(CHAIN)

    async def elsewhere(device: Device, end: float) -> None:
        async with device.stream() as stream:
            buffer = stream.empty(16)
            while time.monotonic() < end:
                await stream.fill(buffer, 1)

    with recorded() as caught:
        async with opened() as things:
            end = time.monotonic() + QUIET
            other = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere(things[0], end)))
            while time.monotonic() < end:
                await run(*things)
            await other
    assert caught == []


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_warning_as_an_error_goes_to_the_exception_handler_of_the_loop() -> None:
    run, _ = program(CHAIN)
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        async with opened() as things:
            end = time.monotonic() + LONGEST
            while not errors and time.monotonic() < end:
                await run(*things)
    assert [type(error) for error in errors] == [PerformanceWarning]


# -- pageable copies ---------------------------------------------------------------------------------------------------

PAGEABLE = """
array, target = np.ones(1 << 18, np.float32), left.empty(1 << 18)
for _ in range(120):
    await left.copy(target, array)
"""

DOWNLOADS = """
source = left.empty(1 << 20)
for _ in range(120):
    await left.download(source)
"""


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("text", [PAGEABLE, DOWNLOADS], ids=["uploads", "downloads"])
async def test_pageable_copies_in_a_loop(text: str) -> None:
    ((_, line, message),) = await advice_for(text, seconds=LONGEST, slow_copies=True)
    assert line == 4
    assert "copied pageable memory 100 times" in message
    assert "device.pinned(shape, dtype)" in message


@pytest.mark.heavy
@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            """
array, target = np.ones(1 << 18, np.float32), left.empty(1 << 18)
async def request():
    await left.copy(target, array)
for _ in range(120):
    await asyncio.create_task(request())
""",
            id="a copy in each request",
        ),
        pytest.param(
            """
array, target = await device.pinned(1 << 18), left.empty(1 << 18)
for _ in range(120):
    await left.copy(target, array)
""",
            id="pinned",
        ),
        pytest.param(
            """
array, target = np.ones(1 << 10, np.float32), left.empty(1 << 10)
for _ in range(120):
    await left.copy(target, array)
""",
            id="small arrays",
        ),
    ],
)
async def test_no_advice_about_copies(text: str) -> None:
    assert [each for each in await advice_for(text, seconds=QUIET) if "pageable" in each[2]] == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("nbytes", "seconds", "advised"),
    [
        pytest.param(4 << 20, 5e-3, True, id="slow copies"),
        pytest.param(80_000, 12e-3, False, id="a busy machine"),
        pytest.param(4 << 20, 0.5e-3, False, id="fast copies"),
    ],
)
async def test_pageable_copies_count_with_the_time_that_a_host_can_need(
    nbytes: int, seconds: float, advised: bool
) -> None:
    run: Any = program("for _ in range(100):\n    device.count(left)\n    device.add(right, left)")[0]  # on a new line
    now = itertools.count(1.0, 17e-3)
    with recorded() as caught:
        await run(CopyWatch(lambda: next(now)), nbytes, seconds, None)
    assert len(caught) == advised


COPY = """
loop = asyncio.get_running_loop()

def copy():
    device.count(left)
    device.add(right, left)
"""

ONE_TASK = """
for _ in range(150):
    copy()
"""

CALLBACKS = """
for _ in range(150):
    loop.call_soon(copy)
await asyncio.sleep(0)
"""

TWO_TASKS = """
async def some():
    for _ in range(75):
        copy()

for _ in range(2):
    await loop.create_task(some())
"""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("text", "pause", "advised"),
    [
        pytest.param(ONE_TASK, 17e-3, True, id="one task"),
        pytest.param(ONE_TASK, 0.2, False, id="in more than 10 s"),
        pytest.param(CALLBACKS, 17e-3, False, id="callbacks"),
        pytest.param(TWO_TASKS, 17e-3, False, id="two tasks"),
    ],
)
async def test_pageable_copies_count_if_one_task_makes_many_within_10_s(text: str, pause: float, advised: bool) -> None:
    """The host works on them for half of the time."""
    run: Any = program(COPY + text)[0]
    now = itertools.count(1.0, pause)
    with recorded() as caught:
        await run(CopyWatch(lambda: next(now)), 64 << 20, pause / 2, None)
    assert len(caught) == advised


FAST_COPIES_AFTER_A_SLOW_ONE = """
device.count(left)
device.add(5.0, right)

async def other():
    for _ in range(150):
        device.count(left)

await asyncio.create_task(other())
"""


@pytest.mark.asyncio
async def test_time_of_the_copies_of_another_task_does_not_count() -> None:
    run: Any = program(FAST_COPIES_AFTER_A_SLOW_ONE)[0]
    now = itertools.count(1.0, 1e-3)
    with recorded() as caught:
        await run(CopyWatch(lambda: next(now)), 4 << 20, 10 << 30, None)
    assert caught == []


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_copy_raises_its_warning_before_it_begins() -> None:
    run, _ = program(PAGEABLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        async with opened(slow_copies=True) as things:
            with pytest.raises(PerformanceWarning, match="pageable"):
                await run(*things)
            await things[1].fill(things[3], 1)  # the stream goes on


# -- hardware queues ---------------------------------------------------------------------------------------------------


async def busy_streams(
    count: int, waiting: bool, driver: Any = "host", seconds: float = QUIET
) -> list[warnings.WarningMessage]:
    """Hold ``count`` streams for so long, unless there is advice earlier."""
    with recorded() as caught:
        async with aiocuda.open_device(driver=driver) as device, contextlib.AsyncExitStack() as stack:
            latch = stack.enter_context(Latch(device))
            first = await stack.enter_async_context(device.stream())
            latch.hold(first)
            gate = first.fill(first.empty(4), 1)
            streams = [await stack.enter_async_context(device.stream()) for _ in range(count - 1)]
            for stream in streams:
                if waiting:
                    stream.wait(gate)
                else:
                    latch.hold(stream)
            end = time.monotonic() + seconds
            while not caught and time.monotonic() < end:
                await asyncio.sleep(0.001)
            latch.release()
    return caught


@pytest.mark.asyncio
@pytest.mark.slow
async def test_more_streams_than_hardware_queues_wait_for_each_other() -> None:
    caught = await busy_streams(40, waiting=True, seconds=LONGEST)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert "40 streams" in message
    assert "32 hardware queues" in message
    assert "aiocuda.StreamPool(device, maximum=32)" in message


@pytest.mark.asyncio
@pytest.mark.slow
async def test_no_advice_about_a_few_streams() -> None:
    assert await busy_streams(30, waiting=True) == []


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize(("streams", "told"), [(6, 0), (12, 1)])
async def test_device_with_few_hardware_queues(streams: int, told: int) -> None:
    """The advice names the variable. A program that needs no more queues gets none."""
    with contextlib.closing(FewQueues()) as driver:
        caught = await busy_streams(streams, waiting=True, driver=driver, seconds=LONGEST if told else QUIET)
    assert len(caught) == told
    for each in caught:
        assert "12 streams have unfinished operations" in str(each.message)
        assert "the device has 8 hardware queues" in str(each.message)
        assert "or set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA is first used" in str(each.message)


# -- stages that block the loop ----------------------------------------------------------------------------------------


async def run_stage(text: str, items: int = 8) -> list[warnings.WarningMessage]:
    """Run a pipeline with a stage ``run(device, slot, …)`` that awaits, until there is advice."""
    run, file = program(text)

    async def load(slot: aiocuda.Slot) -> None:
        await run(device, slot, None, None)  # type: ignore[arg-type]

    load.__code__ = load.__code__.replace(co_filename=file)
    stages = [
        aiocuda.Stage("load", load),
        aiocuda.Stage("upload", lambda slot: slot.stream.upload(np.ones(4, np.float32))),
    ]
    with recorded() as caught:
        async with aiocuda.open_device(driver="host") as device, aiocuda.Pipeline(device, stages) as pipeline:
            async with contextlib.aclosing(pipeline.run(range(items))) as results:
                async for _ in results:
                    if caught:
                        break
    assert ("blocks the event loop" in pipeline.advice().why) == bool(caught)
    return caught


@pytest.mark.asyncio
@pytest.mark.slow
async def test_stage_that_blocks_the_loop() -> None:
    # On a busy machine, the thread that samples the line is late for many items.
    (caught,) = await run_stage("await asyncio.sleep(0)\ntime.sleep(0.07)\nawait asyncio.sleep(0)", items=800)
    assert caught.filename.startswith("/program/")
    assert caught.lineno == 3
    assert "stage 'load' of a pipeline blocked the event loop here 3 times" in str(caught.message)
    assert "device.offload" in str(caught.message)


@pytest.mark.asyncio
@pytest.mark.slow
async def test_stage_that_awaits_a_thread_gets_no_advice() -> None:
    assert await run_stage("await device.offload(time.sleep, 0.07)") == []


@pytest.mark.asyncio
@pytest.mark.slow
async def test_timed_stage_gets_exceptions_and_cancellations() -> None:
    """A stage that is suspected runs as any other: results, exceptions and timeouts pass through."""
    seen: list[str] = []

    async def load(slot: aiocuda.Slot) -> int:
        if slot.item == 0:
            await asyncio.sleep(0.06)  # from now on, its steps are timed
        elif slot.item == 1:
            try:
                raise KeyError(slot.item)
            except KeyError:
                await asyncio.sleep(0)
        elif slot.item == 2:
            try:
                await asyncio.sleep(LONGEST)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise
        return int(slot.item) * 2

    stage = aiocuda.Stage("load", load, timeout=1.0, on_error=lambda error, item: seen.append(type(error).__name__))
    async with aiocuda.open_device(driver="host") as device, aiocuda.Pipeline(device, [stage]) as pipeline:
        assert [result async for result in pipeline.run(range(4))] == [0, 2, 6]
    assert seen == ["cancelled", "TimeoutError"]


# -- objects left open -------------------------------------------------------------------------------------------------


async def _pool(device: Device) -> None:
    lease = await aiocuda.StreamPool(device).stream()
    lease.release()


async def _group(device: Device) -> None:
    aiocuda.StreamGroup(device, ("up",))


async def _coordinator(device: Device) -> None:
    await aiocuda.AsyncCoordinator(device).upload(np.ones(4, np.float32))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("leave", "cure"),
    [
        (_pool, r"async with aiocuda\.StreamPool\(device\) as pool"),
        (_group, r"async with aiocuda\.StreamGroup\(device, names\) as group"),
        (_coordinator, r"async with aiocuda\.AsyncCoordinator\(device\) as coordinator"),
    ],
)
async def test_objects_left_open_name_their_line_and_the_cure(
    leave: Callable[[Device], Awaitable[None]], cure: str
) -> None:
    line = leave.__code__.co_firstlineno + 1
    async with aiocuda.open_device(driver="host") as device:
        with pytest.warns(ResourceWarning, match=rf"opened at {__file__}:{line}: use `{cure}`"):
            await leave(device)
            gc.collect()
            await asyncio.sleep(0)
            gc.collect()


# -- the switch --------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.asyncio
@pytest.mark.slow
async def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_WARN", "0")
    assert await advice_for(CHAIN, seconds=QUIET) == []
    assert await advice_for(PAGEABLE, seconds=0.0) == []
    assert await run_stage("time.sleep(0.06)", items=5) == []
    assert await busy_streams(40, waiting=True) == []


@pytest.mark.asyncio
async def test_switch_leaves_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_WARN", "0")
    async with opened() as (device, *_):
        loop_state = device._resources.loop_state()
        assert loop_state.round_trip_watch is None
        assert loop_state.staging.copy_watch is None


def test_filter_of_python_disables_a_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", PerformanceWarning)
        warnings.warn("slow", PerformanceWarning, stacklevel=1)
    assert caught == []


@pytest.mark.parametrize("value", ["2", "no", "-1"])
def test_unknown_value_of_the_switch(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_WARN", value)
    with pytest.raises(InvalidArgumentError, match=f"AIOCUDA_WARN='{value}': it takes 1 or 0"):
        aiocuda.open_device()
