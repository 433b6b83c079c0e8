"""Updates: from the next launch on, and never of one that was enqueued before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocuda import (
    Device,
    InvalidArgumentError,
    InvalidTypeError,
    Stream,
    UnsupportedError,
)
from tests.graph.kit import N, affine
from tests.helpers import AFFINE, quickly

pytestmark = pytest.mark.asyncio


async def test_update_of_each_kind(device: Device, stream: Stream) -> None:
    first, second = stream.empty(N, np.uint32), stream.empty(2 * N, np.uint32)
    up, down = await device.pinned(N, np.uint32), await device.pinned(N, np.uint32)
    more, out = await device.pinned(N, np.uint32), await device.pinned(2 * N, np.uint32)
    up[:], more[:] = 1, 2
    await quickly(stream.fill(second, 0))
    async with stream.capture() as graph:
        upload = stream.copy(first, up)
        launch = stream.launch(AFFINE, 1, 32, first, N, 3, 1)
        copy = stream.copy(second[:N], first)
        fill = stream.fill(second[:1], 9)
        download = stream.download(second[:N], out=down)
    await quickly(graph.launch(stream))
    assert down.tolist() == [9] + [4] * (N - 1)
    graph.update(upload, first, more)
    graph.update(launch, first, N, 5, 2, grid=2, block=(16, 2))
    graph.update(copy, second[N:], first)
    graph.update(fill, second[N : N + 2], 8)
    graph.update(download, out, second)
    await quickly(graph.launch(stream))
    assert out.tolist() == [9] + [4] * (N - 1) + [8, 8] + [12] * (N - 2)
    assert down.tolist() == [9] + [4] * (N - 1)


async def test_update_that_cannot_be_is_refused_and_changes_nothing(device: Device, stream: Stream) -> None:
    buffer, pinned = stream.empty(N, np.uint32), await device.pinned(N, np.uint32)
    pinned[:] = 5
    async with stream.capture() as graph:
        upload = stream.copy(buffer, pinned)
        launch = affine(stream, buffer, 2, 1)
        fill = stream.fill(buffer[:1], 0x01020304)
        marker = stream.synchronize()
    with stream.capture() as other:
        stray = stream.fill(buffer, 1)
    refused: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((upload, pinned, buffer), InvalidArgumentError, "stays a upload, and this would be a download"),
        ((upload, buffer), InvalidTypeError, "a target and a source, 1 given"),
        ((upload, buffer, np.zeros(N, np.uint32)), UnsupportedError, "not pinned"),
        ((launch, buffer, N), InvalidTypeError, "takes 4 arguments"),
        ((fill, buffer[:1], 0), InvalidArgumentError, "build another graph"),  # one byte, repeated
        ((fill, buffer[:1], 2, 3), InvalidTypeError, "a buffer and a value, 3 given"),
        ((marker,), InvalidArgumentError, "only orders others"),
        ((stray, buffer, 2), InvalidArgumentError, "was not captured into"),
        ((stream.synchronize(), buffer, 2), InvalidArgumentError, "was not captured into"),
    ]
    for arguments, kind, words in refused:
        with pytest.raises(kind, match=words):
            graph.update(*arguments)
    await quickly(graph.launch(stream))
    result = await quickly(stream.download(buffer))
    assert result.tolist() == [0x01020304] + [11] * (N - 1)
    assert len(other) == 1


async def test_two_downloads_of_a_graph_do_not_write_one_array(device: Device, stream: Stream) -> None:
    buffer, target = stream.empty(N, np.uint32), await device.pinned(N, np.uint32)
    with stream.capture() as graph:
        stream.download(buffer[:32], out=target[:32])
        with pytest.raises(InvalidArgumentError, match="step 0 of this graph writes this array"):
            stream.download(buffer, out=target)
        second = stream.download(buffer[32:], out=target[32:])
    with pytest.raises(InvalidArgumentError, match="step 0 of this graph writes this array"):
        graph.update(second, target[31:63], buffer[32:])
    graph.update(second, target[32:], buffer[:32])
