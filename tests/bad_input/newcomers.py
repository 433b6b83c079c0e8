"""Mistakes that newcomers make, with the error of each and words of its cure."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import aiocuda
from aiocuda import ClosedError, InvalidArgumentError, InvalidTypeError, Kernel, PerformanceWarning, StaleHandleError
from aiocuda.cluster import open_cluster
from aiocuda.data import (
    DataLoader,
    LoaderAdvice,
    Shuffle,
    SyncArray,
    TensorBatch,
    sync_loader,
    sync_to_device,
    to_device,
)
from aiocuda.serving import BatchError, DeadlineError, MicroBatcher, asgi

__all__ = ["FIELDS", "MISTAKES", "At", "batcher", "loader", "submit"]

AIOCUDA: Any = aiocuda  # untyped, as all that follows, because a type checker refuses the mistakes
BATCHER: Any = MicroBatcher
ENDPOINT: Any = asgi.cancel_on_disconnect
COUNTED: Any = Kernel("counted", source="__global__ void counted(float* x, int n) {}", host=lambda x, n: None)
SCALED: Any = Kernel("scaled", source="__global__ void scaled(float* x, float a) {}", host=lambda x, a: None)
PARTS = "__global__ void parts(float* x) { extern __shared__ float part[]; part[threadIdx.x] = x[threadIdx.x]; }"
SHARED: Any = Kernel("parts", source=PARTS, host=lambda x: None)
ADVICE: Any = LoaderAdvice(4, 3, 1.0, "", "thread")
LOADER: Any = DataLoader
SHUFFLE: Any = Shuffle
SYNC_TO_DEVICE: Any = sync_to_device
TENSORS: Any = TensorBatch({0: 1})
TO_DEVICE: Any = to_device
SYNC_LOADER: Any = sync_loader
KERNEL: Any = Kernel(
    "twice", source="__global__ void twice(float* x) { x[threadIdx.x] *= 2; }", host=lambda x: x.__imul__(2)
)
LIFESPAN: Any = asgi.lifespan
MIDDLEWARE: Any = asgi.CancelOnDisconnect
OPEN: Any = aiocuda.open_device
READY: Any = asgi.ready
RESPONSES: Any = asgi.error_responses


class _Buffer(NamedTuple):
    """In place of the buffer of an array that no mistake reaches."""

    shape: tuple[int, ...] = (2,)
    dtype: str = "float32"


ARRAY: Any = SyncArray(None, None, _Buffer())  # type: ignore[arg-type]


class At(NamedTuple):
    """The objects for the mistakes."""

    device: Any
    stream: Any
    buffer: Any
    operation: Any
    event: Any


async def items(batch: Any) -> Any:
    return batch.items


async def iterates(batch: Any) -> Any:
    return list(batch)


async def measures(batch: Any) -> Any:
    return [0] * len(batch)


async def indexes(batch: Any) -> Any:
    return [batch[0]]


async def stacks(batch: Any) -> Any:
    return np.asarray(batch)


async def uploads(batch: Any) -> Any:
    return await batch.stream.upload(np.ones(3))


async def pins(batch: Any) -> Any:
    return batch.slot.pinned("x", 3)


async def pins_two(batch: Any) -> Any:
    return batch.slot.pinned("x", 4, 3)


async def pins_without_name(batch: Any) -> Any:
    return batch.slot.pinned((4, 3))


async def takes_two(items: Any, device: Any) -> Any:
    return items


async def pins_without_shape(batch: Any) -> Any:
    return batch.slot.pinned("x")


async def returns_operations(batch: Any) -> Any:
    return [batch.stream.download(batch.stream.empty(3)) for _ in batch.items]


def batcher(*positional: Any, **options: Any) -> Any:
    return BATCHER(items, *positional, **{"max_batch_size": 4, **options})


async def submit(function: Any = items, *more: Any, device: Any = None, **options: Any) -> Any:
    async with BATCHER(function, max_batch_size=4, device=device) as opened:
        return await opened.submit(1, *more, **options)


async def submit_now(*more: Any) -> Any:
    async with batcher() as opened:
        return opened.submit_nowait(1, *more)


async def submit_at_a_new_line(options: str) -> Any:
    call = at_a_new_line(f"lambda opened: opened.submit_nowait(1, {options})")
    async with batcher() as opened:
        return await call(opened)


async def submit_to(*more: Any, **options: Any) -> Any:
    async with batcher(**options) as opened:
        return await opened.submit(1, deadline_s=0.01)


async def submit_after_the_device() -> Any:
    async with aiocuda.open_device(driver="host") as device:
        opened = await batcher(device=device).__aenter__()
    try:
        return await opened.submit(1)
    finally:
        await opened.aclose()


async def await_after_the_block() -> Any:
    async with batcher() as opened:
        task = asyncio.create_task(opened.submit(1))
    return await task


async def has(name: str) -> Any:
    async with batcher() as opened:
        return getattr(opened, name)


def enter(thing: Any) -> None:
    with thing:
        raise AssertionError("it was entered")


async def enter_async(thing: Any) -> None:
    async with thing:
        raise AssertionError("it was entered")


async def wait_for(thing: Any) -> Any:
    return await thing


async def coordinated(at: At, call: Callable[[Any], Any]) -> Any:
    async with AIOCUDA.AsyncCoordinator(at.device) as coordinator:
        return call(coordinator)


async def pooled(at: At, call: Callable[[Any], Any]) -> Any:
    async with AIOCUDA.StreamPool(at.device) as pool:
        return call(pool)


def captured(at: At, call: Callable[[Any], Any] = lambda stream: None) -> Any:
    with at.stream.capture() as graph:
        at.stream.fill(at.buffer, 0)
        call(at.stream)
    return graph


async def open_second() -> Any:
    async with aiocuda.open_device(1, driver="host"):
        raise AssertionError("it was opened")


class TorchLoader:
    """As the one of PyTorch: it gives batches."""

    batch_sampler = ((0, 1),)

    def __iter__(self) -> Any:
        return iter([np.zeros((2, 3))])


def torch_dtype(name: str) -> Any:
    """Return a stand-in for a dtype of PyTorch."""
    return type("dtype", (), {"__module__": "torch", "__repr__": lambda self: f"torch.{name}"})()


async def with_batch(at: At, function: Callable[[Any], Any], source: Any = (1, 2), **options: Any) -> Any:
    """Return the result of a function of a batch."""
    async with LOADER(at.device, source, batch_size=2, **options) as opened:
        return function(await anext(aiter(opened)))


def loader(at: At, decode: Any, **options: Any) -> Any:
    return DataLoader(at.device, [1, 2, 3], decode=decode, **options)


def loader_with(name: str, at: At) -> Any:
    return LOADER(at.device, [1], **{name: 1})


ONE_SHAPE = "the shape before it is one integer or tuple, such as (4, 3)"
NO_LIST = "is no list: batch.items is, of batch.size items"
ONE_POSITIONAL = "MicroBatcher(infer, max_batch_size=32, device=device)"
WAIT = "use batch_wait_timeout_s=, in seconds"
SUBMIT = "submit takes an item, priority= and deadline_s="
FIELDS: Any = {"x": ((2,), np.float32)}

#: (the mistake, the class of the error, words of the cure)
MISTAKES: dict[str, tuple[Callable[[At], object], type[Exception], str]] = {
    "MicroBatcher(infer, 32)": (lambda at: BATCHER(items, 32), InvalidTypeError, ONE_POSITIONAL),
    "MicroBatcher(infer, device)": (lambda at: BATCHER(items, at.device), InvalidTypeError, ONE_POSITIONAL),
    "MicroBatcher(infer)": (
        lambda at: BATCHER(items),
        InvalidTypeError,
        f"'max_batch_size': a batcher has one positional argument, its function: {ONE_POSITIONAL}",
    ),
    "@MicroBatcher(max_batch_size=)": (
        lambda at: BATCHER(max_batch_size=4)(items),
        InvalidTypeError,
        f"'function': a batcher has one positional argument, its function: {ONE_POSITIONAL}",
    ),
    "MicroBatcher(infer with two parameters)": (
        lambda at: BATCHER(takes_two, max_batch_size=4),
        InvalidTypeError,
        "with the batch alone: missing a required argument: 'device'. `async def infer(batch): …`",
    ),
    "MicroBatcher(max_ongoing_requests=)": (
        lambda at: batcher(max_ongoing_requests=4),
        InvalidTypeError,
        "use max_queued_requests=, and max_concurrent_batches=",
    ),
    "max_queued_requests=None": (
        lambda at: batcher(max_queued_requests=None),
        InvalidTypeError,
        "max_queued_requests is an integer, not None: leave it out for 1024",
    ),
    "batch_wait_timeout_s=None": (
        lambda at: batcher(batch_wait_timeout_s=None),
        InvalidTypeError,
        "batch_wait_timeout_s is a number of seconds, not None: 0 does not wait",
    ),
    "lifespan(app, setup)": (lambda at: LIFESPAN(items, items), InvalidTypeError, "lifespan(setup, exit_on_fault=70)"),
    "lifespan(exit_code=)": (lambda at: LIFESPAN(items, exit_code=70), InvalidTypeError, "use exit_on_fault="),
    "lifespan(exit_on_fault=True)": (
        lambda at: LIFESPAN(lambda app: None, exit_on_fault=True),
        InvalidTypeError,
        "an exit code such as 70, not True",
    ),
    "ready()": (lambda at: READY(), InvalidTypeError, "app.add_route('/ready', ready(device)) in the setup"),
    "Route('/ready', ready)": (
        lambda at: READY(object()),
        InvalidTypeError,
        "not object: call app.add_route('/ready',",
    ),
    "Middleware(error_responses())": (lambda at: RESPONSES(), InvalidTypeError, "Middleware(error_responses)"),
    "Middleware(CancelOnDisconnect())": (lambda at: MIDDLEWARE(), InvalidTypeError, "Middleware(CancelOnDisconnect)"),
    "@cancel_on_disconnect()": (lambda at: ENDPOINT(), InvalidTypeError, "`@cancel_on_disconnect`"),
    "slot.pinned('x', 4, 3)": (lambda at: submit(pins_two, device=at.device), InvalidTypeError, ONE_SHAPE),
    "slot.pinned((4, 3))": (
        lambda at: submit(pins_without_name, device=at.device),
        InvalidTypeError,
        "slot.pinned('x', shape, dtype)",
    ),
    "stream.empty(4, 4)": (lambda at: at.stream.empty(4, 4), InvalidTypeError, f"not a dtype: 4 ({ONE_SHAPE}"),
    "device.pinned(float32, 4)": (lambda at: at.device.pinned(np.float32, 4), InvalidTypeError, ONE_SHAPE),
    "open_device('cuda:0')": (lambda at: OPEN("cuda:0"), InvalidTypeError, "open_device(0, driver='cuda')"),
    "open_device('cpu')": (lambda at: OPEN("cpu"), InvalidTypeError, "open_device(driver='host')"),
    "open_device(device=0)": (lambda at: OPEN(device=0), InvalidTypeError, "open_device(0) takes the index first"),
    "MicroBatcher(timeout=)": (lambda at: batcher(timeout=1), InvalidTypeError, f"'timeout': {WAIT}"),
    "MicroBatcher(max_wait_ms=)": (lambda at: batcher(max_wait_ms=1), InvalidTypeError, f"'max_wait_ms': {WAIT}"),
    "MicroBatcher(stream=)": (lambda at: batcher(stream=at.stream), InvalidTypeError, "has a stream, batch.stream"),
    "MicroBatcher(workers=)": (lambda at: batcher(workers=2), InvalidTypeError, "use max_concurrent_batches="),
    "MicroBatcher(window=)": (lambda at: batcher(window=2), InvalidTypeError, "'window': help(aiocuda.serving.Mic"),
    "device=open_device()": (
        lambda at: batcher(device=quiet(aiocuda.open_device())),
        InvalidTypeError,
        "`async with aiocuda.open_device() as device`",
    ),
    "no device, upload": (lambda at: submit(uploads), InvalidArgumentError, "batch.stream needs a device"),
    "no device, pinned": (lambda at: submit(pins), InvalidArgumentError, "batch.slot needs a device"),
    "for item in batch": (lambda at: submit(iterates), InvalidTypeError, NO_LIST),
    "len(batch)": (lambda at: submit(measures), InvalidTypeError, NO_LIST),
    "batch[0]": (lambda at: submit(indexes), InvalidTypeError, NO_LIST),
    "np.asarray(batch)": (lambda at: submit(stacks), InvalidTypeError, NO_LIST),
    "slot.pinned('x')": (
        lambda at: submit(pins_without_shape, device=at.device),
        InvalidTypeError,
        "slot.pinned('x', shape, dtype)",
    ),
    "operations as results": (
        lambda at: submit(returns_operations, device=at.device),
        BatchError,
        "`return await aiocuda.gather(*operations)` inside the function",
    ),
    "with batcher": (lambda at: enter(batcher()), InvalidTypeError, "`async with batcher`"),
    "await batcher": (lambda at: wait_for(batcher()), InvalidTypeError, "`async with batcher`"),
    "batcher(row)": (lambda at: batcher()(1), InvalidTypeError, "`await batcher.submit(item)`"),
    "batcher.stats": (lambda at: has("stats"), AttributeError, "batcher.statistics()"),
    "batcher.predict": (lambda at: has("predict"), AttributeError, "`await batcher.submit(item)`"),
    "submit(row, 0.5)": (lambda at: submit(items, 0.5), InvalidTypeError, SUBMIT),
    "submit(timeout=)": (lambda at: submit(timeout=1), InvalidTypeError, f"'timeout': {SUBMIT}"),
    "submit_nowait(row, 0.5)": (lambda at: submit_now(0.5), InvalidTypeError, SUBMIT),
    "deadline_s=time.time() + 1": (
        lambda at: submit(deadline_s=time.time() + 1),
        InvalidArgumentError,
        "deadline_s is in seconds from now, not a time of day",
    ),
    "deadline_s=500": (
        lambda at: submit_at_a_new_line("deadline_s=500"),
        PerformanceWarning,
        "a request has 500 s: deadline_s is in seconds from now, such as 0.5 for 500 ms, and no time of the loop",
    ),
    "deadline_s=86400": (lambda at: submit_at_a_new_line("deadline_s=86_400"), PerformanceWarning, "has 86400 s"),
    "deadline_s=0.01, batch_wait_timeout_s=5": (
        lambda at: submit_to(batch_wait_timeout_s=5),
        DeadlineError,
        "has passed: a request waits up to 5 s for others, choose a batch_wait_timeout_s below the deadlines",
    ),
    "device closed before its batcher": (
        lambda at: submit_after_the_device(),
        ClosedError,
        "put the batcher's block inside that of the device, `async with aiocuda.open_device() as device, MicroBatcher(",
    ),
    "tasks awaited after the block": (
        lambda at: await_after_the_block(),
        ClosedError,
        "Await the tasks that submit inside its block, or use submit_nowait there",
    ),
    "batch_wait_timeout_s=50": (
        lambda at: at_a_new_line("BATCHER(items, max_batch_size=4, batch_wait_timeout_s=50)"),
        PerformanceWarning,
        "waits up to 50 s for others: batch_wait_timeout_s is in seconds, such as 0.005 for 5 ms",
    ),
    "Device(0)": (lambda at: AIOCUDA.Device(0), InvalidTypeError, "`async with aiocuda.open_device() as device`"),
    "Stream(device)": (lambda at: AIOCUDA.Stream(at.device), InvalidTypeError, "`async with device.stream() as strea"),
    "Stream()": (lambda at: AIOCUDA.Stream(), InvalidTypeError, "`async with device.stream() as stream`"),
    "Event(device)": (lambda at: AIOCUDA.Event(at.device), InvalidTypeError, "is made by stream.record(), or lent by"),
    "Event(timing=True)": (lambda at: AIOCUDA.Event(timing=True), InvalidTypeError, "is made by stream.record()"),
    "event - event": (lambda at: at.event - at.event, InvalidTypeError, "start.elapsed_ms(end)"),
    "operation.sum()": (lambda at: at.operation.sum(), AttributeError, "await it first, and use its result"),
    "operation.tolist()": (lambda at: at.operation.tolist(), AttributeError, "await it first, and use its result"),
    "float(operation)": (lambda at: float(at.operation), InvalidTypeError, "await it first, and use its result"),
    "float(buffer[0])": (lambda at: float(at.buffer[0]), InvalidTypeError, "`await stream.download(buffer)`"),
    "int(buffer[0])": (lambda at: int(at.buffer[0]), InvalidTypeError, "`await stream.download(buffer)`"),
    "coordinator.launch()": (
        lambda at: coordinated(at, lambda c: c.launch(KERNEL, 1, 1, at.buffer)),
        AttributeError,
        "coordinator.compute(kernel, grid, block, *arguments)",
    ),
    "coordinator.fill()": (
        lambda at: coordinated(at, lambda c: c.fill(at.buffer, 1)),
        AttributeError,
        "`async with coordinator.operation('transfer', writes=[buffer]) as bracket`",
    ),
    "coordinator.copy()": (lambda at: coordinated(at, lambda c: c.copy(1, 2)), AttributeError, "bracket.stream"),
    "coordinator.empty()": (
        lambda at: coordinated(at, lambda c: c.empty(4)),
        AttributeError,
        "coordinator.compute_stream.empty(shape, dtype)",
    ),
    "with coordinator.operation()": (
        lambda at: coordinated(at, lambda c: enter(c.operation("kernel"))),
        InvalidTypeError,
        "`async with coordinator.operation(kind) as bracket`",
    ),
    "all_reduce(op=)": (
        lambda at: coordinated(at, lambda c: c.all_reduce([at.buffer], op="sum")),
        InvalidTypeError,
        "'op': it is called operation",
    ),
    "pool.acquire()": (lambda at: pooled(at, lambda p: p.acquire()), AttributeError, "`async with pool.stream() as st"),
    "with pool.stream()": (
        lambda at: pooled(at, lambda p: enter(p.stream())),
        InvalidTypeError,
        "`async with pool.stream() as stream`",
    ),
    "StreamPool(size=)": (
        lambda at: AIOCUDA.StreamPool(at.device, size=4),
        InvalidTypeError,
        "'size': use maximum=, and minimum=",
    ),
    "stream.memset()": (lambda at: at.stream.memset(at.buffer, 0), AttributeError, "stream.fill(buffer, value)"),
    "stream.memcpy()": (lambda at: at.stream.memcpy(1, 2), AttributeError, "stream.copy(target, source)"),
    "stream.pinned()": (lambda at: at.stream.pinned(4), AttributeError, "device.pinned(shape, dtype)"),
    "graph.replay()": (lambda at: captured(at).replay(), AttributeError, "graph.launch(stream)"),
    "graph()": (lambda at: captured(at)(), InvalidTypeError, "graph.launch(stream)"),
    "graph.launch()": (lambda at: captured(at).launch(), InvalidTypeError, "not on NoneType: graph.launch(stream)"),
    "await device.pin(x)": (
        lambda at: wait_for(at.device.pin(np.ones(4))),
        InvalidTypeError,
        "`async with device.pin(array) as pinned`",
    ),
    "with device.pin(x)": (
        lambda at: enter(at.device.pin(np.ones(4))),
        InvalidTypeError,
        "`async with device.pin(array) as pinned`",
    ),
    "unified.prefetch_to_device()": (
        lambda at: at.device.unified(4).prefetch_to_device(),
        AttributeError,
        "stream.prefetch(buffer, to='device')",
    ),
    "await open_cluster()": (
        lambda at: wait_for(open_cluster("local", replicas=1)),
        InvalidTypeError,
        "`async with open_cluster(…) as cluster`",
    ),
    "gather([a, b])": (lambda at: AIOCUDA.gather([at.operation]), InvalidTypeError, "unpack a list, gather(*operatio"),
    "Stage(workers=)": (lambda at: AIOCUDA.Stage("x", items, workers=2), InvalidTypeError, "use concurrency="),
    "Stage(depth=)": (lambda at: AIOCUDA.Stage("x", items, depth=2), InvalidTypeError, "Pipeline(device, stages, dep"),
    "ManagedContext(device=)": (
        lambda at: AIOCUDA.ManagedContext(device=at.device),
        InvalidTypeError,
        "it opens the device: ManagedContext(0)",
    ),
    "decode(sample), with fields=": (
        lambda at: loader(at, lambda sample: sample, fields=FIELDS),
        InvalidTypeError,
        "decode(sample, out), into which it writes, such as out['x'][...] = sample: this is decode(sample)",
    ),
    "stream.record(event)": (
        lambda at: at.stream.record(at.event),
        InvalidTypeError,
        "timing is True or False; to record an event again: stream.record(event=event)",
    ),
    "record(event=pool.borrow())": (
        lambda at: at.stream.record(event=AIOCUDA.EventPool(at.device).borrow()),
        InvalidTypeError,
        "`async with pool.borrow() as event`",
    ),
    "extern __shared__, no shared_bytes=": (
        lambda at: at_a_new_line("at.stream.launch(SHARED, 1, 32, at.buffer)", at),
        RuntimeWarning,
        "declares `extern __shared__`, and this launch has no shared_bytes=: launch it with the bytes",
    ),
    "extern __shared__, in a graph": (
        lambda at: at_a_new_line("captured(at, lambda stream: stream.launch(SHARED, 1, 32, at.buffer))", at),
        RuntimeWarning,
        "and this launch has no shared_bytes=",
    ),
    "stream.capture().launch()": (
        lambda at: at.stream.capture().launch(at.stream),
        AttributeError,
        "stream.capture() has no 'launch': `async with stream.capture() as graph`",
    ),
    "await stream.capture()": (
        lambda at: wait_for(at.stream.capture()),
        InvalidTypeError,
        "stream.capture() is a block, which records a graph: `async with stream.capture() as graph`",
    ),
    "launch(k, x, n=4)": (
        lambda at: at.stream.launch(COUNTED, at.buffer, n=4),
        InvalidTypeError,
        "counted(float* x, int n) takes 2 arguments, 1 given: pass each of them; n= is the number of threads",
    ),
    "launch(k, 1, 32, x, 4, n=4)": (
        lambda at: at.stream.launch(COUNTED, 1, 32, at.buffer, 4, n=4),
        InvalidTypeError,
        "takes 2 arguments, 4 given: with n=, leave out grid and block",
    ),
    "launch(args=)": (
        lambda at: at.stream.launch(COUNTED, 1, 32, args=(at.buffer, 4)),
        InvalidTypeError,
        "'args': launch takes grid=, block=, n=, shared_bytes= and label=; the kernel's own arguments have no keywords",
    ),
    "device.pinned(array)": (
        lambda at: at.device.pinned(np.arange(1000)),
        InvalidTypeError,
        "not an array: for memory like a, device.pinned(a.shape, a.dtype); `async with device.pin(a)` locks a",
    ),
    "buffer.shape = (2, 2)": (lambda at: setattr(at.buffer, "shape", (2, 2)), AttributeError, "buffer.reshape(…)"),
    "buffer.dtype = int": (lambda at: setattr(at.buffer, "dtype", np.dtype(int)), AttributeError, "buffer.view(dtype)"),
    "buffer[mask]": (
        lambda at: at.buffer[np.ones(4, bool)],
        InvalidTypeError,
        "indexed by integers and slices, not an array or a list: a kernel takes other items, or `(await stream.d",
    ),
    "buffer[[1, 2]]": (
        lambda at: at.buffer[[1, 2]],
        InvalidTypeError,
        "not an array or a list: a kernel takes other items",
    ),
    "launch(n=array)": (
        lambda at: at.stream.launch(COUNTED, at.buffer, 4, n=np.arange(1000)),
        InvalidTypeError,
        "n is an integer, not an array: its number of items is array.size",
    ),
    "launch(float as an array)": (
        lambda at: at.stream.launch(SCALED, 1, 32, at.buffer, np.array(2.0)),
        InvalidTypeError,
        "float takes a number up to 3.40282e+38, or inf or nan; array.item() is its number",
    ),
    "with stream.empty()": (
        lambda at: enter(at.stream.empty(4)),
        InvalidTypeError,
        "needs no block: the memory is fre",
    ),
    "async with stream.empty()": (
        lambda at: enter_async(at.stream.empty(4)),
        InvalidTypeError,
        "needs no block: the memory is freed when nothing refers to it, or by buffer.free()",
    ),
    "with device.pinned()": (
        lambda at: enter(at.device.pinned(4)),
        InvalidTypeError,
        "needs no block: the memory is f",
    ),
    "async with device.pinned()": (
        lambda at: enter_async(at.device.pinned(4)),
        InvalidTypeError,
        "needs no block: the memory is freed when nothing refers to it, or by buffer.free()",
    ),
    "with StreamPool(device)": (
        lambda at: enter(AIOCUDA.StreamPool(at.device)),
        InvalidTypeError,
        "`async with aiocuda.StreamPool(device) as pool`",
    ),
    "async with StreamBarrier(1)": (
        lambda at: enter_async(AIOCUDA.StreamBarrier(1)),
        InvalidTypeError,
        "`await barrier.wait(stream)` in each party",
    ),
    "StreamBarrier(device, 2)": (
        lambda at: AIOCUDA.StreamBarrier(at.device, 2),
        InvalidTypeError,
        "the number of its parties, StreamBarrier(2), and each party `await barrier.wait(stream)`",
    ),
    "Pipeline([stage])": (
        lambda at: AIOCUDA.Pipeline([AIOCUDA.Stage("x", items)]),
        InvalidTypeError,
        "'stages': stages is a sequence of aiocuda.Stage: Pipeline(device, [Stage(",
    ),
    "Pipeline(device)": (lambda at: AIOCUDA.Pipeline(at.device), InvalidTypeError, "stages is a sequence of"),
    "TripleBuffer(buffers, device)": (
        lambda at: AIOCUDA.TripleBuffer({"x": 4}, at.device),
        InvalidTypeError,
        "its depth: TripleBuffer(3, buffers={'x': (1024, np.float32)}, device=device)",
    ),
    "DeviceBuffer(4)": (lambda at: AIOCUDA.DeviceBuffer(4), InvalidTypeError, "stream.empty(shape, dtype)"),
    "Graph()": (lambda at: AIOCUDA.Graph(), InvalidTypeError, "`async with stream.capture() as graph`"),
    "device.stream(non_blocking=True)": (
        lambda at: at.device.stream(non_blocking=True),
        InvalidTypeError,
        "'non_blocking': each stream is already: leave it out",
    ),
    "graph.update(operation, a=3.0)": (
        lambda at: captured(at).update(at.operation, a=3.0),
        InvalidTypeError,
        "Graph.update has no parameter 'a': the kernel's arguments have no keywords: graph.update(operation, *argument",
    ),
    "stream.done": (lambda at: at.stream.done, AttributeError, "stream.tail is None if all its work is done"),
    "stream.use()": (lambda at: at.stream.use(), AttributeError, "no stream is current"),
    "device.use()": (lambda at: at.device.use(), AttributeError, "no device is current"),
    "device.set_current()": (lambda at: at.device.set_current(), AttributeError, "no device is current"),
    "f'{stream.download(x):.2f}'": (
        lambda at: f"{at.stream.download(at.buffer):.2f}",
        InvalidTypeError,
        "is an operation, and not its result: await it first, and use its result",
    ),
    "stream.launch(graph)": (
        lambda at: at.stream.launch(captured(at)),
        InvalidTypeError,
        "not Graph: Kernel(name, source=source, host=function) makes one, and a graph is run by graph.launch(stream)",
    ),
    "stream.launch('k')": (
        lambda at: at.stream.launch("twice", 1, 32, at.buffer),
        InvalidTypeError,
        "not str: Kernel(name, source=source, host=function) makes one",
    ),
    "device.load([k])": (lambda at: at.device.load([KERNEL]), InvalidTypeError, "not list: device.load(*kernels)"),
    "launch(k, 0, 32, x)": (
        lambda at: at.stream.launch(KERNEL, 0, 32, at.buffer),
        InvalidArgumentError,
        "launch(kernel, *arguments, n=0) launches nothing",
    ),
    "decode returns, with fields=": (
        lambda at: with_batch(at, list, fields=[((), np.int64)], decode=lambda sample, out: sample + 1),
        TypeError,
        "decode returned a value of type int, and with fields= it writes into out: out[0][...] = value",
    ),
    "decode(sample, out, generator)": (
        lambda at: loader(at, lambda sample, out, generator: None, fields=FIELDS),
        InvalidTypeError,
        "(sample, out, generator) requires 'generator', and decode may also take rng and epoch only",
    ),
    "fields of torch.float32": (
        lambda at: loader(at, None, fields=[((4,), torch_dtype("float32"))]),
        InvalidTypeError,
        "torch.float32 is of torch: use np.float32",
    ),
    "fields of torch.bfloat16": (
        lambda at: loader(at, None, fields=[((4,), torch_dtype("bfloat16"))]),
        InvalidTypeError,
        "torch.bfloat16 is of torch: NumPy lacks it",
    ),
    "DataLoader(torch loader)": (
        lambda at: LOADER(at.device, TorchLoader()),
        InvalidTypeError,
        "a TorchLoader of torch, gives batches: sync_to_device(loader) copies them, and so does to_device(loader, dev",
    ),
    "DataLoader(dataset)": (
        lambda at: LOADER([1], batch_size=4),
        InvalidTypeError,
        "missing a required argument: 'source': DataLoader(device, source, batch_size=64), or sync_loader(source, ",
    ),
    "DataLoader('cuda')": (
        lambda at: LOADER("cuda", [1]),
        InvalidTypeError,
        "takes an aiocuda.Device, not 'cuda': `async with aiocuda.open_device() as device`, or sync_loader(source, …)",
    ),
    "DataLoader(device, dataset, 4)": (
        lambda at: LOADER(at.device, [1], 4),
        InvalidTypeError,
        "too many positional arguments: DataLoader(device, source, batch_size=64), or sync_loader(source, batch_",
    ),
    "DataLoader(batchsize=)": (
        lambda at: LOADER(at.device, [1], batchsize=4),
        InvalidTypeError,
        "DataLoader has no parameter 'batchsize': help(aiocuda.data.DataLoader) lists its parameters, to which "
        "sync_loader adds index= and driver=; the nearest name is 'batch_size'",
    ),
    "DataLoader(multiprocessing_context=)": (
        lambda at: LOADER(at.device, [1], multiprocessing_context="spawn"),
        InvalidTypeError,
        "leave it out",
    ),
    **{
        f"DataLoader({name}=)": (
            functools.partial(loader_with, name),
            InvalidTypeError,
            f"DataLoader has no parameter {name!r}: {cure}",
        )
        for name, cure in (
            ("pin_memory_device", "leave it out, because the memory"),
            ("seed", "use shuffle=Shuffle(seed=0)"),
            ("transform", "use decode="),
            ("world_size", "use shard=(rank, world size)"),
            ("retries", "use on_error="),
            ("shape", "fields=[((3, 224, 224), np.uint8)]"),
            ("check", "set AIOCUDA_CHECK=1"),
            ("num_threads", "use workers="),
            ("weights", "use sampler="),
            ("epochs", "each loop over the loader is an epoch"),
            ("devices", "a loader has one device"),
            ("driver", "open_device takes it, or sync_loader"),
        )
    },
    "sync_loader(driver='cpu')": (lambda at: OPEN(driver="cpu"), InvalidArgumentError, "simulated: use 'host'"),
    "open_device(driver='cuda:1')": (lambda at: OPEN(driver="cuda:1"), InvalidArgumentError, "simulated: use index=1"),
    "open_device(driver=None)": (
        lambda at: enter_async(OPEN(driver=None)),
        InvalidTypeError,
        "leave it out for 'auto'",
    ),
    "sampler=weights": (
        lambda at: with_batch(at, lambda batch: None, sampler=[0.1, 0.9]),
        InvalidTypeError,
        "not 0.1; WeightedRandomSampler(weights, n) of torch draws by weights",
    ),
    "a float image in a field of np.uint8": (
        lambda at: with_batch(at, dict, [np.full(2, 0.5, np.float32)], fields=[(2, np.uint8)]),
        ValueError,
        "such as 0.5, which its dtype uint8 does not hold: say float32 in fields=",
    ),
    "batch.free(), batch.keep()": (
        lambda at: with_batch(at, lambda batch: (batch.free(), batch.keep())),
        StaleHandleError,
        "is not valid any more, since it was freed: call batch.free() later",
    ),
    "with DataLoader()": (lambda at: enter(LOADER(at.device, [1])), InvalidTypeError, "is entered by `async with`"),
    "sync_loader(device=)": (
        lambda at: SYNC_LOADER([1], driver="host", device="cuda:0"),
        InvalidTypeError,
        "sync_loader has no parameter 'device': use index=, because sync_loader opens the device",
    ),
    "sync_loader(dataset=)": (
        lambda at: SYNC_LOADER(dataset=[1], driver="host"),
        InvalidTypeError,
        "sync_loader has no parameter 'dataset': it is called source",
    ),
    "sync_loader(dataset, 4)": (
        lambda at: SYNC_LOADER([1], 4, driver="host"),
        InvalidTypeError,
        "too many positional arguments: DataLoader(device, source, batch_size=64), or sync_loader(source, batch_",
    ),
    "DataLoader('images')": (
        lambda at: LOADER(at.device, "images"),
        InvalidTypeError,
        "for example sorted(Path('images').iterdir())",
    ),
    "DataLoader(Path)": (
        lambda at: LOADER(at.device, Path("images")),
        InvalidTypeError,
        "for example sorted(Path('images').iterdir())",
    ),
    "next(loader)": (
        lambda at: next(SYNC_LOADER([1], driver="host")),
        InvalidTypeError,
        "next(iter(loader)) is the fi",
    ),
    "loader.set_epoch()": (
        lambda at: SYNC_LOADER([1], driver="host").set_epoch(1),
        AttributeError,
        "loader.epoch(1) has the batches of epoch 1",
    ),
    "loader.dataset": (
        lambda at: LOADER(at.device, [1]).dataset,
        AttributeError,
        "the program has what it gave to the",
    ),
    "loader.batch_size": (
        lambda at: SYNC_LOADER([1], driver="host").batch_size,
        AttributeError,
        "the program has what it gave to the loader; len(loader) counts batches",
    ),
    "loader[0]": (lambda at: SYNC_LOADER([1], driver="host")[0], InvalidTypeError, "is no list: `for batch in loader`"),
    "DataLoader()[0]": (
        lambda at: LOADER(at.device, [1])[0],
        InvalidTypeError,
        "`await anext(aiter(loader))` for the first batch",
    ),
    "async with sync_loader()": (
        lambda at: enter_async(SYNC_LOADER([1], driver="host")),
        InvalidTypeError,
        "is entered by a plain `with`",
    ),
    "loader.epoch()": (lambda at: LOADER(at.device, [1]).epoch(), InvalidTypeError, "as in loader.epoch(0), is an"),
    "loader.stats": (lambda at: LOADER(at.device, [1]).stats, AttributeError, "loader.statistics() has the figures"),
    "loader.close()": (lambda at: LOADER(at.device, [1]).close(), AttributeError, "`await loader.aclose()`"),
    "sync_loader().shutdown()": (
        lambda at: SYNC_LOADER([1], driver="host").shutdown(),
        AttributeError,
        "loader.close() closes it",
    ),
    "merge_state_dicts(a, b)": (
        lambda at: LOADER.merge_state_dicts({}, {}),
        InvalidTypeError,
        "too many positional arguments: merge_state_dicts([first, second])",
    ),
    "Shuffle(buffer_size=)": (lambda at: SHUFFLE(buffer_size=9), InvalidTypeError, "'buffer_size': use window="),
    "shuffle.set_epoch()": (lambda at: SHUFFLE().set_epoch(1), AttributeError, "loader.epoch(1) has the batches"),
    "advice['workers']": (lambda at: ADVICE["workers"], InvalidTypeError, "has attributes: advice.workers"),
    "advice.num_workers": (lambda at: ADVICE.num_workers, AttributeError, "it is called workers"),
    "to_device(source)": (lambda at: TO_DEVICE([1]), InvalidTypeError, "'device': to_device(source, device) takes"),
    "to_device(device, source)": (
        lambda at: TO_DEVICE(at.device, [1]),
        InvalidTypeError,
        "to_device(source, device) t",
    ),
    "to_device(source, 'cuda')": (
        lambda at: TO_DEVICE([1], "cuda"),
        InvalidTypeError,
        "takes an aiocuda.Device, not 'cuda': `async with aiocuda.open_device() as device`",
    ),
    "to_device(prefetch=)": (lambda at: TO_DEVICE([1], at.device, prefetch=2), InvalidTypeError, "use depth="),
    "sync_to_device(source, 'cuda')": (
        lambda at: SYNC_TO_DEVICE([1], "cuda"),
        InvalidTypeError,
        "too many positional arguments: sync_to_device(source), or",
    ),
    "sync_to_device(device=)": (lambda at: SYNC_TO_DEVICE([1], device="cuda"), InvalidTypeError, "use index=, because"),
    "float(array)": (lambda at: float(ARRAY), InvalidTypeError, "compute with torch.from_dlpack(array)"),
    "array.item()": (lambda at: ARRAY.item(), AttributeError, "array.to_host() is NumPy's"),
    "aiocuda.TensorBatch": (lambda at: AIOCUDA.TensorBatch, AttributeError, "`from aiocuda.data import TensorBatch`"),
    "aiocuda.HostDriver": (
        lambda at: AIOCUDA.HostDriver,
        AttributeError,
        "`from aiocuda.driver.host import HostDriver`",
    ),
    "batch.images": (
        lambda at: with_batch(at, lambda batch: batch.images),
        AttributeError,
        "batch[field] is an array, by the name of the field",
    ),
    "tensors.stream": (lambda at: TENSORS.stream, AttributeError, "the stream of PyTorch that was current"),
    "batch['image']": (
        lambda at: with_batch(at, lambda batch: batch["image"]),
        KeyError,
        "the batch has no field 'image', only [0]",
    ),
    "tensors['image']": (lambda at: TensorBatch({0: 1})["image"], KeyError, "the batch has no field 'image', only [0]"),
    **{
        f"{name} {operation}": (compute, error, "`for (x,) in loader` unpacks")
        for operation, function, error in (
            ("+ 1", lambda batch: batch + 1, InvalidTypeError),
            (".shape", lambda batch: batch.shape, AttributeError),
            (".to()", lambda batch: batch.to("cuda"), AttributeError),
        )
        for name, compute in (
            ("batch", lambda at, function=function: with_batch(at, function)),
            ("tensors", lambda at, function=function: function(TensorBatch({0: 1}))),
        )
    },
    "open_device(1)": (lambda at: open_second(), InvalidArgumentError, "driver=HostDriver(devices=2) has more"),
}


def at_a_new_line(call: str, at: At | None = None) -> Any:
    """Evaluate a call. A warning is given once for each line of a program."""
    return eval(compile(call, f"/program/{time.monotonic_ns()}.py", "eval"), {**globals(), "at": at})


def quiet(opening: Any) -> Any:
    """Return what `open_device` returns, without its warning that it was never awaited."""
    opening._begun = True
    return opening
