"""Common mistakes, many of them habits from other libraries: each gets an error that names the cure."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    Device,
    Graph,
    InvalidArgumentError,
    InvalidTypeError,
    Kernel,
    Stream,
    StreamBarrier,
    StreamPool,
    UnsupportedError,
)
from aiocuda.data import DataLoader, sync_loader
from aiocuda.serving import DeadlineError, MicroBatcher

pytestmark = pytest.mark.asyncio

SOURCE = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }"
KERNEL: Any = Kernel("twice", source=SOURCE, host=lambda x: x.__imul__(2))
TEMPLATE = "template <class T> __global__ void k(T* x) {}"
STRUCTURE = "struct S { int a; }; __global__ void k(S s) {}"
POINTER = "struct S { int a; }; __global__ void k(const S* s) {}"

AIOCUDA: Any = aiocuda  # untyped, because a type checker refuses the names


@dataclasses.dataclass
class Place:
    """The objects for the mistakes. Untyped, because a type checker refuses them."""

    device: Any
    stream: Any
    buffer: Any
    operation: Any
    event: Any


@pytest_asyncio.fixture
async def place(device: Device, stream: Stream) -> Place:
    operation = stream.synchronize()
    return Place(device, stream, stream.empty(4), operation, stream.record())


def enter(stream: Any) -> None:
    with stream:
        raise AssertionError("a stream is no synchronous context manager")


def iterate(operation: Any) -> Iterator[Any]:
    return next(iter(operation))


def kernel(name: str = "twice", source: Any = SOURCE, **options: Any) -> Kernel:
    return Kernel(name, source=source, **options)


def launch(at: Place, **options: Any) -> object:
    return at.stream.launch(KERNEL, 1, 1, at.buffer, **options)


def loader(at: Place, **options: Any) -> object:
    return DataLoader(at.device, [1, 2, 3], **options)


def synchronous(**options: Any) -> object:
    with sync_loader([1, 2, 3], driver="host", **options) as batches:
        return batches


async def task_of_a_node(at: Place) -> object:
    coordinator: Any
    async with AsyncCoordinator(at.device) as coordinator:
        return asyncio.create_task(coordinator.compute(KERNEL, 1, 1, at.buffer))


async def cancel_a_node(at: Place) -> object:
    coordinator: Any
    async with AsyncCoordinator(at.device) as coordinator:
        return coordinator.compute(KERNEL, 1, 1, at.buffer).cancel()


async def completed(*things: Any) -> list[object]:
    return [thing async for thing in aiocuda.as_completed(*things)]


async def too_few_streams(at: Place) -> object:
    async with StreamPool(at.device, maximum=1) as pool, pool.stream():
        return await pool.any_ready(timeout=0.001)


async def submit(**options: Any) -> object:
    async def infer(batch: Any) -> Any:
        return batch.items

    async with MicroBatcher(infer, max_batch_size=4) as batcher:
        return await batcher.submit(1, **options)


#: (the mistake, the class of the error, words of the cure)
MISTAKES: dict[str, tuple[Callable[[Place], object], type[Exception], str]] = {
    "with device.stream()": (lambda at: enter(at.stream), InvalidTypeError, "`async with device.stream() as stream`"),
    "buffer + 1": (lambda at: at.buffer + 1, InvalidTypeError, "`await stream.download(buffer)`"),
    "2.0 * buffer": (lambda at: 2.0 * at.buffer, InvalidTypeError, "launch a kernel"),
    "buffer + buffer": (lambda at: at.buffer + at.buffer, InvalidTypeError, "launch a kernel"),
    "buffer @ array": (lambda at: at.buffer @ np.ones(4), InvalidTypeError, "`await stream.download(buffer)`"),
    "buffer < 1": (lambda at: at.buffer < 1, InvalidTypeError, "`await stream.download(buffer)`"),
    "kernel[1, 1](x)": (lambda at: KERNEL[1, 1](at.buffer), InvalidTypeError, "stream.launch(kernel, grid, block, "),
    "kernel(x)": (lambda at: KERNEL(at.buffer), InvalidTypeError, "stream.launch(kernel, grid, block, *arguments)"),
    "kernel.launch(x)": (lambda at: KERNEL.launch(at.buffer), AttributeError, "stream.launch(kernel, grid, block, "),
    "Kernel('k', SRC)": (lambda at: Kernel("twice", SOURCE), InvalidTypeError, "Kernel(name, source=source"),  # type: ignore[call-arg]
    "stream.sync()": (lambda at: at.stream.sync(), AttributeError, "`await stream.synchronize()`"),
    "stream.wait_stream(s)": (lambda at: at.stream.wait_stream(at.stream), AttributeError, "stream.wait(other)"),
    "stream.query()": (lambda at: at.stream.query(), AttributeError, "stream.tail is None"),
    "stream.cuda_stream": (lambda at: at.stream.cuda_stream, AttributeError, "`async with stream.lend() as handle`"),
    "stream.close()": (lambda at: at.stream.close(), AttributeError, "`await stream.aclose()`"),
    "device.synchronize()": (lambda at: at.device.synchronize(), AttributeError, "`await device.drain()`"),
    "device.upload(x)": (lambda at: at.device.upload(np.ones(4)), AttributeError, "`await stream.upload(array)`"),
    "device.empty(4)": (lambda at: at.device.empty(4), AttributeError, "stream.empty(shape, dtype)"),
    "operation[0]": (lambda at: at.operation[0], InvalidTypeError, "await it first, and use its result"),
    "operation + 1": (lambda at: at.operation + 1, InvalidTypeError, "await it first, and use its result"),
    "1 + operation": (lambda at: 1 + at.operation, InvalidTypeError, "await it first, and use its result"),
    "len(operation)": (lambda at: len(at.operation), InvalidTypeError, "await it first"),
    "for x in operation": (lambda at: iterate(at.operation), InvalidTypeError, "await it first, and use its result"),
    "operation.shape": (lambda at: at.operation.shape, AttributeError, "await it first, and use its result"),
    "operation.cancel()": (lambda at: at.operation.cancel(), AttributeError, "operation.abandon()"),
    "operation.get()": (lambda at: at.operation.get(), AttributeError, "`await operation`"),
    "event.synchronize()": (lambda at: at.event.synchronize(), AttributeError, "`await event`"),
    "event.elapsed_time(e)": (lambda at: at.event.elapsed_time(at.event), AttributeError, "start.elapsed_ms(end)"),
    "Kernel(ptx=)": (lambda at: kernel(ptx=".version"), InvalidTypeError, "Kernel.from_object_code(code, name,"),
    "Kernel(cubin=)": (lambda at: kernel(cubin=b"x"), InvalidTypeError, "Kernel.from_object_code(code, name,"),
    "Kernel(options=)": (
        lambda at: kernel(options=["-O3"]),
        InvalidArgumentError,
        "there are -ftz= ",
    ),
    "Kernel(code=)": (lambda at: kernel(code=SOURCE), InvalidTypeError, "it is called source"),
    "Kernel(gird=)": (
        lambda at: kernel(gird=1),
        InvalidTypeError,
        "no parameter 'gird': Kernel takes a name, source=,",
    ),
    "source='kernels.cu'": (
        lambda at: kernel(source="kernels.cu"),
        InvalidArgumentError,
        "Path('kernels.cu').read_text()",
    ),
    "source=ptx": (
        lambda at: kernel(source="//\n.version 8.0\n.target sm_90"),
        InvalidArgumentError,
        "source is PTX, which is compiled already: Kernel.from_object_code(code,",
    ),
    "source=b'my/k.cuh'": (lambda at: kernel(source=b"my/k.cuh"), InvalidArgumentError, "Path('my/k.cuh').read_text()"),
    "source=Path(…)": (lambda at: kernel(source=Path("k.cu")), InvalidTypeError, "source=path.read_text()"),
    "template": (
        lambda at: kernel("k", TEMPLATE),
        UnsupportedError,
        "Kernel('k<float>', source=source, parameters='float* x",
    ),
    "Kernel('k<float>')": (
        lambda at: kernel("k<float>", TEMPLATE),
        InvalidArgumentError,
        "pass it, as in parameters='float* x, int n'",
    ),
    "structure": (lambda at: kernel("k", STRUCTURE), UnsupportedError, "declare `const S*`, and pass a buffer"),
    "pointer to a structure": (
        lambda at: at.stream.launch(kernel("k", POINTER), 1, 1, at.buffer),
        InvalidTypeError,
        "use a structured dtype, np.dtype([('x', ",
    ),
    "launch(cooperative=)": (lambda at: launch(at, cooperative=True), InvalidTypeError, "two launches of one stream"),
    "launch(cluster=)": (lambda at: launch(at, cluster=2), InvalidTypeError, "`__cluster_dims__(x, y, z)`"),
    "launch(shared_mem=)": (lambda at: launch(at, shared_mem=64), InvalidTypeError, "it is called shared_bytes"),
    "launch(stream=)": (
        lambda at: launch(at, stream=at.stream),
        InvalidTypeError,
        "stream.launch(kernel, grid, block,",
    ),
    "launch(x=)": (
        lambda at: launch(at, x=1),
        InvalidTypeError,
        "Stream.launch has no parameter 'x': launch takes gri",
    ),
    "device.event()": (lambda at: at.device.event(), AttributeError, "stream.record() returns an event"),
    "aiocuda.DataLoader": (lambda at: AIOCUDA.DataLoader, AttributeError, "`from aiocuda.data import DataLoader`"),
    "aiocuda.MicroBatcher": (lambda at: AIOCUDA.MicroBatcher, AttributeError, "`from aiocuda.serving import MicroBat"),
    "aiocuda.torch": (lambda at: AIOCUDA.torch, AttributeError, "`from aiocuda.integrations import torch`"),
    "DataLoader(num_workers=)": (
        lambda at: loader(at, num_workers=2),
        InvalidTypeError,
        "'num_workers': use workers=;",
    ),
    "DataLoader(pin_memory=)": (lambda at: loader(at, pin_memory=True), InvalidTypeError, "batches is always pinned"),
    "DataLoader(collate_fn=)": (lambda at: loader(at, collate_fn=list), InvalidTypeError, "use collate=; or fields="),
    "DataLoader(size=)": (
        lambda at: loader(at, size=2),
        InvalidTypeError,
        "'size': help(aiocuda.data.DataLoader) lists",
    ),
    "DataLoader(drop_last='yes')": (
        lambda at: loader(at, drop_last="yes"),
        InvalidTypeError,
        "True or False, not 'yes'",
    ),
    "create_task(operation)": (
        lambda at: asyncio.create_task(at.stream.fill(at.buffer, 0)),
        TypeError,
        "; coroutine: .wait()>",
    ),
    "create_task(event)": (lambda at: asyncio.create_task(at.stream.record()), TypeError, "; coroutine: .wait()>"),
    "create_task(gathering)": (
        lambda at: asyncio.create_task(AIOCUDA.gather(at.stream.fill(at.buffer, 0))),
        TypeError,
        "; coroutine: .wait()>",
    ),
    "event.cancel()": (lambda at: at.event.cancel(), AttributeError, "Cancel the task that awaits it"),
    "node.cancel()": (cancel_a_node, AttributeError, "node.abandon()"),
    "gathering.cancel()": (
        lambda at: AIOCUDA.gather(at.operation).cancel(),
        AttributeError,
        "operation.abandon()",
    ),
    "as_completed(operation)": (lambda at: completed(at.operation), InvalidTypeError, "put it into a list"),
    "as_completed(*operations)": (lambda at: completed(at.operation, at.event), TypeError, "2 were given"),
    "create_task(node)": (task_of_a_node, TypeError, "; coroutine: .wait()>"),
    "submit(deadline_s=-1)": (
        lambda at: submit(deadline_s=-1),
        DeadlineError,
        "the deadline had passed 1 s before the call",
    ),
    "any_ready(timeout=)": (too_few_streams, TimeoutError, "had no idle stream within the timeout of 0.001 s"),
    "barrier.wait(timeout=)": (
        lambda at: StreamBarrier(2).wait(at.stream, timeout=0.001),
        TimeoutError,
        "timeout of 0.001 s: not all 2 parties",
    ),
    "buffer.copy_to_host()": (lambda at: at.buffer.copy_to_host(), AttributeError, "`await stream.download(buffer)`"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_mistake_is_refused_with_its_cure(place: Place, mistake: str) -> None:
    make, error, cure = MISTAKES[mistake]
    with pytest.raises(error) as caught:
        result = make(place)
        if inspect.iscoroutine(result):
            await result
    assert type(caught.value) is error
    assert cure in str(caught.value)


@pytest.mark.parametrize("name", AIOCUDA._ELSEWHERE)
async def test_name_is_where_the_error_says(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        AIOCUDA.__getattr__(name)  # the tests have imported the subpackages
    found = re.search(r"`from (\S+) import (\w+)`", str(caught.value))
    assert found is not None
    module = importlib.import_module(found[1])
    if importlib.util.find_spec(f"{found[1]}.{name}") is None:  # those of integrations need other libraries
        assert getattr(module, name)


@pytest.mark.slow
async def test_loader_of_a_thread_refuses_the_names_of_torch() -> None:
    with pytest.raises(InvalidTypeError, match="sync_loader has no parameter 'num_workers': use workers="):
        await asyncio.to_thread(synchronous, num_workers=2)


async def test_wrong_names_do_not_exist_otherwise(place: Place) -> None:
    for thing, names in (
        (place.stream, ("sync", "query", "cuda_stream")),
        (place.device, ("synchronize", "upload", "event")),
        (place.operation, ("cancel", "shape")),
        (place.event, ("query", "cancel")),
        (AIOCUDA.gather(place.operation), ("cancel",)),
        (KERNEL, ("launch",)),
    ):
        for name in names:
            assert not hasattr(thing, name)
            assert not hasattr(type(thing), name)
            assert name not in dir(thing)
            assert getattr(thing, name, 7) == 7


async def test_kernel_keeps_its_signature() -> None:
    assert list(inspect.signature(Kernel).parameters) == [
        "name", "source", "host", "host_seconds", "include_dirs", "includes", "options", "parameters"
    ]  # fmt: skip
    assert list(inspect.signature(DataLoader).parameters)[:5] == ["device", "source", "fields", "decode", "batch_size"]


class Library:
    """An array of another library that computes with memory of aiocuda."""

    __cuda_array_interface__ = None

    def __radd__(self, other: object) -> str:
        return "computed"


async def test_other_array_libraries_still_compute_with_a_buffer(place: Place) -> None:
    assert place.buffer + Library() == "computed"


def mistakes_that_a_type_checker_reports(
    device: Device, stream: Stream, kernel: Kernel, graph: Graph, batcher: MicroBatcher[int, int]
) -> None:
    """Never called. mypy warns of each comment that it does not need."""
    with device.stream():  # type: ignore[attr-defined]
        pass
    stream.sync()  # type: ignore[attr-defined]
    device.synchronize()  # type: ignore[attr-defined]
    kernel[1, 1]  # type: ignore[index]
    kernel(1)  # type: ignore[operator]
    stream.empty(4) + 1  # type: ignore[operator]
    stream.launch(kernel, 1, 1, cooperative=True)  # type: ignore[call-overload]
    Kernel("k", source="", ptx="")  # type: ignore[call-arg]
    DataLoader(device, [], num_workers=2)  # type: ignore[call-overload]
    device.event()  # type: ignore[attr-defined]
    stream.synchronize()[0]  # type: ignore[index]
    stream.synchronize().cancel()  # type: ignore[attr-defined]
    graph.launch()  # type: ignore[call-arg]
    graph()  # type: ignore[operator]
    batcher.submit_nowait(1, 0.5)  # type: ignore[arg-type]
    batcher.submit_nowait(1, timeout=0.5)  # type: ignore[arg-type]
