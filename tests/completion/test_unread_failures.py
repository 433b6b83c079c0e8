"""Failures that no caller reads: when they are reported, and the state of their streams until a caller reads them."""

from __future__ import annotations

import contextlib
import gc
import traceback

import numpy as np
import pytest

import aiocuda
from aiocuda import DriverError, SkippedError
from tests.helpers import SPIN, Reports, open_peer, quickly, turns, until

pytestmark = pytest.mark.asyncio


async def test_unread_failure_is_reported_while_its_stream_is_still_used() -> None:
    """A program that ignores its operations gets one report soon. Nothing runs on bytes that were never written."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        await stream.fill(buffer, 0)
        await device.load(SPIN)
        with Reports() as reports:
            peer.refuse("launch")
            stream.launch(SPIN, 1, 1, 0)
            await until(lambda: (gc.collect(), reports.contexts)[1], "the report")
            for _ in range(3):
                ended = stream.launch(SPIN, 1, 1, 0)
                await until(ended.done, "the skipped launch")
                assert ended.state == "failed"
                del ended
                gc.collect()
            assert [type(failure) for failure in reports.failures] == [DriverError]
            with pytest.raises(SkippedError) as caught:
                await quickly(stream.download(buffer))
            assert isinstance(caught.value.__cause__, DriverError)
            assert (await quickly(stream.download(buffer)) == 0).all()  # the failure was read
            assert len(reports.contexts) == 1


async def test_traceback_of_a_foreign_error_does_not_grow_with_each_reader() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        peer.refuse("fill", error=lambda: MemoryError("of another library"))
        failing = stream.fill(stream.empty(4), 1)
        frames: list[int] = []
        for _ in range(5):
            with pytest.raises(MemoryError) as caught:
                await failing
            frames.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert len(set(frames)) == 1


@pytest.mark.parametrize("waits", [False, True])
async def test_streams_that_are_left_together_report_no_withdrawn_work(waits: bool) -> None:
    """Work of one stream waits for work of the other one that is still on the host. The exception leaves both."""

    async def leave(device: aiocuda.Device) -> None:
        array = np.ones(64 << 20, np.uint8)
        async with device.stream() as stream, device.stream() as other:
            buffer = stream.empty(array.shape, array.dtype)
            upload = stream.copy(buffer, array)
            if waits:
                other.wait(upload)
                other.fill(buffer[:4], 7)
            raise ZeroDivisionError

    async with aiocuda.open_device(driver="host") as device:
        with Reports() as reports:
            with contextlib.suppress(ZeroDivisionError):  # `pytest.raises` would hold the operations by the traceback
                await leave(device)
            await until(lambda: not device.memory.statistics().live_bytes, "the free of the buffer")
            gc.collect()
            await turns()
        assert reports.contexts == []
