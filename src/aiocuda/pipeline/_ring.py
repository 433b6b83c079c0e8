"""TripleBuffer: a ring of slots, three by default."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import _get_running_loop
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from .._base._types import ProcessLocal
from ..errors import InvalidArgumentError, InvalidTypeError, StaleHandleError, WrongLoopError
from ._slot import Slot, SlotContents, SlotState

if TYPE_CHECKING:
    from ._item import PipelineItem

__all__ = ["MAX_SLOTS", "PipelineRing", "TripleBuffer"]

#: No pipeline has stages for more slots than this: a greater depth is a mistake.
MAX_SLOTS = 1024


class TripleBuffer(ProcessLocal):
    """A ring of slots, each of which is in turn free → uploading → processing → downloading → free.

    With three slots, one item is uploaded while another is processed and a third one downloaded. Any number of
    coroutines of one loop may share a ring. A coroutine that finds no free slot waits; slots go to waiters in the order
    of their calls. This is the back-pressure. A `Pipeline` has a ring; a program that moves its own data can use one
    directly::

        ring = TripleBuffer()
        async with ring.slot(item) as slot:
            await upload.copy(buffers[slot.number], slot.item)
            slot.enter("processing")
            ...

    Parameters
    ----------
    depth
        The number of slots, 1 to 1024.
    now
        The clock for statistics; it returns seconds.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        A depth out of range, or no integer.
    """

    def __init__(self, depth: int = 3, *, now: Callable[[], float] = time.perf_counter) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int):
            raise InvalidTypeError(f"depth is an integer, not {depth!r}")
        if not 1 <= depth <= MAX_SLOTS:
            raise InvalidArgumentError(f"depth is from 1 to {MAX_SLOTS}, and this is {depth}", limit=MAX_SLOTS)
        self._slots = [Slot(number) for number in range(depth)]
        self._free: deque[Slot] = deque(self._slots)
        self._taken: set[Slot] = set()  # not in `_free`: reserved, or busy
        self._busy: set[Slot] = set()
        self._waiting: OrderedDict[asyncio.Future[Slot], None] = OrderedDict()  # for a slot; no slot is free then
        self._loop: asyncio.AbstractEventLoop | None = None
        self._now = now
        self._peak_busy = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0

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

    def reset_statistics(self) -> None:
        """Restart the statistics."""
        self._peak_busy = len(self._busy)
        self._busy_seconds = 0.0
        self._busy_since = self._now()

    # -- acquire and release -------------------------------------------------------------------------------------

    async def acquire(self, item: Any = None) -> Slot:
        """Wait for a free slot, put the item into it, and return it; it is uploading."""
        slot = await self.reserve()
        slot.enter("uploading")
        self._begin(slot, item, None)
        return slot

    async def reserve(self) -> Slot:
        """Wait for a free slot and return it, for an item that comes later. Nothing else can acquire the slot."""
        loop = self._claim_loop()
        if self._free:
            return self._take()
        waiter: asyncio.Future[Slot] = loop.create_future()
        self._waiting[waiter] = None
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._waiting.pop(waiter, None)
            else:  # it received a slot before the cancellation
                slot = waiter.result()
                self._taken.discard(slot)
                self._hand_on(slot)
            raise

    def _claim_loop(self) -> asyncio.AbstractEventLoop:
        """Bind the ring to the running loop, and return the loop.

        `WrongLoopError` if another loop holds slots of the ring.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._taken:
                raise WrongLoopError("this ring's slots are in use by another event loop: make a ring in each loop")
            self._loop = loop
        return loop

    def _take(self) -> Slot:
        slot = self._free.popleft()
        self._taken.add(slot)
        return slot

    def _hand_on(self, slot: Slot) -> None:
        """Give the slot to the first waiter, so that no later caller overtakes it; without waiters, it is free."""
        while self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
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
        busy.add(slot)
        if len(busy) > self._peak_busy:
            self._peak_busy = len(busy)
        return contents

    def release(self, slot: Slot) -> None:
        """Make the slot free. Nothing may use its memory any more.

        Raises
        ------
        StaleHandleError
            The slot was released before, or belongs to another ring.
        """
        if type(slot) is not Slot:
            _check_is_slot(slot)
        if slot not in self._taken:
            raise StaleHandleError(
                f"{slot!r} is not taken from this ring: a slot is released once, where it was acquired"
            )
        self._taken.discard(slot)
        if slot in self._busy:
            self._busy.discard(slot)
            if not self._busy:
                self._busy_seconds += self._now() - self._busy_since
        contents, slot._stream = slot._contents, None
        contents.item = contents.progress = None  # the memory stays
        contents.states.clear()
        if self._waiting:
            self._hand_on(slot)
        else:
            self._free.append(slot)

    @contextlib.asynccontextmanager
    async def slot(self, item: Any = None) -> AsyncIterator[Slot]:
        """Acquire a slot for the time of the block."""
        slot = await self.acquire(item)
        try:
            yield slot
        finally:
            self.release(slot)

    def free_buffers(self) -> None:
        """Release the memory of all free slots."""
        for slot in self._free:
            slot.free_buffers()

    def __repr__(self) -> str:
        return f"<TripleBuffer {self.busy} of {self.depth} slots busy>"


class PipelineRing(TripleBuffer):
    """The ring of a pipeline. A slot is reserved first, then the source is asked for the item.

    Attributes
    ----------
    free : deque of Slot
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

    #: The same for the pipeline's items.
    begin = TripleBuffer._begin

    def take(self) -> Slot:
        """Reserve a free slot, of which there is at least one."""
        if self._loop is not _get_running_loop():
            self._claim_loop()
        slot = self._free.popleft()
        self._taken.add(slot)
        return slot

    def replace(self, slot: Slot) -> None:
        """Release a slot although the device may still use its memory. A new slot, without memory, takes its place."""
        new = self._slots[slot.number] = Slot(slot.number)
        for slots in (self._taken, self._busy):
            if slot in slots:
                slots.remove(slot)
                slots.add(new)
        self.release(new)


def _check_is_slot(slot: object) -> None:
    if not isinstance(slot, Slot):
        raise InvalidTypeError(f"release takes a slot of this ring, not {slot!r}")
