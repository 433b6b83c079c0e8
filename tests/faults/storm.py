"""A storm of cancellations: clients on separate streams cancel a third of their waits at random points.

Work that a stream has accepted runs even if its waiters are cancelled. So each client knows the content that its memory
must have at each moment. All written memory, on the device and on the host, is surrounded by canaries.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda import Device, Operation, Stream
from aiocuda._core import StreamOperation
from aiocuda.device._resources import resources_of
from aiocuda.memory._host_writes import HOST_WRITES
from aiocuda.testing.fixtures import left_on
from tests.helpers import AFFINE, SPIN

STREAMS = 8

#: Of the operations, how many have a wait that is given up. A cancellation may come too late, so that more are tried.
CANCELLED = 0.3

#: Waits of one client at a time.
WINDOW = 16

#: Words of a client's payload, and of the canaries on either side of it.
WORDS, GUARD = 256, 64
CANARY = 0xDEADBEEF

#: The next action of a client, with its weight. Threads stage the large copies.
KINDS = {
    "fill": 30,
    "launch": 30,
    "upload": 14,
    "download": 14,
    "within": 6,
    "dropped": 8,
    "pinned": 8,
    "record": 3,
    "wait": 2,
    "spin": 8,
    "large": 1,
}
LARGE = 20_000

Words = npt.NDArray[np.uint32]


@dataclasses.dataclass
class Storm:
    """What came of it."""

    operations: int = 0
    cancelled: int = 0  #: tasks whose wait was cancelled
    late: int = 0  #: tasks that had their result before the cancellation came
    points: Counter[str] = dataclasses.field(default_factory=Counter)  #: where they were cancelled
    wrong: list[str] = dataclasses.field(default_factory=list)


def guarded(words: int) -> tuple[Words, Words]:
    """(an array between canaries, and all of it)."""
    whole = np.full(words + 2 * GUARD, CANARY, np.uint32)
    return whole[GUARD : GUARD + words], whole


class Client:
    """One stream, its memory, and what that must hold."""

    def __init__(self, device: Device, stream: Stream, chance: random.Random, storm: Storm) -> None:
        self.device = device
        self.stream = stream
        self.chance = chance
        self.storm = storm
        self.block = stream.empty(2 * WORDS + 3 * GUARD, np.uint32)  # two payloads, and a canary on each side of both
        stream.fill(self.block, CANARY)
        self.first = self.block[GUARD : GUARD + WORDS]
        self.second = self.block[2 * GUARD + WORDS : 2 * GUARD + 2 * WORDS]
        stream.fill(self.first, 0)
        stream.fill(self.second, 0)
        self.model = np.zeros(WORDS, np.uint32)
        self.copied = np.zeros(WORDS, np.uint32)
        self.around = stream.empty(LARGE + 2 * GUARD, np.uint32)
        stream.fill(self.around, CANARY)
        self.large = self.around[GUARD : GUARD + LARGE]
        self.newest: Operation[Any] = stream.record().operation
        self.others: list[Client] = []
        self.makers: dict[str, Callable[[], Operation[Any]]] = {kind: getattr(self, f"_{kind}") for kind in KINDS}
        #: Tasks, whether each is to be cancelled, its operation, and the check after the operation.
        self.tasks: deque[tuple[asyncio.Task[Any], bool, Operation[Any], Callable[[], bool] | None]] = deque()
        self.look: Callable[[], bool] | None = None

    # Actions that enqueue

    def _fill(self) -> Operation[Any]:
        start, value = self.chance.randrange(WORDS), self.chance.getrandbits(32)
        self.model[start:] = value
        return self.stream.fill(self.first[start:], value)

    def _launch(self) -> Operation[Any]:
        factor, term = self.chance.getrandbits(16), self.chance.getrandbits(16)
        self.model *= np.uint32(factor)
        self.model += np.uint32(term)
        return self.stream.launch(AFFINE, 1, 128, self.first, WORDS, factor, term)

    def _upload(self) -> Operation[Any]:
        source, _ = guarded(WORDS)
        source[:] = self.chance.getrandbits(32)
        self.model[:] = source
        return self.stream.copy(self.first, source)

    def _download(self) -> Operation[Any]:
        target, whole = guarded(WORDS)
        expected = self.model.copy()
        self.look = functools.partial(_holds, whole, expected)
        return self.stream.copy(target, self.first)

    def _within(self) -> Operation[Any]:
        self.copied[:] = self.model
        return self.stream.copy(self.second, self.first)

    def _dropped(self) -> Operation[Any]:
        """Upload from memory that only the operation holds, and that the next upload would reuse."""
        value = self.chance.getrandbits(32)
        temporary = self.stream.empty(WORDS, np.uint32)
        self.stream.fill(temporary, value)
        self.model[:] = value
        return self.stream.copy(self.first, temporary)

    def _pinned(self) -> Operation[Any]:
        """The same in page-locked memory, which the device itself reads."""
        value = self.chance.getrandbits(32)
        temporary = self.device.pinned(WORDS, np.uint32)
        temporary[:] = value
        self.model[:] = value
        return self.stream.copy(self.first, temporary)

    def _large(self) -> Operation[Any]:
        value = self.chance.getrandbits(32)
        self.stream.fill(self.large, value)
        target, whole = guarded(LARGE)
        self.look = functools.partial(_holds, whole, np.full(LARGE, value, np.uint32))
        return self.stream.copy(target, self.large)

    def _record(self) -> Operation[Any]:
        return self.stream.record().operation

    def _spin(self) -> Operation[Any]:
        return self.stream.launch(SPIN, 1, 1, self.chance.randrange(8_000_000))  # else nothing is ever waited for

    def _wait(self) -> Operation[Any]:
        return self.stream.wait(self.chance.choice(self.others).newest)

    # How it is waited for

    async def run(self, count: int) -> None:
        """So many operations, each waited for by a task of its own."""
        chance, storm = self.chance, self.storm
        for kind in chance.choices(list(KINDS), list(KINDS.values()), k=count):
            self.look = None
            operation = self.newest = self.makers[kind]()
            storm.operations += 1
            doomed = chance.random() < (0.7 if storm.cancelled < CANCELLED * storm.operations else 0.1)
            task = self._doomed(operation) if doomed else asyncio.create_task(operation.wait())
            self.tasks.append((task, doomed, operation, self.look))
            while len(self.tasks) > WINDOW:
                await self._end()
        while self.tasks:
            await self._end()

    def _doomed(self, operation: Operation[Any]) -> asyncio.Task[Any]:
        """A wait that is given up at some point, perhaps too late."""
        loop, chance = asyncio.get_running_loop(), self.chance
        point = chance.choice(("at once", "next turn", "some turns", "some time", "timeout", "one of two", "gather"))
        self.storm.points[point] += 1
        if point == "timeout":
            return asyncio.create_task(_timed(operation, chance.random() * 0.002))
        if point == "gather":  # beside one that is not in the stream's order just before it
            other = self.chance.choice(self.others).newest
            task: asyncio.Task[Any] = asyncio.create_task(_both(operation, other))
        else:
            task = asyncio.create_task(operation.wait())
        if point == "one of two":  # the other one gets its result
            self.tasks.append((asyncio.create_task(operation.wait()), False, operation, self.look))
        if point == "at once":
            task.cancel()
        elif point == "some time":
            loop.call_later(chance.random() * 0.002, task.cancel)
        elif point == "some turns":
            _after(chance.randrange(2, 8), task)
        else:
            loop.call_soon(task.cancel)
        return task

    async def _end(self) -> None:
        task, doomed, operation, look = self.tasks.popleft()
        try:
            await task
        except (asyncio.CancelledError, TimeoutError):
            assert doomed, f"{operation!r} was cancelled by somebody else's cancellation"
            self.storm.cancelled += 1
            if look is not None and not operation.done():
                operation.add_done_callback(lambda operation: self._seen(operation, look))
                return
        else:
            self.storm.late += doomed
        if operation.done():
            self._seen(operation, look)

    def _seen(self, operation: Operation[Any], look: Callable[[], bool] | None) -> None:
        error = operation.exception()
        if error is not None:
            self.storm.wrong.append(f"{operation!r}: {error!r}")
        elif look is not None and not look():
            self.storm.wrong.append(f"{operation!r} brought something else, or wrote past its array")

    async def check(self) -> None:
        """What the device's memory holds in the end."""
        got = await self.stream.download(self.block)
        expected = np.full(got.shape, CANARY, np.uint32)
        expected[GUARD : GUARD + WORDS] = self.model
        expected[2 * GUARD + WORDS : 2 * GUARD + 2 * WORDS] = self.copied
        if not np.array_equal(got, expected):
            (where,) = np.nonzero(got != expected)
            self.storm.wrong.append(f"{self.stream!r}: words {where[:8]} of its block hold something else")
        for guard in (self.around[:GUARD], self.around[GUARD + LARGE :]):
            if not (await self.stream.download(guard) == CANARY).all():
                self.storm.wrong.append(f"{self.stream!r}: something was written beside its large buffer")


