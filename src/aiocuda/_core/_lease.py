"""Lease: a CUDA event on loan to an operation, with a generation for each loan."""

from __future__ import annotations

__all__ = ["Lease"]


class Lease:
    """A CUDA event.

    Attributes
    ----------
    handle : int
        The event, as the driver names it.
    word : int
        The event, as the functions of a `Native` take it; 0 until one of them has needed it.
    timing : bool
        True if the event records the time.
    home : list of Lease
        The list of idle leases that it returns to.
    generation : int
        Rises each time the event is returned, so that a stale loan can be detected.
    lent : bool
        True while a user's `Event` holds it. Then the operation that has recorded it does not return it.
    """

    __slots__ = ("generation", "handle", "home", "lent", "timing", "word")

    def __init__(self, handle: int, timing: bool, home: list[Lease]) -> None:
        self.handle = handle
        self.timing = timing
        self.home = home
        self.generation = 0
        self.lent = False
        self.word = 0
