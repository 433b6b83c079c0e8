"""Random allocations, uses and frees over several streams, against a shadow copy with what must be where.

Each live buffer is full of one tag. Kernels write it and count what differs from it, on the device, so that one helper
serves every driver: with memory that aliases, a free that comes too early or an edge that is missing, a count is not 0.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda import Device, DeviceBuffer, Kernel, Operation, Stream
from aiocuda.device._resources import resources_of
from aiocuda.memory import MemoryResource, SizeClassResource

_SOURCE = """
extern "C" __global__ void write_tag(unsigned int *data, unsigned int count, unsigned int tag)
{
    for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        data[i] = tag;
}
extern "C" __global__ void count_others(const unsigned int *data, unsigned int count, unsigned int tag,
                                        unsigned int *others)
{
    for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        if (data[i] != tag)
            atomicAdd(others, 1u);
}
"""

_Words = npt.NDArray[np.uint32]


def _write_tag(data: _Words, count: int, tag: int) -> None:
    data[:count] = tag


def _count_others(data: _Words, count: int, tag: int, others: _Words) -> None:
    others[0] += np.count_nonzero(data[:count] != tag)


WRITE = Kernel("write_tag", source=_SOURCE, host=_write_tag)
COUNT = Kernel("count_others", source=_SOURCE, host=_count_others)

#: Words of a buffer: few sizes, so that memory is used again; 70 000 bytes and more are staged by threads.
SIZES = (1, 63, 64, 65, 500, 1000, 4000, 20_000)

#: The kinds of actions, with weights.
STEPS = {"make": 28, "free": 20, "drop": 6, "write": 16, "count": 16, "copy": 8, "download": 3, "upload": 2, "turn": 4}


@dataclasses.dataclass(eq=False)
class Entry:
    """A live buffer, and the operation that its next use must wait for."""

    buffer: DeviceBuffer
    tag: int
    writer: Operation[Any]
    readers: list[Operation[Any]]


class Shadow:
    """``operations`` random steps; how many words were found wrong."""

    def __init__(self, device: Device, seed: int, streams: int = 8, most_live: int = 48) -> None:
        self.device = device
        self.seed = seed
        self.chance = random.Random(seed)
        self.streams = [device.stream() for _ in range(streams)]
        self.most_live = most_live
        self.live: list[Entry] = []
        self.downloads: list[tuple[Operation[npt.NDArray[Any]], int]] = []
        self.wrong = 0
        self.tags = 0

    async def run(self, operations: int) -> None:
        """All of it. Afterwards nothing is live."""
        before = self.device.memory.statistics().live_bytes
        counters = [stream.empty(1, np.uint32) for stream in self.streams]
        for stream, counter in zip(self.streams, counters, strict=True):
            stream.fill(counter, 0)
        self.counters = dict(zip(self.streams, counters, strict=True))
        names, weights = list(STEPS), list(STEPS.values())
        steps: dict[str, Callable[[], object]] = {name: getattr(self, f"_{name}") for name in names if name != "turn"}
        for name in self.chance.choices(names, weights, k=operations):
            if name == "turn":
                await self._turn()
            else:
                steps[name]()
        for entry in self.live:
            self._count(entry)
        while self.live:
            self._free()
        await self._settle()
        for stream in self.streams:
            self.wrong += int((await stream.download(self.counters[stream]))[0])
            self.counters[stream].free()
        for stream in self.streams:
            await stream.aclose()
        await self.device.drain()
        self.device.memory.sweep(resources_of(self.device).loop_states.here().reactor)
        live = self.device.memory.statistics().live_bytes
        assert self.wrong == 0, f"{self.wrong} words were overwritten; repeat it with seed {self.seed}"
        assert live == before, f"{live - before} bytes are live after the end; repeat it with seed {self.seed}"

    # -- the steps -----------------------------------------------------------------------------------------------

    def _make(self) -> None:
        if len(self.live) >= self.most_live:
            return
        buffer = self._stream().empty(self.chance.choice(SIZES), np.uint32)
        self.tags += 1
        stream = self._stream()  # perhaps another: it waits for the allocation by itself
        self.live.append(Entry(buffer, self.tags, self._tag(stream, buffer, self.tags), []))

    def _free(self) -> None:
        if self.live:
            entry = self._take()
            entry.buffer.free(self.chance.choice((None, self._stream())))

    def _drop(self) -> None:
        if self.live:
            self._take()

    def _write(self) -> None:
        if self.live:
            entry, stream = self.chance.choice(self.live), self._stream()
            self._behind(stream, entry.writer, *entry.readers)
            self.tags += 1
            entry.tag, entry.readers = self.tags, []
            entry.writer = self._tag(stream, entry.buffer, entry.tag)

    def _count(self, entry: Entry | None = None) -> None:
        if self.live:
            entry, stream = entry or self.chance.choice(self.live), self._stream()
            self._behind(stream, entry.writer)
            buffer, counter = entry.buffer, self.counters[stream]
            grid = -(-buffer.size // 256)
            entry.readers.append(stream.launch(COUNT, grid, 256, buffer, buffer.size, entry.tag, counter))

    def _copy(self) -> None:
        if len(self.live) > 1:
            target, stream = self.chance.choice(self.live), self._stream()
            sources = [entry for entry in self.live if entry.buffer.size == target.buffer.size and entry is not target]
            if sources:
                source = self.chance.choice(sources)
                self._behind(stream, source.writer, target.writer, *target.readers)
                target.writer = stream.copy(target.buffer, source.buffer)
                target.tag, target.readers = source.tag, []
                source.readers.append(target.writer)

    def _download(self) -> None:
        if self.live:
            entry, stream = self.chance.choice(self.live), self._stream()
            self._behind(stream, entry.writer)
            operation = stream.download(entry.buffer)
            entry.readers.append(operation)
            self.downloads.append((operation, entry.tag))

    def _upload(self) -> None:
        if self.live:
            entry, stream = self.chance.choice(self.live), self._stream()
            self._behind(stream, entry.writer, *entry.readers)
            self.tags += 1
            entry.tag, entry.readers = self.tags, []
            entry.writer = stream.copy(entry.buffer, np.full(entry.buffer.size, entry.tag, np.uint32))

    async def _turn(self) -> None:
        """Let the loop turn, wait for a stream, or trim."""
        what = self.chance.random()
        if what < 0.02:
            await self.device.memory.trim()
        elif what < 0.4:
            await self._stream().synchronize()
        if len(self.downloads) > 32:
            await self._settle()

    async def _settle(self) -> None:
        await aiocuda.gather(*(stream.synchronize() for stream in self.streams))
        for operation, tag in self.downloads:
            self.wrong += int(np.count_nonzero(await operation != tag))
        self.downloads.clear()

    # -- what they share -----------------------------------------------------------------------------------------

    def _stream(self) -> Stream:
        return self.chance.choice(self.streams)

    def _take(self) -> Entry:
        return self.live.pop(self.chance.randrange(len(self.live)))

    def _tag(self, stream: Stream, buffer: DeviceBuffer, tag: int) -> Operation[None]:
        return stream.launch(WRITE, -(-buffer.size // 256), 256, buffer, buffer.size, tag)

    @staticmethod
    def _behind(stream: Stream, *operations: Operation[Any]) -> None:
        for operation in operations:
            if operation.stream is not stream and not operation.done():
                stream.wait(operation)


def all_adaptors(upstream: MemoryResource) -> MemoryResource:
    """Every adaptor that is for production, one on the other."""
    from aiocuda.memory import LimitResource, ScrubbingResource, StatisticsResource, TrackingResource

    sizes = SizeClassResource(ScrubbingResource(upstream, 0xDB))
    return TrackingResource(StatisticsResource(LimitResource(ScrubbingResource(sizes, 0xA5), 1 << 30)))
