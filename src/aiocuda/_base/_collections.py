"""GarbageCollections: how long Python's garbage collector has held the interpreter, while a device is open."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["COLLECTIONS", "Collection", "GarbageCollections"]

#: Seconds. Shorter collections are only counted.
NOTED: Final = 1e-3

#: Noted collections that are kept.
MOST_KEPT: Final = 256


class Collection(NamedTuple):
    """One garbage collection. In it no thread runs Python code, so no event loop does anything.

    Attributes
    ----------
    generation : int
    start, end : float
        In seconds of `time.monotonic`.
    intended : bool
        True for one that the library has begun itself, by `GarbageCollections.collect`.
    """

    generation: int
    start: float
    end: float
    intended: bool = False

    @property
    def seconds(self) -> float:
        """The time that it took."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"garbage collection of generation {self.generation}, {self.seconds * 1e3:.3g} ms"


class GarbageCollections:
    """The garbage collections of this process, while at least one device is open. An entry of `gc.callbacks`.

    Attributes
    ----------
    counts : list of int
        The number of collections, by generation.
    seconds : list of float
        The time that they took, by generation.
    observers : list of callable
        Called with each collection of a millisecond or more, in the thread in which it ran.
    """

    def __init__(self) -> None:
        self.counts = [0 for _ in gc.get_stats()]
        self.seconds = [0.0 for _ in self.counts]
        self.observers: list[Callable[[Collection], object]] = []
        #: The newest. A new tuple for each: other threads iterate the one that they have read.
        self._noted: tuple[Collection, ...] = ()
        self._start = 0.0
        self._intended = False
        self._devices: set[weakref.ref[object]] = set()
        self._lock = threading.RLock()  # a finaliser may end a device at each line

    def add_device(self, device: object) -> None:
        """Observe the collector from now on, until the device is removed, or until nothing holds it."""
        with self._lock:
            self._devices.add(weakref.ref(device, self._removed))
            if self._called not in gc.callbacks:
                gc.callbacks.append(self._called)

    def remove_device(self, device: object) -> None:
        """Observe the collector no longer for a device. Does nothing if it was removed already."""
        self._removed(weakref.ref(device))

    def _removed(self, device: weakref.ref[object]) -> None:
        with self._lock:
            self._devices.discard(device)
            if not self._devices and self._called in gc.callbacks:
                gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        """Note the begin or the end of a collection. Called by the collector."""
        now = time.monotonic()
        if phase == "start":
            self._start = now
            return
        start, self._start = self._start, 0.0
        if not start:
            return  # it began before the first device was opened
        generation = info["generation"]
        self.counts[generation] += 1
        self.seconds[generation] += now - start
        if now - start >= NOTED:
            collection = Collection(generation, start, now, self._intended)
            self._noted = (*self._noted[1 - MOST_KEPT :], collection)
            for observer in tuple(self.observers):
                observer(collection)

    def collect(self) -> None:
        """Collect garbage now. ``loop_blocked`` and warnings do not report it."""
        self._intended = True
        try:
            gc.collect()
        finally:
            self._intended = False

    def longest(self, start: float, end: float) -> Collection | None:
        """Return the longest noted collection that has ended between two times; None if there is none."""
        found = [each for each in self._noted if start <= each.end <= end]
        return max(found, key=lambda each: each.seconds) if found else None

    def since(self, start: float) -> list[Collection]:
        """Return the noted collections that have ended after a time, in their order."""
        return [each for each in self._noted if each.end >= start]


#: Those of this process.
COLLECTIONS = GarbageCollections()
