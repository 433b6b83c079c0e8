"""`Ring` and its one object for everything unusual: `Ring.rare`."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import aiocuda
from aiocuda import Kernel, open_device
from aiocuda._core import Ring
from aiocuda.completion._stream_queue import StreamQueue
from tests.helpers import open_peer, quickly

CORE = Path(aiocuda.__file__).parent / "_core"

NOP = Kernel("nop", source='extern "C" __global__ void nop(float *x) {}', host=lambda x: None)


def asked_by(*files: Path) -> set[str]:
    """The members of `Ring.rare` that these files use."""
    return {name for file in files for name in re.findall(r"\.rare\.(\w+)", file.read_text("utf-8"))}


def test_the_ring_asks_at_most_16_methods_for_what_is_unusual() -> None:
    asked = asked_by(*(file for file in CORE.glob("*.py") if file.name != "_stream_operation.py"))
    assert 0 < len(asked) <= 16
    assert [name for name in asked if not callable(getattr(StreamQueue, name, None))] == []
    assert asked_by(CORE / "_stream_operation.py") == {"reports", "settle_operation", "size_of", "stream", "unseen"}


def test_nothing_inherits_from_a_ring() -> None:
    assert Ring.__subclasses__() == []


@pytest.mark.asyncio
async def test_a_closed_stream_is_freed_without_the_collector() -> None:
    async with open_device(driver="host") as device:
        stream = device.stream()
        buffer = await stream.upload(np.zeros(64, np.float32))
        for _ in range(3):
            operation = stream.launch(NOP, 1, 1, buffer)
            await operation
        buffer.free()
        await stream.aclose()
        gone: list[weakref.ref[object]] = [weakref.ref(stream), weakref.ref(stream._queue)]
        gc.collect()
        gc.disable()
        try:
            assert operation.stream_name
            assert operation.result() is None  # although the stream has ended
            del stream, buffer, operation
            assert [each() for each in gone] == [None, None]
        finally:
            gc.enable()


class Cycle:
    """Holds itself and a stream, which it uses when the collector deletes both."""

    def __init__(self, stream: aiocuda.Stream, use: Callable[[aiocuda.Stream], object]) -> None:
        self._itself = self
        self._stream = stream
        self._use = use
        self.raised: list[BaseException] = []

    def __del__(self) -> None:
        try:
            self._use(self._stream)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.raised.append(error)


@pytest.mark.asyncio
async def test_a_finaliser_that_the_collector_calls_finds_the_stream_closed() -> None:
    """The collector clears weak references, such as that to the ring, before it calls finalisers."""
    uses: list[Callable[[aiocuda.Stream], object]] = [
        lambda stream: stream.empty(4),
        lambda stream: stream.synchronize(),
        lambda stream: stream.submit(print),
        lambda stream: stream.record_memory(1),
        lambda stream: stream.device.memory.free_all(stream),
    ]
    async with open_device(driver="host") as device:
        for use in uses:
            stream = device.stream(name="gone")
            await stream.aclose()
            raised, queue = Cycle(stream, use).raised, weakref.ref(stream._queue)
            del stream
            gc.collect()
            assert queue() is None
            with pytest.raises(aiocuda.ClosedError, match="stream 'gone' has been closed"):
                raise raised.pop()


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["launch", "event_record"])
async def test_ctrl_c_in_a_repeated_call_is_raised_as_itself(verb: str) -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = await stream.upload(np.zeros(64, np.float32))
        await stream.launch(NOP, 1, 1, buffer)
        peer.refuse(verb, error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            stream.launch(NOP, 1, 1, buffer)
        if verb == "launch":  # the stream may have accepted it or not: later operations are skipped, once
            with pytest.raises(aiocuda.SkippedError):
                await quickly(stream.synchronize())
        await quickly(stream.synchronize())
