"""Place: a stream and a slot for one batch, for the time of a block."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..errors import AiocudaError
from ..pipeline import Slot, TripleBuffer
from ..stream import Stream

__all__ = ["Place"]


class Place:
    """Takes a place for the time of the block, and waits at its end for the work on its stream.

    One is free, so this does not wait for another batch. A failure of the work leaves the block, unless an exception
    does. This is no generator of `contextlib`, which sets ``__traceback__``: a frozen dataclass refuses that.
    """

    __slots__ = ("_item", "_ring", "_slot", "_streams")

    def __init__(self, ring: TripleBuffer, streams: Sequence[Stream], item: Any) -> None:
        self._ring = ring
        self._streams = streams
        self._item = item
        self._slot: Slot | None = None

    async def __aenter__(self) -> Slot | None:
        """Return the slot; None without a device."""
        if not self._streams:
            return None
        slot = self._slot = await self._ring.acquire(self._item)
        slot.stream = self._streams[slot.number]
        return slot

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        slot = self._slot
        if slot is None:
            return
        stream = self._streams[slot.number]
        try:
            if error is None:
                await stream.synchronize()
            else:
                await _finish_after(error, stream)
        finally:
            self._ring.release(slot)


async def _finish_after(error: BaseException, stream: Stream) -> None:
    """Wait for the work that a failed function has left on its stream, and add its failure to the error as a note."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return  # the batcher is being left
    try:
        await stream.synchronize()
    except AiocudaError as second:
        cause = second.__cause__ or second
        if cause is not error:
            error.add_note(f"the work on {stream.name!r} failed, too: {type(cause).__name__}: {cause}")
