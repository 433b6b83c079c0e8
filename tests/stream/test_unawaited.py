"""An operation that is passed where its result is meant: every method says that it must be awaited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import InvalidTypeError, Operation, Stream
from tests.helpers import SAXPY

pytestmark = pytest.mark.asyncio

VERBS: dict[str, Callable[[Stream, Any], object]] = {
    "launch": lambda stream, given: stream.launch(SAXPY, 1, 4, 4, 1.0, given, given),
    "launch a number": lambda stream, given: stream.launch(SAXPY, 1, 4, given, 1.0, stream.empty(4), stream.empty(4)),
    "download": lambda stream, given: stream.download(given),
    "download out": lambda stream, given: stream.download(stream.empty(4), out=given),
    "fill": lambda stream, given: stream.fill(given, 1),
    "prefetch": lambda stream, given: stream.prefetch(given),
    "copy to": lambda stream, given: stream.copy(given, np.zeros(4, np.float32)),
    "copy from": lambda stream, given: stream.copy(stream.empty(4), given),
    "upload": lambda stream, given: stream.upload(given),
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


async def test_a_buffer_that_is_uploaded_is_to_be_copied(stream: Stream) -> None:
    buffer = await stream.upload(np.ones(4, np.float32))
    with pytest.raises(InvalidTypeError, match=r"on the device already.*stream\.copy\(target, buffer\)"):
        stream.upload(buffer)
