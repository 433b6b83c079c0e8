"""TripleBuffer: a ring of slots, three unless told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from ..errors import InvalidArgumentError, InvalidTypeError, StaleHandleError, WrongLoopError
from .slot import Slot, SlotState

__all__ = ["TripleBuffer"]

#: More slots than any pipeline has stages for: beyond it, a depth is a mistake.
MOST_SLOTS = 1024


class TripleBuffer:
    """Slots that go round: free → uploading → processing → downloading → free.

    With three of them one item is uploaded while another is processed and a third one downloaded. Any number of
    coroutines of one loop may share a ring. Whoever wants a slot while none is free waits, first come first served:
    that is the back-pressure. A `Pipeline` has one; alone it serves code that moves its own data::

        ring = TripleBuffer()
        async with ring.slot(item) as slot:
            await upload.copy(buffers[slot.number], slot.item)
            slot.enter("processing")
            ...

    Parameters
    ----------
    depth
        How many slots, 1 to 1024.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        A depth out of range, or no integer.
    """

    def __init__(self, depth: int = 3) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int):
            raise InvalidTypeError(f"depth is an integer, not {depth!r}")
        if not 1 <= depth <= MOST_SLOTS:
            raise InvalidArgumentError(f"depth is from 1 to {MOST_SLOTS}, and this is {depth}", limit=MOST_SLOTS)
        self._slots = [Slot(number) for number in range(depth)]
        self._free: deque[Slot] = deque(self._slots)
        self._taken: set[Slot] = set()  # not in `_free`: reserved, or busy
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy = 0
        self._peak = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """How many slots."""
        return len(self._slots)

    @property
    def states(self) -> tuple[SlotState, ...]:
        """Each slot's state, by its number."""
        return tuple(slot.state for slot in self._slots)

    @property
    def busy(self) -> int:
        """How many slots carry an item."""
        return self._busy

    @property
    def peak_busy(self) -> int:
        """The most that were busy at once; counted where a slot is taken."""
        return self._peak

    # -- taking and giving back ----------------------------------------------------------------------------------

    async def acquire(self, item: Any = None) -> Slot:
        """A slot, uploading, with the item in it; waits while none is free."""
        slot = await self._reserve()
        self._begin(slot, item, "uploading")
        return slot

    def release(self, slot: Slot) -> None:
        """The slot is free. Nothing may use its memory any more.

        Raises
        ------
        StaleHandleError
            It was released before, or is another ring's.
        """
        if slot not in self._taken:
            raise StaleHandleError(
                f"{slot!r} is not taken from this ring: a slot is released once, where it was acquired"
            )
        self._taken.discard(slot)
        if slot._steps:
            self._busy -= 1
            if not self._busy:
                self._busy_seconds += time.perf_counter() - self._busy_since
        slot._clear()
        self._free.append(slot)
        self._wake()

    @contextlib.asynccontextmanager
    async def slot(self, item: Any = None) -> AsyncIterator[Slot]:
        """A slot for as long as the block lasts."""
        slot = await self.acquire(item)
        try:
            yield slot
        finally:
            self.release(slot)

    # -- what a pipeline does ------------------------------------------------------------------------------------

    async def _reserve(self) -> Slot:
        """A slot that nobody else gets. It is not busy until `_begin`."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._taken or self._waiting:
                raise WrongLoopError("this ring's slots are in use by another event loop: make a ring in each loop")
            self._loop = loop
        first = True
        while not self._free or (first and self._waiting):
            turn: asyncio.Future[None] = loop.create_future()
            if first:
                self._waiting.append(turn)
            else:
                self._waiting.appendleft(turn)  # somebody was quicker; the place in the line is kept
            first = False
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._wake()  # the place was ours already: pass it on
                raise
        slot = self._free.popleft()
        self._taken.add(slot)
        if self._free:
            self._wake()
        return slot

    def _begin(self, slot: Slot, item: Any, state: SlotState) -> None:
        """A reserved slot becomes busy."""
        slot.item = item
        slot.enter(state)
        if not self._busy:
            self._busy_since = time.perf_counter()
        self._busy += 1
        self._peak = max(self._peak, self._busy)

    def _replace(self, slot: Slot) -> None:
        """A device will not let go of the slot's memory: a new slot takes its place, with no memory yet."""
        self._taken.discard(slot)
        fresh = self._slots[slot.number] = Slot(slot.number)
        fresh._steps, slot._steps = slot._steps, []
        self._taken.add(fresh)
        self.release(fresh)

    def _forget(self) -> None:
        """Free slots let go of their memory."""
        for slot in self._free:
            slot._buffers.clear()
            slot._arrays.clear()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _busy_time(self) -> float:
        """Seconds during which at least one slot was busy."""
        return self._busy_seconds + (time.perf_counter() - self._busy_since if self._busy else 0.0)

    def _reset(self) -> None:
        self._peak = self._busy
        self._busy_seconds = 0.0
        self._busy_since = time.perf_counter()

    def __repr__(self) -> str:
        return f"<TripleBuffer {self._busy} of {self.depth} slots busy>"
