"""Collectives: broadcast, reduce and all_reduce as the work of one node, over the devices of a process.

On one device, a collective is one kernel, or one copy for each target. Over several devices, buffers move in chunks:
the copies of one chunk overlap the kernel of another. Each device has a stream for kernels and one for copies. They
wait for the node's own stream at the beginning, which waits for them at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from .._base._checks import several
from .._base._types import SourceLine
from ..errors import DeviceFault, InvalidArgumentError, InvalidTypeError, WrongDeviceError
from ..lowlevel import DeviceResources, block_of, enqueue_mark, queue_of, resources_of, wait_for
from ..memory import DeviceBuffer
from ._accesses import enqueue_end
from ._reductions import CONTINUES, MOST, UNFINISHED, Fold, fold_of
from ._scheduled_node import ScheduledNode

if TYPE_CHECKING:
    import numpy as np

    from ..lowlevel import Queue, StreamOperation
    from ..stream import Stream
    from ._coordinator_streams import CoordinatorStreams

__all__ = ["CHUNK", "Broadcast", "Collective", "Reduction", "buffers_of", "check_collective"]

#: Bytes of one chunk of a collective over several devices, at least; 4 times as many at most. A GPU copies that in the
#: time in which the next chunk is enqueued.
CHUNK = 16 << 20

#: Chunks into which a device's part is divided, unless they were smaller or larger than that. All of them are enqueued
#: in one turn of the event loop. Two are enough: one is copied while the kernel reads the other one.
CHUNKS = 2

#: The bytes of the smallest part of a reduction that a device of its own combines: smaller ones take longer to enqueue
#: than to copy.
PART = CHUNK // 16

#: Parts and chunks begin at multiples of so many items, at least 16 bytes: the kernel takes 16 bytes at a time.
PACK = 16

#: Threads of one block, and the most blocks for each multiprocessor.
THREADS, BLOCKS = 256, 16


def buffers_of(things: object, role: str) -> list[Any]:
    """Return the buffers, or nodes of uploads, that an argument names; at least one."""
    found = list(several(things, f"{role} names several buffers, as in {role}=[a, b]"))
    if not found:
        raise InvalidArgumentError(f"{role} is empty: name at least one buffer", argument=role)
    return found


def check_collective(resources: DeviceResources, groups: Sequence[Sequence[DeviceBuffer]]) -> None:
    """Check the buffers of a collective. In each group, no two buffers may have bytes in common.

    Two buffers of different groups may be the same bytes, and must not overlap in part.

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        Something is no buffer; dtypes or shapes differ; buffers overlap.
    WrongDeviceError
        A buffer belongs to another driver.
    ClosedError, StaleHandleError
        A device is closed, or a buffer freed.
    """
    first = groups[0][0]
    places: list[tuple[int, int, DeviceBuffer]] = []
    for number, group in enumerate(groups):
        for buffer in group:
            _check_buffer(resources, buffer, first)
            places.append((buffer.address, number, buffer))
    for device in {resources_of(buffer.device) for _, _, buffer in places}:
        device.loop_state()
    if not first.nbytes:
        return
    places.sort(key=operator.itemgetter(0, 1))  # neighbours then, if any of them overlap
    for (start, number, buffer), (later, other_number, other) in itertools.pairwise(places):
        if later == start and number == other_number:
            raise InvalidArgumentError(f"{buffer!r} is named twice: each buffer of a collective is another one")
        if start < later < start + buffer.nbytes:
            raise InvalidArgumentError(f"{buffer!r} and {other!r} overlap in part: use buffers that are apart")


def _check_buffer(resources: DeviceResources, buffer: DeviceBuffer, first: DeviceBuffer) -> None:
    block = block_of(buffer)
    block.check()
    if block.driver is not resources.driver:
        raise WrongDeviceError(f"{buffer!r} belongs to another driver: open both devices on one driver")
    if buffer.dtype != first.dtype:
        raise InvalidTypeError(
            f"dtypes differ: {first.dtype} and {buffer.dtype}; all buffers of a collective have one dtype"
        )
    if buffer.shape != first.shape:
        raise InvalidArgumentError(
            f"shapes differ: {first.shape} and {buffer.shape}; all buffers of a collective have one shape: "
            "buffer.reshape(...) is a view with another one"
        )


def check_aligned(buffers: Iterable[DeviceBuffer]) -> None:
    """Raise `InvalidArgumentError` if a kernel cannot load the items of a buffer: CUDA requires alignment."""
    for buffer in buffers:
        if buffer.nbytes and buffer.address % buffer.dtype.itemsize:
            raise InvalidArgumentError(
                f"{buffer!r} begins at 0x{buffer.address:x}, which is no multiple of the {buffer.dtype.itemsize} bytes "
                "of its items: copy it into a buffer of its own by stream.copy(target, source)"
            )


def _chunk_size(items: int, itemsize: int) -> int:
    """Return the items of one chunk of a part of so many items: a multiple of `PACK`."""
    return _packs(min(max(CHUNK // itemsize, -(-items // CHUNKS)), 4 * CHUNK // itemsize))


def _packs(items: int) -> int:
    """Return the next multiple of `PACK`, at least one."""
    return max(1, -(-items // PACK)) * PACK


def _bounds(items: int, itemsize: int, devices: int) -> list[int]:
    """Return where the parts of several devices begin, and the end. There may be fewer parts than devices."""
    parts = max(1, min(devices, items * itemsize // PART))
    return [items * number // parts // PACK * PACK for number in range(parts)] + [items]


class _Lane:
    """A stream on which a collective enqueues, and its newest operation there.

    The collective keeps that operation: if the device fails, its failure is that of the node, and of no other object.
    """

    __slots__ = ("begin", "is_used", "newest", "queue", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.queue = queue_of(stream)
        self.begin: StreamOperation[Any] | None = None  # its first operation waits for this one
        self.is_used = False  # has anything been enqueued, or refused, which may have reached the device?
        self.newest: StreamOperation[Any] | None = None

    def _use(self) -> None:
        """Let the first operation wait for the beginning of the collective."""
        if not self.is_used:
            self.is_used = True
            self.wait(self.begin)

    def mark(self, kind: str) -> StreamOperation[Any]:
        """Enqueue an operation that is done when all work so far is."""
        self.is_used = True
        self.newest = mark = enqueue_mark(self.queue, kind)
        return mark

    def wait(self, other: StreamOperation[Any] | None) -> None:
        """Let later work wait for an operation of another lane, if there is one."""
        if other is not None:
            self._use()
            wait_for(self.stream, other)
            self.newest = self.queue.tail()  # it may be an operation that waits

    def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> StreamOperation[Any]:
        """Enqueue a copy between two buffers of any devices."""
        self._use()
        self.newest = copied = cast("StreamOperation[Any]", self.stream.copy(target, source))
        return copied

    def launch(self, fold: Fold, grid: int, *arguments: Any) -> StreamOperation[Any]:
        """Enqueue the kernel of a reduction."""
        self._use()
        launched = self.stream.launch(fold.kernel, grid, THREADS, *arguments)
        self.newest = operation = cast("StreamOperation[Any]", launched)
        return operation

    def after_all(self, kind: str) -> Iterator[StreamOperation[Any]]:
        """Yield the newest operation, and one after all work, also after kernels that are being loaded."""
        newest = self.newest
        if not self.is_used:
            return
        if newest is not None:
            yield newest
        with contextlib.suppress(DeviceFault):
            end = enqueue_mark(self.queue, kind) if self.queue.on_host else self.queue.mark()
            if end is not None:
                yield end


class Collective:
    """The work of one collective node. `submit` enqueues all of it.

    Attributes
    ----------
    node : ScheduledNode
    streams : CoordinatorStreams
    """

    def __init__(self, node: ScheduledNode[Any], streams: CoordinatorStreams, buffers: Iterable[DeviceBuffer]) -> None:
        self._node = node
        self._streams = streams
        self._buffers = tuple(buffers)
        self._devices = list(dict.fromkeys([resources_of(buffer.device) for buffer in self._buffers]))
        self._lanes: dict[tuple[DeviceResources, str], _Lane] = {}

    def find_busy(self, home: Queue) -> Queue:
        """Return the queue of another lane that has operations on the host; ``home`` if there is none.

        A failure of such an operation, which belongs to another collective, would become that of this one.
        """
        for resources in self._devices:
            for role in ("compute", "copy"):
                stream = self._streams.known(resources, role, self._node.rank)
                if stream is not None and queue_of(stream).on_host:
                    return queue_of(stream)
        return home

    def submit(self, home: Stream) -> StreamOperation[Any]:
        """Enqueue the collective, and return an operation on ``home`` that is done when all of it is."""
        self._node.find_busy = None  # it refers to this object
        queue_of(home).check()
        with contextlib.ExitStack() as late:
            return self._submit(home, late)

    def _submit(self, home: Stream, late: contextlib.ExitStack) -> StreamOperation[Any]:
        """Enqueue. ``late`` closes the streams of a device that closes again."""
        for buffer in self._buffers:  # nothing is enqueued if one of them has been freed
            block_of(buffer).check()
        first, *others = self._open_lanes(home, late)
        kind = self._node.kind
        try:
            if self._buffers[0].nbytes:
                if others:
                    begin = first.mark(kind)
                    for lane in others:
                        lane.begin = begin
                with self._unchecked():
                    self._enqueue()
            self._node.parts = tuple(lane.newest for lane in others if lane.newest is not None)
            for end in self._node.parts:
                first.wait(end)
            return enqueue_end(first.queue, kind, self._node.declared)
        except BaseException:
            # Later work on these bytes waits for what was enqueued.
            self._node.parts = tuple(end for lane in (first, *others) for end in lane.after_all(kind))
            raise

    def _unchecked(self) -> contextlib.ExitStack:
        """Check no access inside the block: the end of the collective has the accesses of the node."""
        stack = contextlib.ExitStack()
        for resources in self._devices:
            if resources.checker is not None:
                stack.enter_context(resources.checker.acting_for(SourceLine.of_caller(), ()))
        return stack

    def _open_lanes(self, home: Stream, late: contextlib.ExitStack) -> list[_Lane]:
        """Choose the streams: ``home``, which comes first, and streams of the coordinator."""
        here, first = resources_of(home.device), _Lane(home)
        roles = ("compute",) if len(self._devices) == 1 else ("compute", "copy")
        for resources in self._devices:
            for role in roles:
                if resources is here and role == "compute":
                    self._lanes[resources, role] = first
                else:
                    lane = self._lanes[resources, role] = _Lane(
                        self._streams.of_device(resources, role, self._node.rank)
                    )
                    if self._streams.let_in(resources, lane.queue):
                        late.callback(resources.streams.refuse_but_accepted, lane.queue)
                    lane.queue.check()
                    if lane.queue.poison is not None:  # of an earlier collective, whose node has the failure
                        lane.queue.poison.delivered = True
        return list(dict.fromkeys((first, *self._lanes.values())))

    def _lane(self, buffer: DeviceBuffer, role: str) -> _Lane:
        return self._lanes[resources_of(buffer.device), role]

    def _enqueue(self) -> None:
        """Enqueue the copies and kernels."""
        raise NotImplementedError


class Broadcast(Collective):
    """Copies one buffer to others.

    Each device gets the bytes once from another device, in a binary tree of devices, and copies them to its other
    targets. A device reads and writes the bytes once for each of its targets.
    """

    def __init__(
        self, node: ScheduledNode[Any], streams: CoordinatorStreams, source: DeviceBuffer,
        targets: Sequence[DeviceBuffer],
    ) -> None:  # fmt: skip
        super().__init__(node, streams, (source, *targets))

    def _enqueue(self) -> None:
        source, *targets = (_flat(buffer, buffer.dtype) for buffer in self._buffers)
        first: list[DeviceBuffer] = [source]  # of each device; the first targets of the others, in a tree
        copies: list[tuple[DeviceBuffer, DeviceBuffer]] = []  # within a device: target and source
        held = {resources_of(source.device): source}
        for target in targets:
            resources = resources_of(target.device)
            if resources in held:
                copies.append((target, held[resources]))
            else:
                held[resources] = target
                first.append(target)
        arrived: list[StreamOperation[Any] | None]
        step = _chunk_size(source.size, source.dtype.itemsize) if len(first) > 1 else source.size
        for low, high in _chunks(0, source.size, step):
            arrived = [None]
            for number in range(1, len(first)):
                parent = (number - 1) // 2
                target, lane = first[number], self._lane(first[number], "copy")
                lane.wait(arrived[parent])
                arrived.append(lane.copy(_cut(target, low, high), _cut(first[parent], low, high)))
            for target, origin in copies:
                lane = self._lane(target, "compute")
                lane.wait(arrived[first.index(origin)])
                lane.copy(_cut(target, low, high), _cut(origin, low, high))


class Reduction(Collective):
    """Combines sources, item by item and in their order, and writes the result to all targets, or to all sources.

    A device *owns* a part of the items: of a reduction with one target, the target's device owns all; otherwise all
    devices own equal parts, and of small buffers fewer devices. The owner gets the chunks of its part from the other
    devices, combines them with its own, and writes the result to its targets (reduce-scatter). Then it copies the
    result to the targets on other devices (all-gather).

    On one device, a reduction of up to 8 buffers reads each source once and writes each target once.
    """

    def __init__(
        self, node: ScheduledNode[Any], streams: CoordinatorStreams, sources: Sequence[DeviceBuffer],
        targets: Sequence[DeviceBuffer], operation: object,
    ) -> None:  # fmt: skip
        super().__init__(node, streams, sources if targets is sources else (*sources, *targets))
        check_aligned(self._buffers)
        self._fold: Fold = fold_of(operation, sources[0].dtype)
        self._count = len(sources)
        self._is_in_place = targets is sources

    def _enqueue(self) -> None:
        fold = self._fold
        items = [_flat(buffer, fold.items) for buffer in self._buffers]
        sources, targets = items[: self._count], items if self._is_in_place else items[self._count :]
        if len(self._devices) == 1 and len(sources) <= MOST:
            home = self._devices[0]
            _combine(self._lanes[home, "compute"], home, fold, sources, targets, None)
            return
        owners = list(dict.fromkeys(resources_of(target.device) for target in targets))
        bounds = _bounds(sources[0].size, fold.items.itemsize, len(owners))
        parts = [
            _Part(self._lanes, owner, sources, targets, fold, start, stop)
            for owner, (start, stop) in zip(owners, itertools.pairwise(bounds), strict=False)
        ]
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.callback(part.free)
                part.allocate()
            rounds = [part.scatter() for part in parts]
            while rounds:  # a chunk of each part in turn, so that all devices begin at once
                rounds = [each for each in rounds if next(each, None) is not None]
            for part in parts:
                part.gather()


class _Part:
    """The part of a reduction that one device owns."""

    def __init__(
        self, lanes: dict[tuple[DeviceResources, str], _Lane], owner: DeviceResources,
        sources: Sequence[DeviceBuffer], targets: Sequence[DeviceBuffer], fold: Fold, start: int, stop: int,
    ) -> None:  # fmt: skip
        self._lanes = lanes
        self._owner = owner
        self._sources = sources
        self._own = [target for target in targets if resources_of(target.device) is owner]
        self._others = [target for target in targets if resources_of(target.device) is not owner]
        self._away = [source for source in sources if resources_of(source.device) is not owner]
        self._fold = fold
        self._start, self._stop = start, stop
        self._step = stop - start
        if self._away or len(sources) > MOST:
            self._step = min(self._step, _chunk_size(self._step, fold.items.itemsize))
        self._partial: DeviceBuffer | None = None
        self._scratch: DeviceBuffer | None = None
        self._landings: list[list[DeviceBuffer]] = []  # views of it: for one chunk, and for the next one

    def allocate(self) -> None:
        """Allocate memory for partial results, and for two chunks of each source on another device."""
        if self._step == 0:
            return
        compute = self._lanes[self._owner, "compute"].stream
        if len(self._sources) > MOST:
            self._partial = compute.empty(self._step, self._fold.partial)
        slots, landing = 2 if self._step < self._stop - self._start else 1, _packs(self._step)
        self._landings = [[] for _ in range(slots)]
        if self._away:
            self._scratch = compute.empty(slots * len(self._away) * landing, self._fold.items)
            for number in range(slots * len(self._away)):
                self._landings[number % slots].append(self._scratch[number * landing : (number + 1) * landing])

    def free(self) -> None:
        """Free that memory, after the work that uses it."""
        for buffer in (self._scratch, self._partial):
            if buffer is not None:
                buffer.free()

    def scatter(self) -> Iterator[StreamOperation[Any]]:
        """Combine the chunks of this part, one for each step, and yield the newest operation of each."""
        compute = self._lanes[self._owner, "compute"]
        read: list[StreamOperation[Any] | None] = [None] * len(self._landings)  # when a landing can be used again
        for number, (low, high) in enumerate(_chunks(self._start, self._stop, self._step)):
            slot = number % len(self._landings)
            landings = iter(self._landings[slot])
            parts: list[DeviceBuffer] = []
            for source in self._sources:
                part = _cut(source, low, high)
                carrier = resources_of(source.device)
                if carrier is not self._owner:
                    landing = _cut(next(landings), 0, high - low)
                    copies = self._lanes[carrier, "copy"]
                    copies.wait(read[slot])
                    compute.wait(copies.copy(landing, part))
                    part = landing
                parts.append(part)
            own = [_cut(target, low, high) for target in self._own]
            read[slot] = combined = _combine(compute, self._owner, self._fold, parts, own, self._partial)
            yield combined

    def gather(self) -> None:
        """Copy the result of this part to the targets on other devices, behind the kernel.

        On two H200s, an all-reduce of 256 MB takes 1.1 ms so, and 1.4 ms if the other devices copy it.
        """
        if self._start == self._stop:
            return
        compute = self._lanes[self._owner, "compute"]
        result = _cut(self._own[0], self._start, self._stop)
        for target in self._others:
            compute.copy(_cut(target, self._start, self._stop), result)


def _combine(
    lane: _Lane, owner: DeviceResources, fold: Fold, sources: list[DeviceBuffer], targets: list[DeviceBuffer],
    partial: DeviceBuffer | None,
) -> StreamOperation[Any]:  # fmt: skip
    """Enqueue the kernels for one chunk, each with up to 8 sources. Targets from the 9th on get copies."""
    count, written = sources[0].size, targets[:MOST]
    scratch = written[0] if partial is None else _cut(partial, 0, count)
    grid = max(1, min(-(-count // THREADS), BLOCKS * owner.properties.multiprocessors))
    operation: StreamOperation[Any] | None = None
    for first in range(0, len(sources), MOST):
        group = sources[first : first + MOST]
        flags = CONTINUES * (first > 0) | UNFINISHED * (first + MOST < len(sources))
        operation = lane.launch(
            fold, grid, count, len(group), len(written), flags, scratch,
            *group, *group[:1] * (MOST - len(group)), *written, *written[:1] * (MOST - len(written)),
        )  # fmt: skip
    for target in targets[MOST:]:
        operation = lane.copy(target, written[0])
    assert operation is not None
    return operation


def _flat(buffer: DeviceBuffer, dtype: np.dtype[Any]) -> DeviceBuffer:
    """Return a buffer with one dimension, and a dtype with items of the same size: itself, or a view."""
    if len(buffer.shape) != 1:
        buffer = buffer.reshape(-1)
    return buffer if buffer.dtype == dtype else buffer.view(dtype)


def _cut(buffer: DeviceBuffer, low: int, high: int) -> DeviceBuffer:
    """Return the items of a part of a buffer with one dimension: itself, or a view."""
    return buffer if low == 0 and high == buffer.shape[0] else buffer[low:high]


def _chunks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Return the bounds of consecutive chunks."""
    for low in range(start, stop, max(1, step)):
        yield low, min(low + max(1, step), stop)
