"""An operation that is passed where its result is meant: every method says that it must be awaited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, DeviceBuffer, InvalidTypeError, Operation, Stream
from tests.helpers import SAXPY
from tests.stream.methods import ARGUMENTS, World

pytestmark = pytest.mark.asyncio

VERBS: dict[str, Callable[[Stream, Any], object]] = {
    "launch a number": lambda stream, given: stream.launch(SAXPY, 1, 4, given, 1.0, stream.empty(4), stream.empty(4)),
    "empty_like": lambda stream, given: stream.empty_like(given),
    "as an array": lambda stream, given: np.asarray(given),
    "as a copy": lambda stream, given: np.array(given),
    "as a condition": lambda stream, given: not given,
    "its length": lambda stream, given: len(given),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
async def test_error_says_await_it_first(stream: Stream, verb: Callable[[Stream, Any], object]) -> None:
    operation: Operation[Any] = stream.upload(np.ones(4, np.float32))
    with pytest.raises(InvalidTypeError, match="await it first"):
        verb(stream, operation)
    await operation


async def test_error_of_each_method_says_await_it_first(device: Device, stream: Stream, other: Stream) -> None:
    world = await World.make(device, stream, other)
    operation: Operation[Any] = stream.upload(np.ones(4, np.float32))
    for name, arguments in ARGUMENTS.items():
        given = arguments(world)
        memory = [index for index, each in enumerate(given) if isinstance(each, (DeviceBuffer, np.ndarray))]
        for index in memory if name != "submit" else ():  # a function may take an operation
            with pytest.raises(InvalidTypeError, match="await it first"):
                getattr(stream, name)(*given[:index], operation, *given[index + 1 :])
    await operation


async def test_a_buffer_that_is_uploaded_is_to_be_copied(stream: Stream) -> None:
    buffer = await stream.upload(np.ones(4, np.float32))
    with pytest.raises(InvalidTypeError, match=r"on the device already.*stream\.copy\(target, buffer\)"):
        stream.upload(buffer)
