"""Rows about pipelines: how near they come to what nothing can exceed, and whether their advice helps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import aiocuda

from .by_hand import ByHand, Shape
from .figures import Measured
from .kernels import empty, nanoseconds, spin
from .peers.raw import own_time
from .setting import Setting
from .throughput import with_c

#: Row I6: milliseconds of upload, compute and download.
MIXES = ((2.0, 5.0, 2.0), (5.0, 5.0, 5.0), (1.0, 10.0, 1.0), (10.0, 1.0, 10.0))

#: Bytes that a copy engine's bandwidth is measured with.
PROBE = 16 << 20


async def pipeline_bound(setting: Setting) -> Measured:
    """Speed-up over one step after the other ÷ the bound of row I6, of the mix that comes least near to it.

    The bound is N·Σ ÷ (N·max + Σ − max), of device times that are measured in the same run: Σ of the steps alone; in
    the denominator a copy takes what it takes while the other direction copies, too. Baseline: three streams and events
    written by hand, with as many slots, of the same bound. Pinned memory, sized for the times. Bounds: 0.97 for each of
    the mixes, and 0.98 of what is written by hand; no turn of the loop over 5 ms.
    """
    return await against_by_hand(setting, MIXES, setting.count("depth"))


async def pipeline_1ms(setting: Setting) -> Measured:
    """The same of three steps of 1 ms each. Bound: 0.98 of what is written by hand."""
    return await against_by_hand(setting, ((1.0, 1.0, 1.0),), setting.count("depth"))


async def pipeline_100us(setting: Setting) -> Measured:
    """The same with three steps of 100 µs each, with the number of slots that `Pipeline.advice` returns; and with
    three.

    With three slots, all are in use, so the device waits while the host learns of an end and starts the next item. By
    hand, the next item is enqueued long before; ``of_paced`` compares with a version by hand that enqueues an item when
    its slot has returned. Bound: 0.90 of the version by hand.
    """
    return await _short(setting, replay=False)


async def pipeline_100us_replay(setting: Setting) -> Measured:
    """The same, captured once for each slot and replayed. Bound: 0.97 of what is written by hand."""
    return await _short(setting, replay=True)


async def pipeline_16mb(setting: Setting) -> Measured:
    """Speed-up ÷ bound of 16 MB up, a kernel of 320 µs and 16 MB down, at depth 3, and where the rest goes.

    ``of_by_hand`` is the whole gap. ``of_paced`` is what remains of it beside a version by hand that enqueues an item
    when its slot has returned: the host's time of the library. ``paced_of_by_hand`` is what that pace costs the
    version by hand. ``duplex`` is how much longer a copy takes beside one in the other direction. ``of_by_hand_5`` is
    the gap at depth 5. Bound: 0.94 of what is written by hand.
    """
    return await _copies(setting, (0.32, 0.32, 0.32))


async def pipeline_4mb(setting: Setting) -> Measured:
    """The same of 4 MB up, a kernel of 100 µs and 4 MB down. Bound: 0.85 of what is written by hand."""
    return await _copies(setting, (0.08, 0.1, 0.08))


async def _copies(setting: Setting, mix: tuple[float, float, float]) -> Measured:
    measured = await against_by_hand(setting, (mix,), setting.count("depth"), paced=True)
    of_by_hand, of_paced = (measured.figures[f"{name}_{_name(mix)}"] for name in ("of_by_hand", "of_paced"))
    measured.figures["paced_of_by_hand"] = of_by_hand / of_paced
    deeper = (await against_by_hand(setting, (mix,), 5)).figures
    measured.figures["of_by_hand_5"] = deeper[f"of_by_hand_{_name(mix)}"]
    return measured


async def pipeline_30us(setting: Setting) -> Measured:
    """µs of an item of three kernels of 30 µs each at depth 5; at depth 3 as ``us_3_slots``.

    Baseline: the kernels' own time, of which one item can take no less. ``c_ratio`` is the ratio to the same launches,
    waits and events in C, all enqueued in advance. Bound: 1.6 times the baseline.
    """
    items, seconds, kernel = setting.count("iterations"), setting.sizes["seconds"], spin(setting.sizes["seconds"])

    def compute(slot: aiocuda.Slot) -> Any:
        return slot.stream.launch(kernel, 1, 1, nanoseconds(seconds))

    stages = [aiocuda.Stage(name, compute) for name in ("first", "second", "third")]
    measured, three, in_c, bound = Measured([]), list[float](), list[float](), setting.c_bound()
    async with (
        aiocuda.Pipeline(setting.device, stages, setting.count("depth")) as pipeline,
        aiocuda.Pipeline(setting.device, stages, 3) as short,
    ):
        for one in (pipeline, short):
            await _seconds(one, 2 * setting.count("depth"))
        for _ in range(setting.count("repeats")):
            measured.samples.append(await _seconds(pipeline, items) / items * 1e6)
            three.append(await _seconds(short, items) / items * 1e6)
            if not isinstance(bound, str):
                in_c.append(bound.stages(seconds, setting.count("depth"), items) / items * 1e6)
    measured.baseline.append(own_time(setting.raw, seconds) * 1e6)
    measured.figures["us_3_slots"] = median(three)
    return with_c(measured, bound, in_c, "us")


async def _short(setting: Setting, replay: bool) -> Measured:
    mix = (0.1, 0.1, 0.1)
    measured = await against_by_hand(setting, (mix,), setting.count("depth"), replay, paced=True)
    three = (await against_by_hand(setting, (mix,), 3, replay)).figures
    for name in ("of_bound", "of_by_hand"):
        measured.figures[f"{name}_3_slots"] = three[f"{name}_{_name(mix)}"]
    return measured


async def pipeline_iteration(setting: Setting) -> Measured:
    """µs of an iteration that takes the device next to nothing: 4 KB up, an empty kernel, 4 KB down, four slots.

    What is left is the host's: the verbs, the waits between them, what the pipeline keeps. Baseline: the same by hand.
    Bound: 100, for stages of 100 µs to be kept busy.
    """
    items, depth = setting.count("iterations"), setting.count("depth")
    shape = Shape(4096, 0.0, 4096)
    memory = await _Memory.of(setting, (), 4096)
    by_hand = ByHand(setting.raw, shape, depth)
    measured, replayed = Measured([]), list[float]()
    live = aiocuda.Pipeline(setting.device, memory.stages(shape), depth)
    captured = aiocuda.Pipeline(setting.device, memory.stages(shape), depth, replay=True)
    async with live, captured:
        for pipeline in (live, captured):
            await _seconds(pipeline, 2 * depth)
        by_hand.run(2 * depth)
        for _ in range(setting.count("repeats")):
            measured.samples.append(await _seconds(live, items) / items * 1e6)
            replayed.append(await _seconds(captured, items) / items * 1e6)
            measured.baseline.append(_by_hand(by_hand, items) / items * 1e6)
    measured.figures["replayed_us"] = median(replayed)
    return measured


async def pipeline_stages(setting: Setting) -> Measured:
    """µs per item and stage of a pipeline of six stages that each launch an empty kernel. Baseline: three such stages.

    A larger share of the items is timed if more than one stage processes: see `PipelineStats`. Bound: 1.3 times the
    baseline.
    """
    items, depth = setting.count("iterations"), setting.count("depth")

    def compute(slot: aiocuda.Slot) -> Any:
        return slot.stream.launch(empty(), 1, 1)

    few, many = (
        aiocuda.Pipeline(setting.device, [aiocuda.Stage(str(number), compute) for number in range(count)], depth)
        for count in (3, 6)
    )
    measured = Measured([])
    async with few, many:
        for pipeline in (few, many):
            await _seconds(pipeline, 2 * depth)
        for _ in range(setting.count("repeats")):
            measured.samples.append(await _seconds(many, items) / items / 6 * 1e6)
            measured.baseline.append(await _seconds(few, items) / items / 3 * 1e6)
    return measured


async def against_by_hand(
    setting: Setting, mixes: Sequence[Sequence[float]], depth: int, replay: bool = False, *, paced: bool = False
) -> Measured:
    """A pipeline of upload, compute and download, and the same by hand: speed-ups ÷ bound, of the mix with least.

    Other programs use the host's memory, too, now more and now less: by hand, the same copies take 5 % more in one
    second than in the next. So what the bound is made of is measured before and after each pair of runs, the mean of
    both counts, every other pair is run in the other order, and what is compared are the two of a pair.
    """
    items, repeats = setting.count("iterations"), setting.count("repeats")
    measured = Measured([float("inf")], [])
    measured.figures["longest_turn_ms"] = 0.0
    memory = await _Memory.of(setting, mixes)
    for mix in mixes:
        shape = memory.shape(mix)
        targets = [(await memory.target(slot)).address for slot in range(depth)]
        by_hand = ByHand(setting.raw, shape, depth, memory.source.address, targets)
        ours, hand, kept_pace, probes = [], [], [], []
        async with aiocuda.Pipeline(setting.device, memory.stages(shape), depth, replay=replay) as pipeline:
            await _seconds(pipeline, 2 * depth)  # the slots' buffers, the kernel
            by_hand.run(2 * depth)
            _Probe.of(by_hand)
            setting.turns.reset()
            for turn in range(repeats):
                probes.append(_Probe.of(by_hand))
                if turn % 2:
                    hand.append(_by_hand(by_hand, items))
                # In the first iteration, callbacks that became due while the loop was blocked run before this one.
                for _ in range(2):
                    await asyncio.sleep(0)
                setting.turns.reset()
                ours.append(await _seconds(pipeline, items))
                measured.figures["longest_turn_ms"] = max(
                    measured.figures["longest_turn_ms"], setting.turns.longest() * 1e3
                )
                if not turn % 2:
                    hand.append(_by_hand(by_hand, items))
                if paced:
                    kept_pace.append(_by_hand(by_hand, items, paced=True))
            probes.append(_Probe.of(by_hand))
        least = [one.beside(other).least(items) for one, other in pairwise(probes)]
        near = [bound / seconds for bound, seconds in zip(least, ours, strict=True)]
        if median(near) < median(measured.samples):
            measured.samples = near
            measured.baseline = [bound / seconds for bound, seconds in zip(least, hand, strict=True)]
        name = _name(mix)
        measured.figures[f"of_bound_{name}"] = median(near)
        measured.figures[f"of_by_hand_{name}"] = _ratio(hand, ours)
        if paced:
            measured.figures[f"of_paced_{name}"] = _ratio(kept_pace, ours)
        measured.figures[f"speedup_{name}"] = items * median(sum(probe.steps) for probe in probes) / median(ours)
        measured.figures[f"duplex_{name}"] = median(probe.duplex for probe in probes)
    return measured


class _Probe(NamedTuple):
    """Seconds of device time of each step alone, and of both copies side by side."""

    steps: tuple[float, float, float]
    up: float
    down: float

    @classmethod
    def of(cls, by_hand: ByHand) -> _Probe:
        steps = [median(times) for times in zip(*[by_hand.alone() for _ in range(3)], strict=True)]
        up, down = (median(times) for times in zip(*[by_hand.duplex() for _ in range(5)], strict=True))
        return cls((steps[0], steps[1], steps[2]), up, down)

    def beside(self, other: _Probe) -> _Probe:
        """The mean of both, before `least` takes a maximum.

        The maximum of five times that are about the same, each a little off, is too long: it would flatter both sides.
        """
        steps = [(mine + theirs) / 2 for mine, theirs in zip(self.steps, other.steps, strict=True)]
        return _Probe((steps[0], steps[1], steps[2]), (self.up + other.up) / 2, (self.down + other.down) / 2)

    @property
    def duplex(self) -> float:
        """How much longer a copy takes beside one in the other direction."""
        return max(self.up / self.steps[0], self.down / self.steps[2])

    def least(self, items: int) -> float:
        """Seconds that so many items take at the least."""
        return items * max(*self.steps, self.up, self.down) + sum(self.steps) - max(self.steps)


async def pipeline_advice(setting: Setting) -> Measured:
    """Seconds before ÷ seconds after following `Pipeline.advice`, of the mix that gains least; three slots before."""
    items, repeats = setting.count("iterations"), setting.count("repeats")
    measured = Measured([float("inf")], [1.0] * repeats)
    memory = await _Memory.of(setting, MIXES)
    for mix in MIXES:
        stages = memory.stages(memory.shape(mix))
        async with aiocuda.Pipeline(setting.device, stages, setting.count("depth")) as before:
            await _seconds(before, items)
            advice = before.advice()
            async with aiocuda.Pipeline(setting.device, stages, advice.depth, streams=advice.streams) as after:
                await _seconds(after, items)
                gains = [await _seconds(before, items) / await _seconds(after, items) for _ in range(repeats)]
        if median(gains) < median(measured.samples):
            measured.samples = gains
        measured.figures[f"gain_{_name(mix)}"] = median(gains)
        measured.figures[f"depth_{_name(mix)}"] = float(advice.depth)
        measured.figures[f"streams_{_name(mix)}"] = float(len(advice.streams))
    return measured


async def _seconds(pipeline: aiocuda.Pipeline, items: int) -> float:
    start = perf_counter()
    async for _ in pipeline.run(range(items)):
        pass
    return perf_counter() - start


def _by_hand(by_hand: ByHand, items: int, *, paced: bool = False) -> float:
    start = perf_counter()
    by_hand.run(items, paced=paced)
    return perf_counter() - start


def _ratio(hand: Sequence[float], ours: Sequence[float]) -> float:
    return median(theirs / mine for theirs, mine in zip(hand, ours, strict=True))


def _name(mix: Sequence[float]) -> str:
    return "_".join(f"{milliseconds:g}" for milliseconds in mix)


class _Memory:
    """Pinned memory for the largest of the copies, a target for each slot, and what a copy engine moves in a second."""

    def __init__(self, setting: Setting, bandwidth: tuple[float, float], most: int, source: Any) -> None:
        self._device = setting.device
        self._scale = setting.sizes.get("scale", 1.0)
        self._up, self._down = bandwidth
        self._most = most
        self._targets: dict[int, aiocuda.PinnedBuffer] = {}
        self.source = source

    @classmethod
    async def of(cls, setting: Setting, mixes: Sequence[Sequence[float]], least: int = 1) -> _Memory:
        probe = ByHand(setting.raw, Shape(PROBE, 0.0, PROBE), 1)
        up, _, down = min(probe.alone() for _ in range(4))
        rate = PROBE / min(up, down) * 1e-3 * setting.sizes.get("scale", 1.0)  # bytes for each of the mixes' ms
        most = max([least, *(round(rate * milliseconds) for mix in mixes for milliseconds in (mix[0], mix[2]))])
        return cls(setting, (PROBE / up, PROBE / down), most, await setting.device.pinned(most, np.uint8))

    def target(self, slot: int) -> aiocuda.PinnedBuffer:
        """Two concurrent copies write two arrays, since the library refuses two copies into one array."""
        if slot not in self._targets:
            self._targets[slot] = self._device.pinned(self._most, np.uint8)
        return self._targets[slot]

    def shape(self, mix: Sequence[float]) -> Shape:
        up, seconds, down = (milliseconds * self._scale * 1e-3 for milliseconds in mix)
        return Shape(round(up * self._up), seconds, round(down * self._down))

    def stages(self, shape: Shape) -> list[aiocuda.Stage]:
        """Upload, compute and download, from one buffer of the slot to another."""
        kernel, source = spin(shape.seconds), self.source[: shape.up]
        targets: dict[int, Any] = {}

        def upload(slot: aiocuda.Slot) -> Any:
            return slot.stream.copy(slot.buffer("x", shape.up, np.uint8), source)

        def compute(slot: aiocuda.Slot) -> Any:
            return slot.stream.launch(kernel, 1, 1, nanoseconds(shape.seconds))

        def download(slot: aiocuda.Slot) -> Any:
            if slot.number not in targets:
                targets[slot.number] = self.target(slot.number)[: shape.down]
            return slot.stream.copy(targets[slot.number], slot.buffer("y", shape.down, np.uint8))

        return [aiocuda.Stage("upload", upload), aiocuda.Stage("compute", compute), aiocuda.Stage("download", download)]
