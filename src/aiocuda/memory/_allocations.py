"""Allocations: the live blocks that the program has allocated through one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import ref

if TYPE_CHECKING:
    from .._core import Ring
    from ._block import Block

__all__ = ["Allocations", "HasAllocations"]

#: Entries from which dead ones are removed, at least.
LEAST = 64


class Allocations:
    """The blocks that the program has allocated through one `Stream` object, the oldest first.

    The references are weak, so that a dropped buffer is freed as before. `Stream.empty` and the upload of a small
    array, which are hot, do what `add` does without its call.
    """

    __slots__ = ("most", "references")

    def __init__(self) -> None:
        self.references: list[ref[Block]] = []
        #: More references than this make `add` remove the dead ones. Twice the live ones: constant time for each.
        self.most = LEAST

    def add(self, block: Block) -> None:
        """Add a new block."""
        self.references.append(ref(block))
        if len(self.references) > self.most:
            self.live()

    def live(self) -> list[Block]:
        """Return the blocks that are not freed, and forget the others."""
        blocks = [block for reference in self.references if (block := reference()) is not None and not block.freed]
        self.references = [ref(block) for block in blocks]
        self.most = max(LEAST, 2 * len(blocks))
        return blocks

    def __len__(self) -> int:
        return len(self.references)


class HasAllocations(Protocol):
    """An `aiocuda.Stream`, whose package lies above this one."""

    @property
    def _queue(self) -> Ring: ...

    @property
    def _allocations(self) -> Allocations: ...
