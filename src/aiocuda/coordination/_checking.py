"""Checking: what a checker is told of a coordinator's operations: who comes behind whom, and what was said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .._types import Place
from ..completion._operation import Operation
from ..completion._prediction import INSTANT
from ..completion._stream_queue import StreamQueue
from ..memory._block import Block
from ..stream import CheckedStream, Checker
from ..stream._checker import Touch

if TYPE_CHECKING:
    from ..stream import Stream
    from ._dependencies import Access
    from ._node import Node

__all__ = ["Said", "end", "follow", "said", "watched"]


class Said(NamedTuple):
    """Where in the user's code an operation was registered, and what it touches."""

    checker: Checker
    place: Place
    touches: Sequence[Touch]


def said(checker: Checker, accesses: Sequence[Access]) -> Said:
    """What is registered just now."""
    touches = [
        Touch(memory, start, stop, reads, writes)
        for memory, start, stop, reads, writes in accesses
        if isinstance(memory, Block)
    ]
    return Said(checker, Place.of_caller(), touches)


def follow(queue: StreamQueue, operation: Operation[Any]) -> None:
    """What `StreamQueue.follow` does, with the checker told."""
    queue.follow(operation)
    stream = queue.stream
    if isinstance(stream, CheckedStream):
        stream._checker.wait(queue, operation)


def watched(node: Node[Any], work: Callable[[Stream], Operation[Any]]) -> Callable[[Stream], Operation[Any]]:
    """Work whose verb is checked as what was said of it."""
    told = node._said
    assert told is not None

    def run(stream: Stream) -> Operation[Any]:
        with told.checker.acting_for(told.place, told.touches):
            return work(stream)

    return run


def end(node: Node[Any], queue: StreamQueue) -> Operation[Any]:
    """What stands behind all that a bracket has enqueued."""
    if node._said is None:
        return queue.enqueue(node.kind, INSTANT, _nothing, ())
    checker, place, touches = node._said
    with checker.acting_for(place, touches), checker.access(queue, node.kind, touches) as enqueued:
        operation = queue.enqueue(node.kind, INSTANT, _nothing, ())
        enqueued.append(operation)
    return operation


def _nothing() -> None:
    """The end of what others have enqueued."""
