"""Batch: the items that the function of a `MicroBatcher` gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from .._base._types import ProcessLocal
from ..pipeline import Slot
from ..stream import Stream

__all__ = ["Batch"]

Item = TypeVar("Item")


class Batch(ProcessLocal, Generic[Item]):
    """The items of one call, in the order in which they are served.

    Attributes
    ----------
    items : list
        One for each request, as it was passed to ``submit``.
    weight : int
        The sum of the items' weights; without ``weight=``, the number of items.
    padded : int
        The smallest of ``buckets`` that is not below the weight; without ``buckets=``, the weight.
    number : int
        Counts the batches of the batcher, from 0.
    slot : aiocuda.pipeline.Slot or None
        Memory that stays with the stream, from batch to batch: ``slot.buffer(name, shape, dtype)`` on the device,
        ``slot.pinned(name, shape, dtype)`` on the host. Parts of results in it are copied. If anything else refers to
        it when the next batch begins, the slot takes other memory. None without ``device=``.
    stream : Stream or None
        A stream that no other running batch uses. A batch ends when the work on it is done. None without ``device=``.
    """

    __slots__ = ("items", "number", "padded", "slot", "stream", "weight")

    def __init__(
        self, items: Iterable[Item], number: int, weight: int, padded: int, slot: Slot | None, stream: Stream | None
    ) -> None:
        self.items = list(items)
        self.number = number
        self.weight = weight
        self.padded = padded
        self.slot = slot
        self.stream = stream

    @property
    def size(self) -> int:
        """The number of items."""
        return len(self.items)

    def __repr__(self) -> str:
        return f"<Batch {self.number}: {self.size} items, weight {self.weight}, padded to {self.padded}>"
