"""Samples that take long to decode are reported, once, with their index."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from aiocuda import Device
from aiocuda.data import DataLoader, _slow_samples
from tests.data.samples import FIELDS, write
from tests.helpers import LATCH, until

pytestmark = pytest.mark.asyncio

SECONDS = 0.2


class WaitsFor:
    """Waits at sample 5 until there is a file, also in another process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, sample: Any, out: Any) -> None:
        if sample == 5:
            with self.file.open() as pipe:  # blocks until the test opens the other end
                pipe.read()
        write(sample, out)


def indices(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record.msg["index"] for record in caplog.records if "sample_slow" in record.getMessage()]  # type: ignore[index]


@pytest.mark.parametrize(
    "options", [{"workers": 2}, {"workers": 2, "executor": "process"}], ids=["threads", "processes"]
)
async def test_a_slow_sample_is_reported_once(
    device: Device, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(_slow_samples, "SLOW_SECONDS", SECONDS)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with caplog.at_level(logging.WARNING, "aiocuda"):
        async with DataLoader(
            device, range(12), fields=FIELDS, decode=WaitsFor(pipe), batch_size=4, **options
        ) as loader:
            await anext(batches := aiter(loader))
            rest = asyncio.ensure_future(anext(batches))
            await until(lambda: indices(caplog), "the event")
            looked = loader._resources.slow.look  # type: ignore[union-attr]
            for _ in range(4):
                looked()
            await asyncio.to_thread(pipe.write_text, "go")
            assert (await rest).indices == (4, 5, 6, 7)
    assert indices(caplog) == [5]


async def test_a_timeout_ends_slow_samples_and_quick_ones_need_no_timer(device: Device) -> None:
    gate = threading.Event()

    def waits(sample: Any, out: Any) -> None:
        assert gate.wait(LATCH)
        write(sample, out)

    async with DataLoader(device, range(2), fields=FIELDS, decode=write, timeout=LATCH) as loader:
        assert loader._resources is not None
        assert loader._resources.slow is None
    async with DataLoader(device, range(2), fields=FIELDS, decode=waits) as loader:
        first = asyncio.ensure_future(anext(aiter(loader)))
        assert loader._resources is not None
        slow = loader._resources.slow
        assert slow is not None
        await until(slow._running, "a sample")
        gate.set()
        await first
        await until(lambda: not slow._running(), "the end of the samples")
        assert slow._timer is not None
        slow._timer.cancel()
        slow.look()
        assert slow._timer is None
