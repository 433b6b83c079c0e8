"""Common mistakes, many of them habits from other libraries: each gets an error that names the cure."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from aiocuda import Device, InvalidTypeError, Kernel, Stream

pytestmark = pytest.mark.asyncio

SOURCE = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }"
KERNEL: Any = Kernel("twice", source=SOURCE, host=lambda x: x.__imul__(2))


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
    "buffer.copy_to_host()": (lambda at: at.buffer.copy_to_host(), AttributeError, "`await stream.download(buffer)`"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_mistake_is_refused_with_its_cure(place: Place, mistake: str) -> None:
    make, error, cure = MISTAKES[mistake]
    with pytest.raises(error) as caught:
        make(place)
    assert type(caught.value) is error
    assert cure in str(caught.value)


async def test_wrong_names_do_not_exist_otherwise(place: Place) -> None:
    for thing, names in (
        (place.stream, ("sync", "query", "cuda_stream")),
        (place.device, ("synchronize", "upload")),
        (place.operation, ("cancel", "shape")),
        (place.event, ("query",)),
        (KERNEL, ("launch",)),
    ):
        for name in names:
            assert not hasattr(thing, name)
            assert not hasattr(type(thing), name)
            assert name not in dir(thing)
            assert getattr(thing, name, 7) == 7


async def test_kernel_keeps_its_signature() -> None:
    assert list(inspect.signature(Kernel).parameters) == [
        "name", "source", "host", "host_seconds", "include_dirs", "includes"
    ]  # fmt: skip


class Library:
    """An array of another library that computes with memory of aiocuda."""

    __cuda_array_interface__ = None

    def __radd__(self, other: object) -> str:
        return "computed"


async def test_other_array_libraries_still_compute_with_a_buffer(place: Place) -> None:
    assert place.buffer + Library() == "computed"


def mistakes_that_a_type_checker_reports(device: Device, stream: Stream, kernel: Kernel) -> None:
    """Never called. mypy warns of each comment that it does not need."""
    with device.stream():  # type: ignore[attr-defined]
        pass
    stream.sync()  # type: ignore[attr-defined]
    device.synchronize()  # type: ignore[attr-defined]
    kernel[1, 1]  # type: ignore[index]
    kernel(1)  # type: ignore[operator]
    stream.empty(4) + 1  # type: ignore[operator]
    stream.synchronize()[0]  # type: ignore[index]
    stream.synchronize().cancel()  # type: ignore[attr-defined]
