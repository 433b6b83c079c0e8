"""Mistakes of authors of kernels and pipelines, with the error of each and words of its cure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import aiocuda
from aiocuda import CompileError, InvalidTypeError
from aiocuda.observe import StreamProfiler, Timeline
from aiocuda.testing import Latch
from tests.bad_input.newcomers import At, coordinated, enter, enter_async, pooled

__all__ = ["AUTHORS", "NOTES"]

AIOCUDA: Any = aiocuda  # untyped, as all that follows, because a type checker refuses the mistakes
LATCH: Any = Latch
PROFILER: Any = StreamProfiler
TIMELINE: Any = Timeline

AWAIT = "and not its result: await it first, and use its result"


async def coroutine_function(*args: Any) -> None:
    raise AssertionError("it was called")


def fills(slot: Any) -> Any:
    return slot.stream.fill(slot.buffer("x", 4), 1)


STAGE: Any = AIOCUDA.Stage("fill", fills)


async def piped(at: At, call: Callable[[Any], Any]) -> Any:
    """Return the result of a call with a pipeline, which may be a coroutine."""
    async with AIOCUDA.Pipeline(at.device, [STAGE]) as pipeline:
        result = call(pipeline)
        return await result if inspect.iscoroutine(result) else result


def profiled(at: At) -> Any:
    profiler = PROFILER(at.device)
    profiler.record("entry", 0.1)
    return profiler.report()


async def ticketed(at: At, call: Callable[[Any], Any]) -> Any:
    async def submits(pipeline: Any) -> Any:
        return call(await pipeline.submit(1))

    return await piped(at, submits)


def enter_made(at: At, made: Callable[[At], Any]) -> None:
    enter(made(at))


def noded(at: At, call: Callable[[Any], Any]) -> Any:
    return coordinated(at, lambda coordinator: call(coordinator.download(at.buffer)))


def returns(kind: str) -> Any:
    return AIOCUDA.Kernel("f", source=f'extern "C" __global__ {kind} f(float* x) {{}}', host=lambda x: None)


RESULTS: dict[str, Callable[[Any], Any]] = {
    "[:3]": lambda thing: thing[:3],
    "+ 1": lambda thing: thing + 1,
    "for": list,
    "float()": float,
    "np.asarray()": np.asarray,
}

#: (the mistake, the class of the error, words of the cure)
AUTHORS: dict[str, tuple[Callable[[At], object], type[Exception], str]] = {
    **{
        f"{name} {used}": (partial(of, call=use), InvalidTypeError, AWAIT)
        for name, of in (("ticket", ticketed), ("node", noded))
        for used, use in RESULTS.items()
    },
    "ticket.shape": (lambda at: ticketed(at, lambda ticket: ticket.shape), AttributeError, "await it first"),
    "ticket.get()": (lambda at: ticketed(at, lambda ticket: ticket.get()), AttributeError, "`await ticket`"),
    "node.sum()": (
        lambda at: noded(at, lambda node: node.sum()),
        AttributeError,
        "await it first, and use its",
    ),
    "Latch(stream)": (lambda at: LATCH(at.stream), InvalidTypeError, "Latch(device), not Stream"),
    "latch.hold()": (lambda at: LATCH(at.device).hold(), InvalidTypeError, "latch.hold(stream), not NoneType"),
    "latch.hold(x)": (lambda at: LATCH(at.device).hold(at.buffer), InvalidTypeError, "latch.hold(stream), not DeviceB"),
    "async with Latch()": (lambda at: enter_async(LATCH(at.device)), InvalidTypeError, "`with Latch(device) as latch`"),
    "add_callback(async_fn)": (
        lambda at: at.stream.add_callback(coroutine_function),
        InvalidTypeError,
        "is a coroutine function: create a task",
    ),
    "offload(async_fn)": (
        lambda at: at.device.offload(coroutine_function),
        InvalidTypeError,
        "is a coroutine function: await it here",
    ),
    "__global__ int": (lambda at: returns("int"), CompileError, "a `__global__` function returns void"),
    "__global__ unsigned long": (lambda at: returns("unsigned  long"), CompileError, "kernel 'f' returns long: a"),
    **{
        f"with {name}": (partial(enter_made, made=made), InvalidTypeError, cure)
        for name, made, cure in (
            ("Pipeline()", lambda at: AIOCUDA.Pipeline(at.device, [STAGE]), "Pipeline(device, stages) as pipeline`"),
            ("AsyncCoordinator()", lambda at: AIOCUDA.AsyncCoordinator(at.device), "`async with AsyncCoordinator(de"),
            ("Timeline()", lambda at: TIMELINE(at.device), "is entered by `async with`, not `with`"),
            ("StreamProfiler()", lambda at: PROFILER(at.device), "is entered by `async with`, not `with`"),
            ("device", lambda at: at.device, "`async with aiocuda.open_device() as device`"),
            ("ring.slot()", lambda at: AIOCUDA.TripleBuffer().slot(), "`async with ring.slot(item) as slot`"),
            ("pool.borrow()", lambda at: AIOCUDA.EventPool(at.device).borrow(), "`async with pool.borrow() as event`"),
            ("EventPool()", lambda at: AIOCUDA.EventPool(at.device), "is no block, and is not closed"),
        )
    },
    "async with EventPool()": (
        lambda at: enter_async(AIOCUDA.EventPool(at.device)),
        InvalidTypeError,
        "`async with pool.borrow() as event`",
    ),
    "ring.slot().buffer()": (
        lambda at: AIOCUDA.TripleBuffer().slot().buffer("x"),
        AttributeError,
        "TripleBuffer.slot() has no 'buffer': it takes a slot for an `async with` block",
    ),
    "pool[0]": (lambda at: pooled(at, lambda pool: pool[0]), InvalidTypeError, "`async with pool.stream() as stream`"),
    "for stream in pool": (lambda at: pooled(at, list), InvalidTypeError, "`async with pool.stream() as stream`"),
    "ring[0]": (lambda at: AIOCUDA.TripleBuffer()[0], InvalidTypeError, "ring.upload_slot(), takes a free slot"),
    "pipeline(items)": (
        lambda at: piped(at, lambda pipeline: pipeline([1])),
        InvalidTypeError,
        "`async for result in pipeline.run(items)`",
    ),
    "stage(1)": (lambda at: STAGE(1), InvalidTypeError, "a pipeline calls its function"),
    "report['fill']": (
        lambda at: profiled(at)["fill"],
        InvalidTypeError,
        "a ProfileReport has no items: report.total",
    ),
    "Pipeline(device, up, down, 3)": (
        lambda at: AIOCUDA.Pipeline(at.device, fills, fills, 3),
        InvalidTypeError,
        "too many positional arguments: stages is a sequence of aiocuda.Stage: Pipeline(device, [Stage('up', up)",
    ),
    "Pipeline(num_slots=)": (
        lambda at: AIOCUDA.Pipeline(at.device, [STAGE], num_slots=3),
        InvalidTypeError,
        "'num_slots': use depth=",
    ),
    "AsyncCoordinator(max_concurrent=)": (
        lambda at: AIOCUDA.AsyncCoordinator(at.device, max_concurrent=3),
        InvalidTypeError,
        "'max_concurrent': use max_in_flight=",
    ),
    "AsyncCoordinator()": (
        lambda at: AIOCUDA.AsyncCoordinator(),
        InvalidTypeError,
        "'device': AsyncCoordinator(device, max_in_flight=64)",
    ),
    "EventPool(size=)": (lambda at: AIOCUDA.EventPool(at.device, size=3), InvalidTypeError, "'size': use limit="),
    "StreamPool(maximum=4)": (
        lambda at: AIOCUDA.StreamPool(maximum=4),
        InvalidTypeError,
        "'device': StreamPool(device, minimum=1, maximum=8)",
    ),
    "Stage(up)": (lambda at: AIOCUDA.Stage(fills), InvalidTypeError, "two positional arguments: Stage('up', up)"),
    "event.elapsed_ms()": (lambda at: at.event.elapsed_ms(), InvalidTypeError, "start.elapsed_ms(end), not with NoneT"),
}

NO_AWAIT = "it can be used at once: leave the `await` out. Operations are awaited"
LIMIT = "`async with asyncio.timeout(seconds)` limits an await"

#: Calls and uses that Python refuses by itself, with the note of the error.
NOTES: dict[str, tuple[Callable[[At], object], str]] = {
    "stream.synchronize(timeout=)": (
        lambda at: at.stream.synchronize(timeout=5),
        f"it is Stream.synchronize(*, label=None): {LIMIT}",
    ),
    "stream.record(enable_timing=)": (
        lambda at: at.stream.record(enable_timing=True),
        "it is Stream.record(timing=False, *, event=None, label=None): use timing=True",
    ),
    "stream.fill(x)": (lambda at: at.stream.fill(at.buffer), "it is Stream.fill(buffer, value, *, label=None)"),
    "stream.fill(stream=)": (
        lambda at: at.stream.fill(at.buffer, 1, stream=at.stream),
        "it is Stream.fill(buffer, value, *, label=None): the stream is the object whose method is called",
    ),
    "pool.any_ready(1)": (
        lambda at: pooled(at, lambda pool: pool.any_ready(1)),
        "it is StreamPool.any_ready(*, timeout=None)",
    ),
    "operation.wait(timeout=)": (lambda at: at.operation.wait(timeout=5), LIMIT),
    "aiocuda.wait(stream, 5)": (lambda at: AIOCUDA.wait(at.stream, 5), "it is aiocuda.wait(x, *, timeout=None)"),
    "as_completed(timeout=)": (
        lambda at: AIOCUDA.as_completed([], timeout=1),
        f"it is aiocuda.as_completed(operations): {LIMIT}",
    ),
    "Timeline()": (lambda at: TIMELINE(), "it is Timeline(device)"),
    "await buffer": (lambda at: awaits(at.buffer), NO_AWAIT),
    "await stream": (lambda at: awaits(at.stream), NO_AWAIT),
}


async def awaits(thing: Any) -> Any:
    return await thing
