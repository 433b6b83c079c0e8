"""Checking: what a checker is told of a coordinator's operations: who comes behind whom, and what was said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..completion.lane import Lane
from ..completion.operation import Operation
from ..completion.predict import INSTANT
from ..memory.block import Block
from ..stream import CheckedStream, Checker
from ..stream.checker import Touch
from ..types import Place

if TYPE_CHECKING:
    from ..stream import Stream
    from .graph import Access
    from .node import Node

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


def follow(lane: Lane, operation: Operation[Any]) -> None:
    """What `Lane.follow` does, with the checker told."""
    lane.follow(operation)
    stream = lane.stream
    if isinstance(stream, CheckedStream):
        stream._checker.wait(lane, operation)


def watched(node: Node[Any], work: Callable[[Stream], Operation[Any]]) -> Callable[[Stream], Operation[Any]]:
    """Work whose verb is checked as what was said of it."""
    told = node._said
    assert told is not None

    def run(stream: Stream) -> Operation[Any]:
        with told.checker.acting_for(told.place, told.touches):
            return work(stream)

    return run


def end(node: Node[Any], lane: Lane) -> Operation[Any]:
    """What stands behind all that a bracket has enqueued."""
    if node._said is None:
        return lane.enqueue(node.kind, INSTANT, _nothing, ())
    checker, place, touches = node._said
    with checker.acting_for(place, touches), checker.access(lane, node.kind, touches) as enqueued:
        operation = lane.enqueue(node.kind, INSTANT, _nothing, ())
        enqueued.append(operation)
    return operation


def _nothing() -> None:
    """The end of what others have enqueued."""
