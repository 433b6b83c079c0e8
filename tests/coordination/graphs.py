"""Graphs of operations by chance, what they come to one after the other, and the same by a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from aiocuda import AsyncCoordinator, Device, Kernel, SkippedError, Stream
from aiocuda.coordination import Node

ITEMS = 12

#: ``blend(target, left, right, n)``: target = 3 × left + right.
BLEND = Kernel(
    "blend",
    source="""
    extern "C" __global__ void blend(unsigned int* target, const unsigned int* left, const unsigned int* right, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) target[i] = 3u * left[i] + right[i];
    }
    """,
    host=lambda target, left, right, n: np.copyto(target, left * np.uint32(3) + right),
)
#: ``bump(target, term, n)``: target = 5 × target + term.
BUMP = Kernel(
    "bump",
    source="""
    extern "C" __global__ void bump(unsigned int* target, unsigned int term, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) target[i] = 5u * target[i] + term;
    }
    """,
    host=lambda target, term, n: np.copyto(target, target * np.uint32(5) + np.uint32(term)),
)


class BodyError(Exception):
    """The body of a bracket raises."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Some items of one buffer."""

    buffer: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a graph."""

    kind: str  #: "upload", "bump", "blend", "bracket" (fills), "broken" (a bracket that raises), "download"
    target: Part | None
    sources: tuple[Part, ...]
    value: int
    after: tuple[int, ...]
    priority: str
    waits: bool  #: The task that registers it awaits its outcome before it continues.

    @property
    def reads(self) -> tuple[Part, ...]:
        return (*self.sources, *((self.target,) if self.kind == "bump" and self.target else ()))


def by_chance(chance: random.Random, count: int, buffers: int = 3, broken: float = 0.08) -> list[Step]:
    """A graph; ``broken`` of its operations fail."""
    steps: list[Step] = []
    for index in range(count):
        kind = "broken" if chance.random() < broken else chance.choice(
            ("upload", "bump", "bump", "blend", "blend", "bracket", "download")
        )  # fmt: skip
        length = chance.choice((ITEMS, ITEMS, chance.randint(1, ITEMS)))

        def part(avoid: int = -1, length: int = length) -> Part:
            start = chance.randint(0, ITEMS - length)
            return Part(chance.choice([b for b in range(buffers) if b != avoid]), start, start + length)

        target = part() if kind != "download" else None
        sources: tuple[Part, ...] = ()
        if kind == "blend":
            assert target is not None
            sources = (part(target.buffer), part(target.buffer))
        elif kind in ("download", "broken"):
            sources = (part(),)
        after = tuple(sorted({chance.randrange(index) for _ in range(chance.choice((0, 0, 0, 1, 2)))} if index else ()))
        priority = chance.choice(("critical", "high", "normal", "low", "cleanup"))
        steps.append(Step(kind, target, sources, chance.randrange(1 << 16), after, priority, chance.random() < 0.2))
    return steps


@dataclasses.dataclass
class Outcome:
    """What a graph comes to."""

    states: list[str]
    results: dict[int, npt.NDArray[np.uint32]]  #: of downloads, by index
    buffers: list[npt.NDArray[np.uint32]]
    spoiled: list[npt.NDArray[np.bool_]]  #: items that a failed operation was to write


def start_values(buffers: int) -> list[npt.NDArray[np.uint32]]:
    return [np.arange(ITEMS, dtype=np.uint32) + np.uint32(100 * b) for b in range(buffers)]


def serial(steps: list[Step], buffers: int = 3) -> Outcome:
    """One operation after the other."""
    values = start_values(buffers)
    spoiled = [np.zeros(ITEMS, bool) for _ in values]
    states: list[str] = []
    results: dict[int, npt.NDArray[np.uint32]] = {}

    def of(arrays: list[npt.NDArray[Any]], part: Part) -> npt.NDArray[Any]:
        return arrays[part.buffer][part.start : part.stop]

    for index, step in enumerate(steps):
        skipped = any(states[other] != "done" for other in step.after)
        skipped = skipped or any(of(spoiled, part).any() for part in step.reads)
        state = "skipped" if skipped else "failed" if step.kind == "broken" else "done"
        states.append(state)
        if step.target is not None:
            of(spoiled, step.target)[:] = state != "done"
        if state != "done":
            continue
        if step.kind == "download":
            results[index] = of(values, step.sources[0]).copy()
            continue
        assert step.target is not None
        target = of(values, step.target)
        if step.kind == "bump":
            target[:] = target * np.uint32(5) + np.uint32(step.value)
        elif step.kind == "blend":
            left, right = (of(values, part) for part in step.sources)
            target[:] = left * np.uint32(3) + right
        else:
            target[:] = step.value
    return Outcome(states, results, values, spoiled)


class Build:
    """The same graph, as a user writes it."""

    def __init__(self, coordinator: AsyncCoordinator, steps: list[Step], buffers: list[Any]) -> None:
        self.coordinator = coordinator
        self.steps = steps
        self.buffers = buffers
        self.nodes: list[Node[Any]] = []
        self.told: list[Node[Any]] = []
        self._bodies: list[asyncio.Task[None]] = []

    def of(self, part: Part) -> Any:
        return self.buffers[part.buffer][part.start : part.stop]

    async def run(self) -> Outcome:
        for step in self.steps:
            await self._add(step)
            if step.waits:
                with contextlib.suppress(BodyError, SkippedError):
                    await self.nodes[-1]
        for body in self._bodies:
            await body
        await self.coordinator.drain()
        states: list[str] = []
        results: dict[int, npt.NDArray[np.uint32]] = {}
        for index, node in enumerate(self.nodes):
            error = node.exception()
            states.append(node.state)
            if node.state == "skipped":
                assert isinstance(error, SkippedError)
                assert isinstance(error.__cause__, BodyError)
            elif error is None and self.steps[index].kind == "download":
                results[index] = node.result()
        await asyncio.sleep(0)
        assert sorted(node.id for node in self.told) == [node.id for node in self.nodes]  # each of them once
        return Outcome(states, results, [], [])

    async def _add(self, step: Step) -> None:
        coordinator = self.coordinator
        options: dict[str, Any] = {"after": [self.nodes[other] for other in step.after], "priority": step.priority}
        node: Node[Any]
        if step.kind == "upload":
            assert step.target is not None
            target = self.of(step.target)
            node = coordinator.upload(np.full(target.shape, step.value, np.uint32), target, **options)
        elif step.kind == "bump":
            assert step.target is not None
            target = self.of(step.target)
            node = coordinator.compute(BUMP, 1, 32, target, step.value, target.size, **options)
        elif step.kind == "blend":
            assert step.target is not None
            target = self.of(step.target)
            left, right = map(self.of, step.sources)
            node = coordinator.compute(BLEND, 1, 32, target, left, right, target.size, writes=[target], **options)
        elif step.kind == "download":
            node = coordinator.download(self.of(step.sources[0]), **options)
        else:
            assert step.target is not None
            target = self.of(step.target)
            bracket = coordinator.operation(
                "kernel", reads=[self.of(part) for part in step.sources], writes=[target], **options
            )
            node = bracket
            self._bodies.append(asyncio.create_task(self._body(bracket, step, target)))
            await asyncio.sleep(0)  # it is registered when its block is entered
        node.add_done_callback(self.told.append)
        self.nodes.append(node)

    async def _body(self, bracket: Any, step: Step, target: Any) -> None:
        try:
            async with bracket:
                bracket.stream.fill(target, step.value)
                if step.kind == "broken":
                    raise BodyError(step.value)
        except (BodyError, SkippedError):
            pass


async def compare(device: Device, steps: list[Step], max_in_flight: int = 64, streams: int = 4) -> AsyncCoordinator:
    """Run a graph, and hold it against the serial one."""
    expected = serial(steps)
    async with device.stream() as stream:
        buffers = [await stream.upload(array) for array in start_values(3)]
        async with AsyncCoordinator(device, max_in_flight, streams=streams) as coordinator:
            found = await Build(coordinator, steps, buffers).run()
        assert found.states == expected.states
        assert found.results.keys() == expected.results.keys()
        for index, result in expected.results.items():
            np.testing.assert_array_equal(found.results[index], result, err_msg=f"download {index}")
        for buffer, values, spoiled in zip(buffers, expected.buffers, expected.spoiled, strict=True):
            downloaded = await stream.download(buffer)
            np.testing.assert_array_equal(downloaded[~spoiled], values[~spoiled])
    return coordinator


def slices(stream: Stream, count: int) -> Iterator[Any]:
    """A buffer's parts, one after the other."""
    buffer = stream.empty(count * ITEMS, np.uint32)
    for index in range(count):
        yield buffer[index * ITEMS : (index + 1) * ITEMS]
