"""What both sides of a copy must have in common, and the message of a copy that is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from aiocuda import InvalidArgumentError, InvalidTypeError, Stream

pytestmark = pytest.mark.asyncio


async def test_shapes_of_one_size_differ(stream: Stream) -> None:
    buffer = stream.empty((4, 3))
    verbs: list[Callable[[], object]] = [
        lambda: stream.copy(buffer, np.zeros((3, 4), np.float32)),
        lambda: stream.copy(np.zeros((3, 4), np.float32), buffer),
        lambda: stream.download(buffer, out=np.zeros((3, 4), np.float32)),
        lambda: stream.copy(buffer, stream.empty((3, 4))),
    ]
    for verb in verbs:
        with pytest.raises(InvalidArgumentError, match=r"\(4, 3\) and \(3, 4\) .*buffer\.reshape\(\(3, 4\)\)"):
            verb()
    with pytest.raises(InvalidArgumentError, match="shapes differ"):
        stream.copy(buffer, np.zeros(12, np.float32))
    assert await stream.copy(buffer.reshape((3, 4)), np.zeros((3, 4), np.float32)) is None


async def test_what_has_no_shape_to_lose(stream: Stream) -> None:
    array = np.arange(12, dtype=np.float32)
    buffer = stream.empty((4, 3))
    assert await stream.copy(buffer, array.tobytes()) is None  # bytes are bytes
    assert (await stream.download(buffer) == array.reshape(4, 3)).all()
    raw = np.zeros(48, np.uint8)
    assert await stream.download(buffer, out=raw) is raw
    assert (raw.view(np.float32) == array).all()
    one = stream.empty((1, 1))
    assert await stream.copy(one, np.float32(3)) is None
    assert await stream.download(one, out=np.zeros((), np.float32)) == 3
    assert await stream.copy(stream.empty((0, 3)), np.zeros((3, 0), np.float32)) is None


async def test_the_dtype_comes_first(stream: Stream) -> None:
    buffer = stream.empty(3)
    verbs: list[Callable[[], object]] = [
        lambda: stream.copy(buffer, np.zeros(3)),
        lambda: stream.download(buffer, out=np.zeros(3)),
        lambda: stream.copy(np.zeros(3), buffer),
    ]
    for verb in verbs:
        with pytest.raises(
            InvalidTypeError, match=r"float32.*float64.*12 bytes are not 24.*a\.astype\('float32'\).*dtype="
        ):
            verb()


async def test_error_of_freed_memory_describes_it(stream: Stream) -> None:
    buffer = await stream.upload(np.zeros((2, 3), np.float32))
    buffer.free()
    with pytest.raises(RuntimeError, match=r"of shape \(2, 3\) float32 at 0x.* has been freed: allocate another one"):
        stream.fill(buffer, 1)
