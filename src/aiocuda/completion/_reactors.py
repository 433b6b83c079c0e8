"""The reactors of one driver, and the work that they know to be unfinished."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .._base._shared import copied
from .._core import INTERNAL
from ..driver.protocol import Driver

if TYPE_CHECKING:
    from .._core import StreamOperation
    from ._reactor import Reactor

__all__ = ["oldest_unfinished", "reactors_of"]


def reactors_of(driver: Driver) -> dict[weakref.ref[Reactor], None]:
    """Return the reactors of a driver, of all devices and loops, in the order in which they were made."""
    reactors: dict[weakref.ref[Reactor], None] = driver.registry.setdefault("reactors", {})
    return reactors


def oldest_unfinished(driver: Driver, most: int) -> list[StreamOperation[Any]]:
    """Return the oldest unfinished operation of each stream of a driver, for at most ``most`` streams. Any thread.

    An operation that waits on the host does not count. One that the device has finished counts until its loop has seen
    the end: no query is made.
    """
    found: list[StreamOperation[Any]] = []
    for known in list(reactors_of(driver)):
        reactor = known()
        for queue in () if reactor is None else list(reactor.queues):
            pending = copied(queue.pending)
            if pending:
                first = pending[0]
                if first.kind is INTERNAL:
                    first = next((each for each in pending if each.kind is not INTERNAL), first)
                found.append(first)
            if len(found) == most:
                return found
    return found
