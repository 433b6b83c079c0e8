"""Migrations: the moves of managed memory between host and devices, inferred from the order of its uses."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .._base._byte_values import ByteValues
from ..driver.protocol import Advice

__all__ = ["HOST", "PAGE", "Migration", "Migrations", "Use"]

#: The place of host memory. Other places are indices of devices.
HOST = -1

#: The unit of migration: managed memory moves in whole pages.
PAGE = mmap.PAGESIZE

#: Migrations remembered of one allocation.
MOST_REMEMBERED = 256

#: A prefetch is suggested if its pattern was seen this often.
TWICE = 2

#: A place in the form that `Stream.prefetch` takes.
PlaceName: TypeAlias = "int | Literal['host']"


class Migration(NamedTuple):
    """A move of managed memory from one place to another, as inferred by `UnifiedBuffer.migrations`.

    Attributes
    ----------
    address, shape, dtype
        Of the buffer, or the slice, that was used.
    nbytes
        Bytes that moved, in whole pages.
    source, target
        ``"host"``, or a device's index.
    when
        Seconds by the driver's clock, when the operation was enqueued or the host accessed the memory.
    asked
        True for a prefetch; False for a move on demand, at the first access.
    operation
        The use that moved it: ``"prefetch"``, ``"launch saxpy"``, ``"download"``, ``"array"`` …
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    source: PlaceName
    target: PlaceName
    when: float
    asked: bool
    operation: str


class Use(NamedTuple):
    """A read or write of a part of an allocation, at a place."""

    offset: int  # bytes from the start of the allocation
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    place: int
    reads: bool
    writes: bool
    operation: str


class _Pages(NamedTuple):
    """The inferred state of some pages."""

    places: frozenset[int] = frozenset()  # empty before the first access; several if read-mostly
    written: bool = False  # by the host, since a device used them last
    read_mostly: bool = False
    preferred: int | None = None
    accessed_by: frozenset[int] = frozenset()

    def is_mapped_for(self, place: int) -> bool:
        """True if that place accesses the pages without moving them. Over PCIe the host cannot."""
        return place != HOST and (place in self.accessed_by or self.preferred == HOST)

    def moves_to(self, place: int, asked: bool) -> bool:
        """True if a use at that place, or a prefetch to it, moves the pages."""
        return bool(self.places) and place not in self.places and (asked or not self.is_mapped_for(place))

    def after(self, use: Use, asked: bool) -> _Pages:
        """Return the state after a use."""
        places = frozenset({use.place})
        if not asked and self.is_mapped_for(use.place):
            places = self.places or frozenset({HOST if self.preferred == HOST else use.place})
        elif self.read_mostly and not use.writes:
            places |= self.places
        written = use.writes or self.written if use.place == HOST else False
        return self._replace(places=places, written=written)


class Migrations:
    """The inferred moves of one allocation. All loops share it, under a lock."""

    __slots__ = ("_address", "_last", "_lock", "_pages", "_past", "_seen")

    def __init__(self, address: int, nbytes: int) -> None:
        self._address = address
        self._pages = ByteValues(max(nbytes, 1), _Pages())
        self._past: deque[Migration] = deque(maxlen=MOST_REMEMBERED)
        self._seen = 0  # how often a device read, on demand, pages that the host had written
        self._last: tuple[Use, int] | None = None  # the last such read, and its bytes
        # Reentrant: a finaliser that runs while the lock is held may enqueue something.
        self._lock = threading.RLock()

    def used(self, use: Use, when: float, asked: bool = False) -> None:
        """Record a use. Pages that are elsewhere move. ``asked`` means a prefetch, which neither reads nor writes."""
        start, stop = self._rounded(use.offset, use.nbytes)
        with self._lock:
            moved: dict[int, int] = {}
            unasked = 0
            known = False
            for nbytes, pages in self._pages.within(start, stop):
                known = known or pages.written
                if pages.moves_to(use.place, asked):
                    source = min(pages.places)
                    moved[source] = moved.get(source, 0) + nbytes
                    unasked += nbytes if pages.written and use.reads and not asked else 0
            self._pages.change(start, stop, lambda pages: pages.after(use, asked))
            for source, nbytes in moved.items():
                self._past.append(
                    Migration(
                        address=self._address + use.offset,
                        shape=use.shape,
                        dtype=use.dtype,
                        nbytes=nbytes,
                        source=_named(source),
                        target=_named(use.place),
                        when=when,
                        asked=asked,
                        operation=use.operation,
                    )
                )
            if unasked and use.nbytes >= PAGE:
                self._seen += 1
                self._last = use, unasked
            elif asked and known and use.place != HOST:
                self._seen = 0  # the program prefetches already

    def advised(self, offset: int, nbytes: int, advice: Advice, place: int) -> None:
        """Record advice for a part: it changes which pages move."""
        start, stop = self._rounded(offset, nbytes)
        with self._lock:
            self._pages.change(start, stop, lambda pages: _advised(pages, advice, place))

    def past(self) -> tuple[Migration, ...]:
        """Return the last moves, the oldest first."""
        with self._lock:
            return tuple(self._past)

    def wanted(self) -> tuple[Use, int, int] | None:
        """Return (last use, bytes moved, how often) of moves that a prefetch would have avoided; None below `TWICE`."""
        with self._lock:
            if self._seen < TWICE or self._last is None:
                return None
            return *self._last, self._seen

    def _rounded(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return (start, stop) rounded to whole pages. An allocation starts at a page."""
        return offset // PAGE * PAGE, min(-(-(offset + nbytes) // PAGE) * PAGE, self._pages.nbytes)


def _advised(pages: _Pages, advice: Advice, place: int) -> _Pages:
    """Return the state after an advice."""
    match advice:
        case "set_read_mostly":
            return pages._replace(read_mostly=True)
        case "unset_read_mostly":  # one copy stays
            return pages._replace(read_mostly=False, places=frozenset(sorted(pages.places)[:1]))
        case "set_preferred_location":
            return pages._replace(preferred=place)
        case "unset_preferred_location":
            return pages._replace(preferred=None)
        case "set_accessed_by":
            return pages._replace(accessed_by=pages.accessed_by | {place})
        case "unset_accessed_by":
            return pages._replace(accessed_by=pages.accessed_by - {place})


def _named(place: int) -> PlaceName:
    return "host" if place == HOST else place
