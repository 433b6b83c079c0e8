"""Mistakes of authors of kernels and pipelines, with the error of each and words of its cure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import aiocuda
from aiocuda import ClosedError, CompileError, InvalidArgumentError, InvalidTypeError
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


AXPY: Any = AIOCUDA.Kernel(
    "axpy", source="__global__ void axpy(float a, float* x, float* y, int n) {}", host=lambda a, x, y, n: None
)
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


async def never_entered(at: At) -> Any:
    async with AIOCUDA.AsyncCoordinator(at.device) as coordinator:
        bracket = coordinator.operation("kernel")
    return bracket.result()


def wait_for_coroutine() -> Any:
    coroutine = coroutine_function()
    try:
        return AIOCUDA.wait(coroutine)
    finally:
        coroutine.close()


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
        "ring.slot() has no 'buffer': it takes a slot for an `async with` block",
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
        "'device': StreamPool(device, minimum, maximum): `async with aiocuda.StreamPool(",
    ),
    "Stage(up)": (lambda at: AIOCUDA.Stage(fills), InvalidTypeError, "two positional arguments: Stage('up', up)"),
    "compute(kernel, 2.0, x, y, 4)": (
        lambda at: coordinated(at, lambda c: c.compute(AXPY, 2.0, at.buffer, at.buffer, 4)),
        InvalidTypeError,
        "takes 4 arguments, 2 given: grid and block come before them",
    ),
    "compute(depends_on=)": (
        lambda at: coordinated(at, lambda c: c.compute(AXPY, 1, 1, 2.0, at.buffer, at.buffer, 4, depends_on=[])),
        InvalidTypeError,
        "'depends_on': use after=",
    ),
    "launch(size=)": (lambda at: at.stream.launch(AXPY, size=4), InvalidTypeError, "'size': use n="),
    "launch(shared=)": (lambda at: at.stream.launch(AXPY, shared=4), InvalidTypeError, "it is called shared_bytes"),
    "launch(timeout=)": (
        lambda at: at.stream.launch(AXPY, timeout=4),
        InvalidTypeError,
        "`async with asyncio.timeout(",
    ),
    "launch(kernel, 'x')": (
        lambda at: at.stream.launch(AXPY, 1, 1, 2.0, "x", at.buffer, 4),
        InvalidTypeError,
        "aiocuda.pipeline.SlotBuffer('x', shape, dtype)",
    ),
    "buffer.close()": (lambda at: at.buffer.close(), AttributeError, "buffer.free() frees it"),
    "Pipeline(device, [up])": (
        lambda at: AIOCUDA.Pipeline(at.device, [fills]),
        InvalidTypeError,
        "stages is a sequence of aiocuda.Stage, Stage(name, function), and one of them is",
    ),
    "TripleBuffer(device)": (
        lambda at: AIOCUDA.TripleBuffer(at.device),
        InvalidTypeError,
        ": TripleBuffer(3, buffers={'x': (1024, np.float32)}, device=device)",
    ),
    "slot.enter('upload')": (
        lambda at: AIOCUDA.TripleBuffer().upload_slot().enter("upload"),
        InvalidArgumentError,
        "cannot become 'upload': there are 'uploading', 'processing' and 'downloading'",
    ),
    "operation() that is not entered": (lambda at: never_entered(at), ClosedError, "was never entered by `async with`"),
    "fill(node)": (
        lambda at: noded(at, lambda node: at.stream.fill(node, 3)),
        InvalidTypeError,
        "not ScheduledNode: its .buffer is one",
    ),
    "download(node)": (
        lambda at: noded(at, lambda node: at.stream.download(node)),
        InvalidTypeError,
        "not ScheduledNode: its .buffer is one",
    ),
    "stream.wait(node)": (
        lambda at: noded(at, lambda node: at.stream.wait(node)),
        InvalidTypeError,
        "not ScheduledNode: await it first; in a coordinator, after= orders operations",
    ),
    "stream.wait(ticket)": (lambda at: ticketed(at, at.stream.wait), InvalidTypeError, "not Ticket: await it first"),
    "stream.wait([event])": (lambda at: at.stream.wait([at.event]), InvalidTypeError, "call it for each of them"),
    "StreamGroup(names, device)": (
        lambda at: AIOCUDA.StreamGroup(("a", "b"), at.device),
        InvalidTypeError,
        "StreamGroup(device, streams), not tuple",
    ),
    "aiocuda.wait(coroutine)": (lambda at: wait_for_coroutine(), InvalidTypeError, "coroutine: await it"),
    "aiocuda.wait(device)": (lambda at: AIOCUDA.wait(at.device), InvalidTypeError, ": `await device.drain()` waits"),
    "download(x, dtype)": (
        lambda at: at.stream.download(at.buffer, np.float64),
        InvalidTypeError,
        "array.astype(dtype) converts it",
    ),
    "event.elapsed_ms()": (lambda at: at.event.elapsed_ms(), InvalidTypeError, "returns None, so keep the event"),
}

NO_AWAIT = "it can be used at once: leave the `await` out. Operations are awaited"
ASYNC_FOR = "`async for` iterates over it, as over aiocuda.as_completed(operations)"

#: Uses that Python refuses by itself, with the note of the error.
NOTES: dict[str, tuple[Callable[[At], object], str]] = {
    "for operation in as_completed()": (lambda at: list(AIOCUDA.as_completed([])), ASYNC_FOR),
    "await as_completed()": (lambda at: awaits(AIOCUDA.as_completed([])), ASYNC_FOR),
    "async with operation": (
        lambda at: enter_async(at.operation),
        "an operation is awaited: `await operation`",
    ),
    "await buffer": (lambda at: awaits(at.buffer), NO_AWAIT),
    "await stream": (lambda at: awaits(at.stream), NO_AWAIT),
}


async def awaits(thing: Any) -> Any:
    return await thing
