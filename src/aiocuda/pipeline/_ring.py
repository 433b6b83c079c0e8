"""TripleBuffer: a ring of slots, three by default."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import time
from asyncio import _get_running_loop
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from sys import getrefcount
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from .._base._arrays import as_dtype, as_shape
from .._base._async_block import async_block
from .._base._mistakes import keywords, lacks, refuses
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._types import SourceLine
from .._base._wrong_loop import wrong_loop
from ..completion import Operation
from ..coordination import Node
from ..device import Device
from ..errors import AiocudaError, DeviceFault, InvalidArgumentError, InvalidTypeError, StaleHandleError, WrongLoopError
from ..lowlevel import CLOSED, StreamOperation, owned, queue_of, resources_of, when_passed
from ..stream import Stream
from ._slot import ENDED, Ends, Slot, SlotContents, SlotState, checked_name, failure_of_states, memory_of

if TYPE_CHECKING:
    from ._item import PipelineItem

__all__ = ["MAX_SLOTS", "PipelineRing", "TripleBuffer"]

#: No pipeline has stages for more slots than this: a greater depth is a mistake.
MAX_SLOTS = 1024


#: Makes an object without `__init__`.
_new: Callable[[type[Slot]], Slot] = object.__new__


@lacks
@refuses(__getitem__="has no items: `async with ring.slot(item) as slot`, or ring.upload_slot(), takes a free slot")
class TripleBuffer(Owner):
    """A ring of slots, each of which is in turn free → uploading → processing → downloading → free.

    With three slots, one item is uploaded while another is processed and a third one downloaded. Any number of
    coroutines of one loop may share a ring. A coroutine that finds no free slot waits; slots go to waiters in the order
    of their calls. This is the back-pressure. A `Pipeline` has a ring; a program that moves its own data can use one
    directly::

        ring = TripleBuffer()
        async with ring.slot(item) as slot:
            copied = upload.copy(buffers[slot.number], slot.item)
            slot.enter("uploading", until=copied)
            await copied
            ...

    The ring does not know memory of the program, such as ``buffers`` here. So ``until`` names each operation that uses
    it: if a cancellation leaves the block, the slot is free when they are over, and not before.

    With ``buffers``, each slot has device memory from the beginning. A program that does not wait for slots takes one
    by `upload_slot`, finds the others by `compute_slot` and `download_slot`, names the operation that ends a state by
    ``slot.enter(state, until=operation)``, and moves the slots on by `advance`::

        async with TripleBuffer(buffers={"x": (1024, np.float32)}, device=device) as ring:
            slot = ring.upload_slot()
            slot.enter("uploading", until=stream.copy(slot.buffer("x"), array))
            ...
            ring.advance()

    Such a ring belongs to the running loop, and ends by `aclose` or ``async with``. Without ``buffers`` it owns
    nothing, and both do nothing.

    Parameters
    ----------
    depth
        The number of slots, 1 to 1024.
    buffers
        The shape and dtype of each buffer of a slot, by its name: ``{"x": ((4, 4), np.float32)}``. They are allocated
        now, in a stream of the ring, so that ``slot.buffer(name)`` needs no ``slot.stream``.
    device
        The device of ``buffers``.
    now
        The clock for statistics; it returns seconds.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        A depth out of range, or no integer; ``buffers`` without a device, or a device without ``buffers``; no name, no
        shape or no dtype.
    DeviceOutOfMemory
        The device has not enough memory for ``buffers``.
    """

    @keywords(
        "TripleBuffer takes depth=, buffers=, device= and now=",
        "by position, a ring takes its depth: TripleBuffer(3, buffers={'x': (1024, np.float32)}, device=device)",
    )
    def __init__(
        self,
        depth: int = 3,
        *,
        buffers: Mapping[str, tuple[int | Sequence[int], npt.DTypeLike]] | None = None,
        device: Device | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int):
            cure = ": TripleBuffer(3, buffers={'x': (1024, np.float32)}, device=device)" * isinstance(depth, Device)
            raise InvalidTypeError(f"depth is an integer, not {depth!r}{cure}")
        if not 1 <= depth <= MAX_SLOTS:
            raise InvalidArgumentError(f"depth is from 1 to {MAX_SLOTS}, and this is {depth}", limit=MAX_SLOTS)
        self._watchers: list[Callable[[Slot], object]] = []  # of all slots: `_watch_soon`, while a task waits
        self._slots = [self._new_slot(number) for number in range(depth)]
        self._free = [*self._slots]  # the first is taken next; a deque would take 700 bytes more
        self._taken: set[Slot] = set()  # not in `_free`: reserved, or busy
        self._busy: dict[Slot, None] = {}  # in the order in which they were taken
        self._in_blocks: dict[Slot, None] = {}  # of `slot`, which releases them
        self._left: dict[Slot, None] = {}  # whose blocks have been left by exceptions
        #: Busy, because the device still uses their memory. The value is ``is_ended`` of `_make_free`.
        self._released: dict[Slot, bool] = {}
        self._waiting: OrderedDict[asyncio.Future[Slot], None] = OrderedDict()  # for a slot; no slot is free then
        self._watched: dict[Slot, None] = {}  # an operation of it calls `_watch`
        #: Numbers and states of the first slots with failures that were handed on: the next `advance` raises them.
        self._failed: list[tuple[int, list[tuple[SlotState, Ends]]]] = []
        self._is_advanced = False  # `advance` has been called: a slot whose last state has ended may become free
        self._loop: asyncio.AbstractEventLoop | None = None
        self._now = now
        self._peak_busy = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._scope: Scope | None = None  # None without buffers
        self._stream: Stream | None = None  # that has allocated them
        if buffers is not None or device is not None:
            self._allocate(_checked_buffers(buffers, device), device)

    def _new_slot(self, number: int) -> Slot:
        slot = Slot(number)
        slot._contents.watchers = self._watchers
        return slot

    def _allocate(self, buffers: dict[str, tuple[tuple[int, ...], np.dtype[Any]]], device: Any) -> None:
        """Make the stream, and the buffers of each slot."""
        resources = resources_of(device)
        stream = self._stream = owned(device.stream(name="triple buffer"))
        scope = self._scope = Scope(
            "this triple buffer", "make one in each loop, share the device",
            "make another one by aiocuda.TripleBuffer(buffers=buffers, device=device)", loop=_get_running_loop(),
            wrong_loop=resources.device_state.wrong_loop,
        )  # fmt: skip
        try:
            for slot in self._slots:
                made = {name: stream.empty(shape, dtype) for name, (shape, dtype) in buffers.items()}
                memory_of(slot).give(stream, made, scope)
        except BaseException:
            resources.streams.leave(queue_of(stream))
            raise
        use = "`async with aiocuda.TripleBuffer(buffers=buffers, device=device) as ring`"
        scope.must_end(use, SourceLine.of_caller(), lambda: stream.closed)

    # -- state and statistics ------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """The number of slots."""
        return len(self._slots)

    @property
    def states(self) -> tuple[SlotState, ...]:
        """The state of each slot, by the slot's number."""
        return tuple(slot.state for slot in self._slots)

    @property
    def busy(self) -> int:
        """The number of slots with an item."""
        return len(self._busy)

    @property
    def peak_busy(self) -> int:
        """The greatest number of slots that were busy at the same time."""
        return self._peak_busy

    def __len__(self) -> int:
        return len(self._slots)

    def compute_slot(self) -> Slot | None:
        """Return the oldest slot that is processing and has no operation yet; None if there is none.

        The oldest one was taken first. The call returns it again until ``slot.enter("processing", until=operation)``.
        """
        return self._oldest("processing")

    def download_slot(self) -> Slot | None:
        """Return the oldest slot that is downloading and has no operation yet; None if there is none.

        The oldest one was taken first. The call returns it again until ``slot.enter("downloading", until=operation)``.
        """
        return self._oldest("downloading")

    def _oldest(self, state: SlotState) -> Slot | None:
        self._claim_loop()
        for slot in self._busy:
            if slot.state == state and not slot._contents.last_ends and slot not in self._released:
                return slot
        return None

    def reset_statistics(self) -> None:
        """Restart the statistics."""
        self._peak_busy = len(self._busy)
        self._busy_seconds = 0.0
        self._busy_since = self._now()

    # -- acquire and release -------------------------------------------------------------------------------------

    async def acquire(self, item: Any = None) -> Slot:
        """Wait for a free slot, put the item into it, and return it; it is uploading.

        If the program has never called `advance`, only `release` makes a slot free. After the first call, a slot whose
        state ``"downloading"`` has ended becomes free without another one while a task waits. If one of its operations
        has failed, the next `advance` raises the failure.
        """
        slot = await self.reserve()
        slot.enter("uploading")
        self._begin(slot, item, None)
        return slot

    def upload_slot(self, item: Any = None) -> Slot | None:
        """Take a free slot, put the item into it, and return it; it is uploading. None if no slot is free.

        Other than `acquire`, this does not wait.
        """
        self._claim_loop()
        if not self._free:
            return None
        slot = self._take()
        slot.enter("uploading")
        self._begin(slot, item, None)
        return slot

    def advance(self) -> None:
        """Move each slot on whose last state has ended: uploading → processing → downloading → free.

        A state ends with the operations that ``slot.enter(state, until=…)`` names, when they are resolved on the event
        loop and the device is done with them. A slot whose last state names none does not move. The call does not wait.

        If an operation of a slot has failed, the slot becomes free when the others have ended: its item is lost. All
        slots are moved, then the failure is raised, once. An abandoned operation counts as failed.

        A slot with memory that other operations use stays busy until they are over, as after `release`. In an ``async
        with ring.slot()`` block, only the end of the block gives the slot back: it stays in its state.

        The first call is for all slots of the ring, and for those that are taken later: see `acquire`. A program that
        reads results after the last state has ended, and then calls `release`, does not call `advance`.

        Raises
        ------
        BaseException
            The failure of an operation, with a note that names slot and state. An `ExceptionGroup` if several slots
            failed. A device fault counts once.
        """
        self._claim_loop()
        if not self._is_advanced:
            self._is_advanced = True
            self._watch_all()
        found = [failure_of_states(states, number) for number, states in self._failed]
        self._failed.clear()
        failures = [failure for failure in found if failure is not None]
        for slot in tuple(self._busy):
            contents = slot._contents
            if contents.progress is not None or slot in self._released or not contents.is_over():
                continue
            failure = failure_of_states(contents.states, slot.number)
            if failure is not None:
                failures.append(failure)
            if failure is None and contents.advance():
                continue
            if slot in self._in_blocks:
                contents.stay()
            else:
                self.release(slot)
        if failures:
            fault = next((failure for failure in failures if isinstance(failure, DeviceFault)), None)
            if fault is None and len(failures) > 1:
                raise BaseExceptionGroup(f"{len(failures)} slots of a triple buffer failed", failures)
            raise fault or failures[0]

    async def reserve(self) -> Slot:
        """Wait for a free slot and return it, for an item that comes later. Nothing else can acquire the slot."""
        loop = self._claim_loop()
        if self._free:
            return self._take()
        waiter: asyncio.Future[Slot] = loop.create_future()
        self._waiting[waiter] = None
        if self._is_advanced:
            self._watch_all()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._waiting.pop(waiter, None)
            elif waiter.exception() is None:  # it received a slot before the cancellation
                slot = waiter.result()
                self._taken.discard(slot)
                self._hand_on(slot)
            raise
        finally:
            if not self._waiting:
                self._watchers.clear()

    def _watch_all(self) -> None:
        """Watch the slots of a ring that has been advanced, while a task waits."""
        if self._waiting and not self._watchers:
            self._watchers.append(self._watch_soon)
            for slot in [slot for slot in self._busy if slot._contents.progress is None]:
                self._watch(slot)

    def _watch_soon(self, slot: Slot) -> None:
        """Watch a slot that has entered a state, after the lines of the program that come next."""
        assert self._loop is not None
        self._loop.call_soon(self._watch, slot)

    def _watch(self, slot: Slot, called: object = None) -> None:
        """Release a slot whose state "downloading" has ended, or let one of its operations call this again.

        ``called`` is the last one. Nothing happens while no task waits.
        """
        contents = slot._contents
        if not self._waiting or slot not in self._busy or contents.progress is not None:
            return
        if slot in self._in_blocks or slot in self._released or slot in self._watched:
            return
        if not contents.last_ends or contents.states[-1][0] != "downloading":
            return
        unfinished = contents.unfinished()
        for end in unfinished[:1]:
            if end is not called and _call_when_over(end, functools.partial(self._watch_again, slot)):
                self._watched[slot] = None
                return
        if all(end.done() for end in unfinished):  # else one is of another loop: `advance` looks at it
            has_failed = any(end.state != "done" for _, ends in contents.states for end in ends)
            if has_failed and len(self._failed) < self.depth:  # a program may never call `advance`
                self._failed.append((slot.number, contents.states.copy()))
            self.release(slot)

    def _watch_again(self, slot: Slot, called: object) -> None:
        self._watched.pop(slot, None)
        self._watch(slot, called)

    def _claim_loop(self) -> asyncio.AbstractEventLoop:
        """Bind the ring to the running loop, and return the loop.

        Raises
        ------
        NoEventLoopError, WrongLoopError
            No loop runs; another loop holds slots of the ring, or has allocated its buffers.
        ClosedError
            The ring has buffers, and has been closed.
        """
        if self._scope is not None:
            self._scope.check()
        loop = _get_running_loop()
        if loop is None:
            raise wrong_loop(None, "this triple buffer", "make one in each loop")
        if self._loop is not loop:
            if self._loop is not None and self._loop.is_closed():  # it calls back for no slot
                self._waiting.clear()
                self._watchers.clear()
                self._watched.clear()
                for slot in tuple(self._released):
                    self._give_up(slot)
                for slot in self._taken.difference(self._busy):  # of tasks that have not run since they got them
                    self._taken.remove(slot)
                    self._free.append(slot)
            if self._taken:
                raise WrongLoopError("this ring's slots are in use by another event loop: make a ring in each loop")
            self._loop = loop
        return loop

    def _take(self) -> Slot:
        slot = self._free.pop(0)
        self._taken.add(slot)
        return slot

    def _hand_on(self, slot: Slot) -> None:
        """Give the slot to the first waiter, so that no later caller overtakes it; without waiters, it is free."""
        while self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done() and not waiter.get_loop().is_closed():
                self._taken.add(slot)
                waiter.set_result(slot)
                return
        self._free.append(slot)

    def _begin(self, slot: Slot, item: Any, progress: PipelineItem | None) -> SlotContents:
        """Put an item into a reserved slot, which is busy from now on, and return the slot's contents.

        Raises
        ------
        StaleHandleError
            The slot is busy already, or not reserved in this ring.
        """
        contents, busy = slot._contents, self._busy
        if slot not in self._taken or slot in busy:
            raise StaleHandleError(f"{slot!r} is not reserved in this ring: each item gets a slot by ring.reserve()")
        contents.put(item, progress)
        if not busy:
            self._busy_since = self._now()
        busy[slot] = None
        if len(busy) > self._peak_busy:
            self._peak_busy = len(busy)
        return contents

    def release(self, slot: Slot) -> None:
        """Give the slot back. Nothing may enqueue work on its memory any more.

        The slot is free when the operations and nodes that end its states, and those that use its memory, are over;
        until then it is busy. A node counts from its registration. The call does not wait. If the end of an operation
        cannot be known here, because it is of another event loop or of a closed device, the slot lets go of its memory,
        and the next call of `Slot.buffer` allocates.

        Raises
        ------
        StaleHandleError
            The slot was released before, or belongs to another ring; or the end of an ``async with ring.slot()`` block
            releases it.
        """
        self._check_taken(slot)
        if slot in self._in_blocks:
            raise StaleHandleError(f"{slot!r} is released by the end of its `async with ring.slot()` block, not before")
        self._release_now(slot, slot._contents.progress is not None)

    def _release_now(self, slot: Slot, is_ended: bool) -> None:
        self._released[slot] = is_ended
        self._free_when_over(slot)

    def _check_taken(self, slot: Slot) -> None:
        if not isinstance(slot, Slot):
            raise InvalidTypeError(f"release takes a slot of this ring, not {slot!r}")
        if slot not in self._taken or slot in self._released:
            raise StaleHandleError(
                f"{slot!r} is not taken from this ring: a slot is released once, where it was acquired"
            )

    def _free_when_over(self, slot: Slot, called: object = None) -> None:
        """Make a released slot free, or let one of its operations call this again. ``called`` is the last one."""
        if slot not in self._released:
            return
        end = next(iter(slot._contents.in_use()), None)
        if end is None:
            if slot in self._left:
                del self._left[slot]
                slot._contents.memory.renew()
            self._make_free(slot, self._released[slot])
        elif end is called or not _call_when_over(end, functools.partial(self._free_when_over, slot)):
            self._give_up(slot)

    def _give_up(self, slot: Slot) -> None:
        """Make a released slot free, without its memory: nothing finds out when the device is done with that."""
        self._left.pop(slot, None)
        slot._contents.memory.replace()
        self._make_free(slot, self._released[slot])

    def _make_free(self, slot: Slot, is_ended: bool = True) -> None:
        """Make a slot free, or give it to a waiter. The device is done with its memory.

        If its item, its batch or its block ``is_ended``, another object takes the place of this one, which tasks may
        still hold. The work on its own streams is over; operations of other streams may use memory that the slot cannot
        replace.
        """
        contents, memory = slot._contents, slot._contents.memory
        if is_ended and slot not in self._released and [*map(getrefcount, memory.owners)] != memory.own:
            if next(memory.in_use(fixed=True), None) is not None:
                self._released[slot] = True
                self._free_when_over(slot)
                return
        self._taken.discard(slot)
        self._released.pop(slot, None)
        if slot in self._busy:
            del self._busy[slot]
            if not self._busy:
                self._busy_seconds += self._now() - self._busy_since
        contents.item = contents.progress = None  # the memory stays
        contents.states.clear()
        if is_ended:
            new = self._slots[slot.number] = _new(Slot)  # without a call of `__init__`: this is a hot path
            new.number, new._contents, new._stage = slot.number, contents, ""
            for view in contents.views:
                view._contents, view._stream = ENDED, None
            contents.views.clear()
            slot._contents, slot._stream = ENDED, None
            slot = new
        slot._stream = None
        if self._waiting:
            self._hand_on(slot)
        else:
            self._free.append(slot)

    @async_block("ring.slot()", "takes a slot for an `async with` block: `async with ring.slot(item) as slot`")
    async def slot(self, item: Any = None) -> AsyncIterator[Slot]:
        """Acquire a slot for the time of the block, and `release` it at the end, however the block is left.

        When it is free, each use of this object raises `StaleHandleError`: the next block has another one.

        If an exception or a cancellation leaves the block, a thread of `Device.offload` may still use the memory of the
        slot. So the slot then takes other memory in place of pinned memory, and of buffers that the ring has not made,
        if anything else refers to it. `release` alone does not do so: await such functions before it.
        """
        slot = await self.acquire(item)
        self._in_blocks[slot] = None
        try:
            yield slot
        except BaseException:
            self._left[slot] = None
            raise
        finally:
            self._in_blocks.pop(slot, None)
            self._check_taken(slot)
            self._release_now(slot, is_ended=True)

    def free_buffers(self) -> None:
        """Release the memory of all slots that are not taken, except ``buffers``, which the ring has made."""
        for slot in (*self._free, *self._released):
            slot.free_buffers()

    # -- the end of a ring with buffers --------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Refuse new slots, wait for the operations that end states of slots, then free ``buffers`` and the stream.

        Tasks that wait for a slot get a `ClosedError`. The memory is freed on the device, behind all operations that
        use it. A cancellation frees it in the same order, without waiting. A second call waits for the same end.
        Failures of operations stay unread. Slots that are taken can still be released.

        Without ``buffers`` this does nothing.

        Raises
        ------
        WrongLoopError
            The ring belongs to another event loop. The call changes nothing.
        """
        if self._scope is not None:
            await self._scope.aclose(self)

    def _refuse(self) -> None:
        assert self._scope is not None
        while self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                waiter.set_exception(self._scope.closed_error())

    async def _drain(self) -> None:
        assert self._stream is not None
        while ends := self._ends():
            for end in ends:
                await _settle(end)
        await resources_of(self._stream.device).streams.drain([queue_of(self._stream)])

    def _ends(self) -> Ends:
        """Return what ends states of slots, and is not over."""
        return tuple(end for slot in self._busy for end in slot._contents.unfinished())

    async def _release(self, outcome: Outcome) -> None:
        assert self._stream is not None
        streams = resources_of(self._stream.device).streams
        found = (end if isinstance(end, Operation) else end.operation for end in self._ends())
        operations = [operation for operation in found if operation is not None]  # the ring has been left
        try:
            if not self._stream.closed:  # else the memory ends with the device
                for slot in self._slots:
                    with contextlib.suppress(DeviceFault):
                        memory_of(slot).free_given(operations)
        finally:
            streams.leave(queue_of(self._stream))

    async def __aenter__(self) -> Self:
        if self._scope is not None:
            self._scope.enter()
            if self._stream is not None and self._stream.closed:  # with the device
                raise self._scope.closed_error()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._scope is not None:
            await self._scope.exit(self, kind, error)

    def __repr__(self) -> str:
        return f"<TripleBuffer {self.busy} of {self.depth} slots busy>"


class PipelineRing(TripleBuffer):
    """The ring of a pipeline. A slot is reserved first, then the source is asked for the item.

    Attributes
    ----------
    free : list of Slot
        The free slots. If there is one, no coroutine waits for a slot.
    """

    def __init__(self, depth: int = 3, *, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(depth, now=now)
        self.free = self._free

    @property
    def busy_seconds(self) -> float:
        """Host time during which at least one slot was busy."""
        return self._busy_seconds + (self._now() - self._busy_since if self._busy else 0.0)

    @property
    def pinned_bytes(self) -> int:
        """The bytes of pinned memory of the slot that has most of it."""
        return max(sum(array.nbytes for array in slot._contents.memory.pinned.values()) for slot in self._slots)

    #: The same for the pipeline's items. The work of an item that ends is over.
    begin, end = TripleBuffer._begin, TripleBuffer._make_free

    def take(self) -> Slot:
        """Reserve a free slot, of which there is at least one."""
        if self._loop is not _get_running_loop():
            self._claim_loop()
        slot = self._free.pop(0)
        self._taken.add(slot)
        return slot

    def forget_replays(self) -> None:
        """Close the captured work of all slots, which have no items. Stages that are replayed capture it again."""
        for slot in self._slots:
            slot._contents.memory.forget_replays()

    def replace(self, slot: Slot) -> None:
        """Release a slot although the device may still use its memory. A new slot, without memory, takes its place."""
        self._check_taken(slot)
        new = self._slots[slot.number] = self._new_slot(slot.number)
        self._taken.remove(slot)
        if slot in self._busy:
            del self._busy[slot]
            self._busy[new] = None
        self._make_free(new, is_ended=False)


def _checked_buffers(buffers: Any, device: Any) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return the shape and dtype of each buffer."""
    rule = "buffers is a mapping like {'x': ((4, 4), np.float32)}"
    if buffers is None:
        raise InvalidArgumentError(f"a triple buffer uses {device!r} for its buffers only: name them, {rule}")
    if device is None:
        raise InvalidArgumentError("a triple buffer allocates its buffers on a device: TripleBuffer(…, device=device)")
    if not isinstance(device, Device):
        raise InvalidTypeError(f"a triple buffer allocates on an aiocuda.Device, not on {device!r}")
    if not isinstance(buffers, Mapping):
        raise InvalidTypeError(f"{rule}, not {buffers!r}")
    if not buffers:
        raise InvalidArgumentError(f"{rule}, and this one is empty: leave it and the device out")
    found = {}
    for name, entry in buffers.items():
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise InvalidTypeError(f"{rule}: shape and dtype; {name!r} has {entry!r}")
        kind = as_dtype(entry[1])
        found[checked_name(name)] = as_shape(entry[0], kind.itemsize), kind
    return found


def _call_when_over(end: Operation[Any] | Node[Any], function: Callable[[object], object]) -> bool:
    """Call a function when the device is done with an operation or a node. Return False if that cannot be known here.

    The function gets None if the end may go on: a node is done before its operation, which may be abandoned.
    """
    operation = end if isinstance(end, Operation) else end.operation
    context = contextvars.Context()
    try:
        if end.done() and isinstance(operation, StreamOperation):
            if operation.queue.obstacles & CLOSED:
                return False  # perhaps nothing watches its stream any more
            when_passed(operation, lambda _: function(end), context)
        else:
            end.add_done_callback(lambda _: function(None), context=context)
    except AiocudaError:  # of another loop, or of a closed device
        return False
    return True


async def _settle(end: Operation[Any] | Node[Any]) -> None:
    """Wait until the device has finished with an operation or a node, without reading its failure."""
    if not isinstance(end, Operation):
        ended = asyncio.Event()
        end.add_done_callback(lambda _: ended.set())
        await ended.wait()
    operation = end if isinstance(end, Operation) else end.operation
    if operation is not None:
        await operation.settle()
