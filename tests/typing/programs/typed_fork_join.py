"""Fork and join: work on several streams, and one await for all of it."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda import DeviceBuffer

Array = npt.NDArray[Any]


async def fork(device: aiocuda.Device, x: Array) -> Array:
    async with device.stream() as left, device.stream() as right:
        source = await left.upload(x)
        up, down, fill = right.upload(x), left.download(source), right.fill(right.empty(4), 0)
        assert_type(await aiocuda.gather(up), list[DeviceBuffer])
        assert_type(await aiocuda.gather(down, left.download(source)), list[Array])

        results = await aiocuda.gather(up, down)
        assert_type(results, list[DeviceBuffer | Array])
        assert isinstance(results, list)
        buffer, array = results
        assert_type(buffer, DeviceBuffer | Array)
        assert array is assert_type(down.result(), Array)  # its own type

        event = right.record()
        assert_type(await aiocuda.gather(up, down, fill), list[DeviceBuffer | Array | None])
        assert_type(await aiocuda.gather(fill, event, fill, event), list[None])
        assert_type(await aiocuda.gather(up, event, fill, event, fill), list[DeviceBuffer | None])
        assert_type(await aiocuda.gather(down, event, fill, event, fill, fill), list[Array | None])
        assert_type(await aiocuda.gather(fill, event, fill, fill, fill, fill, event, fill), list[None])
        return array if isinstance(array, np.ndarray) else x[:0]


async def failures(stream: aiocuda.Stream, x: Array) -> None:
    up, fill = stream.upload(x), stream.fill(stream.empty(4), 0)
    assert_type(await aiocuda.gather(up, return_exceptions=True), list[DeviceBuffer | BaseException])
    found = await aiocuda.gather(up, fill, return_exceptions=True)
    assert_type(found, list[DeviceBuffer | BaseException | None])
    down = stream.download(await up)
    every = await aiocuda.gather(up, fill, down, fill, fill, fill, return_exceptions=True)
    assert_type(every, list[DeviceBuffer | Array | BaseException | None])


async def join(stream: aiocuda.Stream, x: Array) -> list[Array]:
    downloads = [stream.download(await stream.upload(x)) for _ in range(10)]
    gathering = aiocuda.gather(*downloads)
    assert_type(await gathering, list[Array])
    assert_type(gathering.result(), list[Array])
    assert_type(await aiocuda.gather(*downloads, return_exceptions=True), list[Array | BaseException])
    assert_type(await aiocuda.gather(stream.synchronize(), aiocuda.gather(*downloads)), list[list[Array] | None])
    assert_type(await aiocuda.gather(), list[Any])
    return await gathering


async def main() -> None:
    x = np.arange(12)
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        np.testing.assert_array_equal(await fork(device, x), x)
        await failures(stream, x)
        assert all((each == x).all() for each in await join(stream, x))
