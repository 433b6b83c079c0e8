"""DeferredFrees: freed memory that something still uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._block import Block

if TYPE_CHECKING:
    from ..completion._operation import Operation
    from ..completion._stream_queue import StreamQueue

__all__ = ["MOST_LOOKED_AT", "DeferredFrees", "Freed"]

#: Blocks that one call looks at, where it is made for each buffer. A tick of the watchdog looks at all.
MOST_LOOKED_AT = 16

B = TypeVar("B", bound=Block)


class DeferredFrees(Generic[B]):
    """Freed blocks that are looked at in turn, until nothing uses them any more.

    With each block stands one operation that uses it. As long as that has not passed, a look costs no more than that.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[tuple[B, Operation[Any] | None]] = deque()

    def add(self, block: B) -> None:
        """It has been freed."""
        self._waiting.append((block, None))

    def take(self, most: int | None = None) -> Iterator[B]:
        """The blocks that nothing uses any more, of the next ``most``; of all if there is no number."""
        for _ in range(len(self) if most is None else min(most, len(self))):
            try:
                block, user = self._waiting.popleft()
            except IndexError:
                return  # another loop was quicker
            if user is not None and not user.is_settled:
                self._waiting.append((block, user))
            elif block.in_use:
                self._waiting.append((block, next(iter(block.unfinished()), None)))
            else:
                yield block

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)


class Freed:
    """A block that has been freed, and the queue in whose order it is to go back.

    With it stands an operation that uses it and is still on the host. As long as that is, a look costs no more than
    that.
    """

    __slots__ = ("_user", "block", "queue")

    def __init__(self, block: Block, queue: StreamQueue | None) -> None:
        self.block = block
        self.queue = queue
        self._user: Operation[Any] | None = None

    @property
    def address(self) -> int:
        return self.block.address

    def waits(self) -> bool:
        """Is something that uses it still on the host?"""
        user = self._user
        if user is None or user.lease is not None or user.is_settled:
            unfinished = self.block.unfinished()
            user = self._user = next((operation for operation in unfinished if operation.lease is None), None)
        return user is not None
