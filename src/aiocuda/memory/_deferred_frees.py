"""Deferred frees: freed memory that something still uses."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._block import Block

if TYPE_CHECKING:
    from .._core import Ring, StreamOperation

__all__ = ["SWEEP_LIMIT", "DeferredFree", "DeferredFrees"]

#: Blocks that a sweep looks at when it runs for each new buffer. The sweep of a watchdog's tick looks at all.
SWEEP_LIMIT = 16

B = TypeVar("B", bound=Block)


class DeferredFrees(Generic[B]):
    """Freed blocks that operations still use. Each is looked at in turn.

    Each entry remembers one operation that uses its block. Until that operation has passed, looking at the entry means
    only to test it.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        # Several loops add and take blocks. An empty deque would take 760 bytes, a `SimpleQueue` 150.
        self._waiting: SimpleQueue[tuple[B, StreamOperation[Any] | None]] = SimpleQueue()

    def add(self, block: B) -> None:
        """Add a block that has been freed."""
        self._waiting.put((block, None))

    def take(self, most: int | None = None) -> Iterator[B]:
        """Remove and yield the blocks that nothing uses, among the next ``most`` blocks; None means all blocks."""
        for _ in range(len(self) if most is None else min(most, len(self))):
            try:
                block, user = self._waiting.get_nowait()
            except Empty:
                return  # another loop has taken it
            if user is not None and not user.is_settled:
                self._waiting.put((block, user))
            elif block.in_use:
                self._waiting.put((block, next(iter(block.unfinished()), None)))
            else:
                yield block

    def clear(self) -> None:
        """Remove all blocks."""
        self._waiting = SimpleQueue()

    def __len__(self) -> int:
        return self._waiting.qsize()


class DeferredFree:
    """A block of device memory that cannot be freed yet, and the queue that it is freed in.

    The free waits because an operation that uses the block is still on the host, and has no event yet. The entry
    remembers one such operation. As long as it stays on the host, a look at the entry tests only that operation.
    """

    __slots__ = ("_user", "block", "queue")

    def __init__(self, block: Block, queue: Ring | None) -> None:
        self.block = block
        self.queue = queue
        self._user: StreamOperation[Any] | None = None

    @property
    def address(self) -> int:
        """The block's address."""
        return self.block.address

    def waits(self) -> bool:
        """True while an operation that uses the block is still on the host."""
        user = self._user
        if user is None or user.lease is not None or user.is_settled:
            unfinished = self.block.unfinished()
            user = self._user = next((operation for operation in unfinished if operation.lease is None), None)
        return user is not None
