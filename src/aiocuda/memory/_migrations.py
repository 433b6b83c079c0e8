"""Migrations: where managed memory has been, as far as the order of its uses tells."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .._ranges import Ranges
from ..driver.protocol import Advice

if TYPE_CHECKING:
    from ._unified import UnifiedBuffer

__all__ = ["HOST", "PAGE", "Migration", "Migrations", "PrefetchSuggestion", "Use"]

#: A place is a device's index, or this.
HOST = -1

#: What moves as a whole, at least.
PAGE = mmap.PAGESIZE

#: Migrations remembered of one allocation.
MOST_REMEMBERED = 256

#: Times that a pattern must be seen before something is suggested.
TWICE = 2

#: A place as a user names it: what `Stream.prefetch` takes.
PlaceName: TypeAlias = "int | Literal['host']"


class Migration(NamedTuple):
    """Managed memory that went from one place to another, as far as aiocuda can tell; see `UnifiedBuffer.migrations`.

    Attributes
    ----------
    address, shape, dtype
        Of the buffer, or the slice, that was used.
    nbytes
        How much of it moved, in whole pages.
    source, target
        ``"host"``, or a device's index.
    when
        Seconds, by the driver's clock: when the operation was enqueued, or the host looked.
    asked
        By a prefetch; else on demand, at the first touch.
    operation
        What it moved for: ``"prefetch"``, ``"launch saxpy"``, ``"download"``, ``"array"`` …
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


class PrefetchSuggestion(NamedTuple):
    """A prefetch that would save moving memory on demand; see `UnifiedBuffer.suggest_prefetch`.

    Attributes
    ----------
    buffer
        What to prefetch.
    to
        Where: the device's index.
    before
        Before which operation: ``"launch saxpy"``.
    nbytes
        How much moved on demand the last time.
    seen
        How often.
    why
        In a sentence.
    """

    buffer: UnifiedBuffer
    to: int
    before: str
    nbytes: int
    seen: int
    why: str


class Use(NamedTuple):
    """Somebody is about to read or write a part of an allocation."""

    offset: int  # bytes, from the allocation's begin
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    place: int
    reads: bool
    writes: bool
    operation: str


class _Pages(NamedTuple):
    """What is known of some pages."""

    places: frozenset[int] = frozenset()  # where they are: nowhere before the first touch, several if read-mostly
    written: bool = False  # by the host, since a device last had them
    read_mostly: bool = False
    preferred: int | None = None
    accessed_by: frozenset[int] = frozenset()

    def is_mapped_for(self, place: int) -> bool:
        """Does that place reach them where they are? A host does not reach into a device's memory (over PCIe)."""
        return place != HOST and (place in self.accessed_by or self.preferred == HOST)

    def moves_to(self, place: int, asked: bool) -> bool:
        return bool(self.places) and place not in self.places and (asked or not self.is_mapped_for(place))

    def after(self, use: Use, asked: bool) -> _Pages:
        places = frozenset({use.place})
        if not asked and self.is_mapped_for(use.place):
            places = self.places or frozenset({HOST if self.preferred == HOST else use.place})
        elif self.read_mostly and not use.writes:
            places |= self.places
        written = use.writes or self.written if use.place == HOST else False
        return self._replace(places=places, written=written)


class Migrations:
    """The record of one allocation. Shared by all loops, under a lock."""

    __slots__ = ("_address", "_last", "_lock", "_pages", "_past", "_seen")

    def __init__(self, address: int, nbytes: int) -> None:
        self._address = address
        self._pages = Ranges(max(nbytes, 1), _Pages())
        self._past: deque[Migration] = deque(maxlen=MOST_REMEMBERED)
        self._seen = 0  # times that a device read, on demand, what the host had written
        self._last: tuple[Use, int] | None = None  # and the last of these, with its bytes
        # A finaliser that runs in the middle of this may enqueue something.
        self._lock = threading.RLock()

    def used(self, use: Use, when: float, asked: bool = False) -> None:
        """Somebody uses a part; what is not there moves. ``asked`` by a prefetch, which reads and writes nothing."""
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
                self._seen = 0  # somebody does it already

    def advised(self, offset: int, nbytes: int, advice: Advice, place: int) -> None:
        """How a part will be used decides what moves."""
        start, stop = self._rounded(offset, nbytes)
        with self._lock:
            self._pages.change(start, stop, lambda pages: _advised(pages, advice, place))

    def past(self) -> tuple[Migration, ...]:
        """The last ones, the oldest first."""
        with self._lock:
            return tuple(self._past)

    def wanted(self) -> tuple[Use, int, int] | None:
        """(the last use, bytes moved for it, times seen) of what a prefetch would have saved, if seen often enough."""
        with self._lock:
            if self._seen < TWICE or self._last is None:
                return None
            return *self._last, self._seen

    def _rounded(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Out to pages: an allocation begins at one."""
        return offset // PAGE * PAGE, min(-(-(offset + nbytes) // PAGE) * PAGE, self._pages.nbytes)


def _advised(pages: _Pages, advice: Advice, place: int) -> _Pages:
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
