"""Failures that nobody reads: when the loop is told, and what becomes of the stream meanwhile."""

from __future__ import annotations

import gc
import traceback

import pytest

from aiocuda import DriverError, SkippedError
from tests.helpers import SPIN, Reports, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def test_stream_that_lives_on_does_not_keep_it_from_being_reported() -> None:
    """A program that fires and forgets hears of it at once, and once; and nothing runs on what was never written."""
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
                await until(ended.done, "its turn")
                assert ended.state == "failed"
                del ended
                gc.collect()
            assert [type(failure) for failure in reports.failures] == [DriverError]
            with pytest.raises(SkippedError) as caught:
                await quickly(stream.download(buffer))
            assert isinstance(caught.value.__cause__, DriverError)
            assert (await quickly(stream.download(buffer)) == 0).all()  # it has been delivered
            assert len(reports.contexts) == 1


async def test_errors_of_others_do_not_grow_from_one_reader_to_the_next() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        peer.refuse("fill", error=lambda: MemoryError("of somebody else"))
        failing = stream.fill(stream.empty(4), 1)
        frames: list[int] = []
        for _ in range(5):
            with pytest.raises(MemoryError) as caught:
                await failing
            frames.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert len(set(frames)) == 1
