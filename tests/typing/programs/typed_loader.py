"""A data loader, with fields of names and without, asynchronous and not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda.data import Batch, DataLoader, LoaderStats, Shuffle, sync_loader

SHAPE = (3, 4)


def decode(number: int, out: Mapping[str, npt.NDArray[Any]]) -> None:
    out["image"][...] = number
    out["label"][...] = number % 10


async def load(device: aiocuda.Device) -> list[int]:
    labels: list[int] = []
    async with DataLoader(
        device, range(20), fields={"image": (SHAPE, np.uint8), "label": ((), np.int64)}, decode=decode, batch_size=8,
        workers=2, shuffle=Shuffle(seed=0),
    ) as loader:  # fmt: skip
        assert_type(loader, DataLoader)
        async for batch in loader:
            assert_type(batch, Batch)
            assert_type(batch["image"], aiocuda.DeviceBuffer)
            assert_type(batch.indices, tuple[int, ...])
            assert_type(batch.stream, aiocuda.Stream)
            labels += (await batch.stream.download(batch["label"])).tolist()
        assert_type(len(loader), int)
        assert_type(loader.statistics(), LoaderStats)
        loader.load_state_dict(loader.state_dict())
    return labels


def load_without_a_loop() -> int:
    with sync_loader(np.arange(12, dtype=np.float32).reshape(6, 2), driver="host", batch_size=4) as loader:
        return sum(len(batch.indices) for batch in loader)


async def main() -> None:
    async with aiocuda.open_device(driver="host") as device:
        assert await asyncio.to_thread(load_without_a_loop) == 6
        assert sorted(await load(device)) == sorted(number % 10 for number in range(20))