def _holds(whole: Words, expected: Words) -> bool:
    guards = np.concatenate((whole[:GUARD], whole[-GUARD:]))
    return bool((guards == CANARY).all()) and np.array_equal(whole[GUARD:-GUARD], expected)


def _after(turns: int, task: asyncio.Task[Any]) -> None:
    if turns:
        asyncio.get_running_loop().call_soon(_after, turns - 1, task)
    else:
        task.cancel()


async def _timed(operation: Operation[Any], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await operation


async def _both(first: Operation[Any], second: Operation[Any]) -> None:
    await aiocuda.gather(first, second)


async def storm(driver: Any, operations: int, seed: int) -> Storm:
    """Run so many operations over 8 streams. The result lists wrong content; leftovers raise."""
    told = Storm()
    chance = random.Random(seed)
    claimed = len(HOST_WRITES)  # never released: devices that were closed while at work
    device = await aiocuda.open_device(driver=driver)
    try:
        streams = [device.stream() for _ in range(STREAMS)]
        clients = [Client(device, stream, random.Random(chance.random()), told) for stream in streams]
        for client in clients:
            client.others = [other for other in clients if other is not client]
        await asyncio.gather(*(client.run(operations // STREAMS) for client in clients))
        for client in clients:
            await client.check()
        await device.drain()
        statistics = device.statistics()
        assert statistics.submitted == statistics.resolved, statistics
        assert statistics.lost_wakes == 0, statistics
        for stream in streams:
            await stream.aclose()
        del client, clients, streams, stream
        assert left_on(device) == [], f"seed {seed}"
        gc.collect()
        assert len(HOST_WRITES) <= claimed, f"seed {seed}"
        leases = resources_of(device).device_state.leases
        held = [
            thing
            for thing in gc.get_objects()
            if type(thing) is StreamOperation and thing.queue.device_state is resources_of(device).device_state
        ]
        assert held == [], f"seed {seed}"
        assert leases.idle == leases.created, f"{leases.created - leases.idle} events did not come back; seed {seed}"
    finally:
        await device.aclose()
    return told
