"""Samples on threads that take too long."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from aiocuda import Device
from aiocuda.data import DataLoader
from tests.data.samples import FIELDS, write
from tests.helpers import LATCH

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


class Late:
    """Some samples wait for a gate, and then write."""

    def __init__(self, *late: int) -> None:
        self.late = late
        self.gate = threading.Event()
        self.returned: list[int] = []

    def __call__(self, sample: Any, out: Any) -> None:
        if sample in self.late:
            self.gate.wait(LATCH)
            out["x"][...] = -1
            out["y"][...] = -1
            self.returned.append(sample)
            return
        write(sample, out)


@pytest.mark.parametrize("workers", [0, 1, 3])
async def test_a_late_sample_raises_at_its_turn(device: Device, workers: int) -> None:
    decode = Late(5)
    try:
        async with DataLoader(
            device, range(9), fields=FIELDS, decode=decode, batch_size=2, workers=workers, timeout=0.05
        ) as loader:
            seen: list[int] = []
            with pytest.raises(TimeoutError, match=r"more than the timeout of 0\.05 s") as caught:
                async for batch in loader:
                    seen += batch.indices
                    if len(seen) == 4:
                        threading.Timer(0.2, decode.gate.set).start()  # the loader waits for it when it ends
            assert "at sample 5 of the loader's source" in caught.value.__notes__
            assert seen == [0, 1, 2, 3]
    finally:
        decode.gate.set()


@pytest.mark.parametrize("workers", [1, 2])
async def test_others_go_on_in_its_place(device: Device, workers: int) -> None:
    decode = Late(3)
    try:
        async with DataLoader(
            device, range(20), fields=FIELDS, decode=decode, batch_size=4, workers=workers, timeout=0.05,
            on_error="skip",
        ) as loader:  # fmt: skip
            seen: list[int] = []
            async for batch in loader:
                seen += batch.indices
                if batch.number == 3:
                    assert loader.statistics().set_aside == 1
            assert seen == [index for index in range(20) if index != 3]
            assert loader.statistics().skipped == 1
            decode.gate.set()
    finally:
        decode.gate.set()


async def test_a_late_function_writes_into_no_later_batch(device: Device) -> None:
    decode = Late(1)
    try:
        async with DataLoader(
            device, range(40), fields=FIELDS, decode=decode, batch_size=2, workers=1, timeout=0.05, on_error="skip",
            prefetch=1,
        ) as loader:  # fmt: skip
            async for batch in loader:
                if batch.number == 1:
                    decode.gate.set()  # it writes while the later batches are decoded
                x = await batch.stream.download(batch["x"])
                assert x[:, 0, 0].tolist() == list(batch.indices)
            assert decode.returned == [1]
    finally:
        decode.gate.set()


async def test_late_memory_is_another_range(device: Device) -> None:
    """The views that a late function has lie in no slot that is used later."""
    decode = Late(1)
    places: list[tuple[int, int]] = []

    def note(sample: Any, out: Any) -> None:
        places.append((sample, out["x"].__array_interface__["data"][0]))
        decode(sample, out)

    try:
        async with DataLoader(
            device, range(40), fields={"x": ((64,), np.int64), "y": ((), np.int64)}, decode=note, workers=1,
            timeout=0.05, on_error="skip", prefetch=2,
        ) as loader:  # fmt: skip
            async for _ in loader:
                pass
            late = dict(places)[1]
            assert all(place != late for sample, place in places if sample != 1)
            decode.gate.set()
    finally:
        decode.gate.set()


async def test_more_late_samples_than_workers_end_the_epoch(device: Device) -> None:
    decode = Late(*range(10))
    try:
        async with DataLoader(
            device, range(10), fields=FIELDS, decode=decode, workers=2, timeout=0.03, on_error="skip"
        ) as loader:
            threading.Timer(0.5, decode.gate.set).start()
            with pytest.raises(TimeoutError, match=r"3 samples of the loader exceeded the timeout.*executor='process'"):
                async for _ in loader:
                    pass
    finally:
        decode.gate.set()
