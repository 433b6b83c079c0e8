"""TripleBuffer: a ring of slots, three unless told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from .._types import ProcessLocal
from .._wakeups import Waiters
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, StaleHandleError, WrongLoopError
from ._slot import Carrier, Slot, SlotState

__all__ = ["TripleBuffer"]

#: More slots than any pipeline has stages for: beyond it, a depth is a mistake.
MOST_SLOTS = 1024


class TripleBuffer(ProcessLocal):
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
    now
        The clock that `busy_seconds` goes by.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        A depth out of range, or no integer.
    """

    def __init__(self, depth: int = 3, *, now: Callable[[], float] = time.perf_counter) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int):
            raise InvalidTypeError(f"depth is an integer, not {depth!r}")
        if not 1 <= depth <= MOST_SLOTS:
            raise InvalidArgumentError(f"depth is from 1 to {MOST_SLOTS}, and this is {depth}", limit=MOST_SLOTS)
        self._slots = [Slot(number) for number in range(depth)]
        self._free: deque[Slot] = deque(self._slots)
        self._taken: set[Slot] = set()  # not in `_free`: reserved, or busy
        self._busy: set[Slot] = set()
        self._waiting: Waiters[asyncio.Future[Slot]] = Waiters()  # for a slot; none is free then
        self._loop: asyncio.AbstractEventLoop | None = None
        self._now = now
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
        return len(self._busy)

    @property
    def peak_busy(self) -> int:
        """The most that were busy at once; counted where a slot is taken."""
        return self._peak

    @property
    def busy_seconds(self) -> float:
        """Host time during which at least one slot was busy."""
        return self._busy_seconds + (self._now() - self._busy_since if self._busy else 0.0)

    def reset_statistics(self) -> None:
        """Begin `peak_busy` and `busy_seconds` anew."""
        self._peak = len(self._busy)
        self._busy_seconds = 0.0
        self._busy_since = self._now()

    # -- taking and giving back ----------------------------------------------------------------------------------

    async def acquire(self, item: Any = None) -> Slot:
        """A slot, uploading, with the item in it; waits while none is free."""
        slot = await self.reserve()
        self.begin(slot, item)
        return slot

    async def reserve(self) -> Slot:
        """A slot for an item that is still to come: nobody else gets it, and it is free until `begin`."""
        loop = self._belong()
        if self._free:
            return self._take()
        turn: asyncio.Future[Slot] = loop.create_future()
        self._waiting.add(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.discard(turn)
            else:  # it was handed over just before
                slot = turn.result()
                self._taken.discard(slot)
                self._hand_on(slot)
            raise

    @property
    def has_free(self) -> bool:
        """Is a slot free? Nobody waits for one then."""
        return bool(self._free)

    def reserve_nowait(self) -> Slot:
        """The same as `reserve`, at once.

        Raises
        ------
        BusyError
            None is free.
        """
        self._belong()  # first: in another loop there is nothing to wait for
        slot = self.take_if_free()
        if slot is None:
            raise BusyError(f"{self!r}: wait for one by `await ring.reserve()`")
        return slot

    def take_if_free(self) -> Slot | None:
        """The same as `reserve_nowait`, but None where none is free."""
        if not self._free:
            return None
        self._belong()
        return self._take()

    def _belong(self) -> asyncio.AbstractEventLoop:
        """The running loop: a ring serves one at a time."""
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
        """To who has waited longest, so that nobody overtakes him; else it is free."""
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                self._taken.add(slot)
                turn.set_result(slot)
                return
        self._free.append(slot)

    def begin(self, slot: Slot, item: Any, state: SlotState = "uploading", *, carrier: Carrier | None = None) -> None:
        """Put the item into a reserved slot, which is busy from now on; its state is this, or what a carrier says.

        Raises
        ------
        StaleHandleError
            The slot is busy already, or not reserved in this ring.
        """
        if type(slot) is not Slot:
            _check_slot(slot)
        busy = self._busy
        if slot not in self._taken or slot in busy:
            raise StaleHandleError(f"{slot!r} is not reserved in this ring: each item gets a slot by ring.reserve()")
        if carrier is None:
            slot.enter(state)
        slot.carry(item, carrier)
        if not busy:
            self._busy_since = self._now()
        busy.add(slot)
        if len(busy) > self._peak:
            self._peak = len(busy)

    def release(self, slot: Slot) -> None:
        """The slot is free. Nothing may use its memory any more.

        Raises
        ------
        StaleHandleError
            It was released before, or is another ring's.
        """
        self._take_back(slot)
        slot.clear()
        self._hand_on(slot)

    def replace(self, slot: Slot) -> None:
        """Release a slot whose memory a device will not let go of: a new one, with no memory yet, takes its place."""
        self._take_back(slot)
        fresh = self._slots[slot.number] = Slot(slot.number)
        self._hand_on(fresh)

    def _take_back(self, slot: Slot) -> None:
        if type(slot) is not Slot:
            _check_slot(slot)
        if slot not in self._taken:
            raise StaleHandleError(
                f"{slot!r} is not taken from this ring: a slot is released once, where it was acquired"
            )
        self._taken.discard(slot)
        if slot in self._busy:
            self._busy.discard(slot)
            if not self._busy:
                self._busy_seconds += self._now() - self._busy_since

    @contextlib.asynccontextmanager
    async def slot(self, item: Any = None) -> AsyncIterator[Slot]:
        """A slot for as long as the block lasts."""
        slot = await self.acquire(item)
        try:
            yield slot
        finally:
            self.release(slot)

    def free_buffers(self) -> None:
        """Free slots let go of their memory."""
        for slot in self._free:
            slot.free_buffers()

    def __repr__(self) -> str:
        return f"<TripleBuffer {self.busy} of {self.depth} slots busy>"


def _check_slot(slot: object) -> None:
    if not isinstance(slot, Slot):
        raise InvalidTypeError(f"a slot of this ring is meant, not {slot!r}")
