"""Host memory that a device can access: pinned, registered and managed; and the attributes of managed memory."""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ...._base._byte_values import ByteValues
from ....errors import BusyError, DeviceOutOfMemory, InvalidArgumentError, StaleHandleError
from ...protocol import ManagedAttributes

__all__ = ["HostPages", "PageKind"]

PageKind: TypeAlias = Literal["pinned", "registered", "managed"]

_ALIGNMENT = 64  # a cache line, and the widest vector
_PAGE = 4096  # advice is rounded out to whole pages


class HostPages:
    """Ranges of real memory, by address.

    A view of an allocated range keeps its memory alive. The caller of `register` keeps registered memory alive until
    it is released here.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[PageKind, npt.NDArray[np.uint8]]] = {}
        self._addresses: list[int] = []
        self._attributes: dict[int, ByteValues[ManagedAttributes]] = {}  # of ranges with advice or a prefetch

    def allocate(self, kind: PageKind, nbytes: int) -> int:
        """Return the address of new memory, aligned to 64 bytes. Managed memory has its own pages, as in CUDA."""
        if nbytes <= 0:
            raise InvalidArgumentError(f"cannot allocate {nbytes} bytes; at least 1 is needed", nbytes=nbytes)
        alignment = _PAGE if kind == "managed" else _ALIGNMENT
        try:
            raw = np.empty(nbytes + alignment, np.uint8)
        except MemoryError as error:
            raise DeviceOutOfMemory(
                f"the host has no room for {nbytes:,} bytes of {kind} memory", requested=nbytes
            ) from error
        address: int = raw.ctypes.data
        offset = -address % alignment
        self._add(kind, address + offset, raw[offset : offset + nbytes])
        return address + offset

    def register(self, address: int, nbytes: int) -> None:
        """Add existing memory. `BusyError` if it overlaps a known range."""
        if address <= 0 or nbytes <= 0:
            raise InvalidArgumentError(
                f"cannot pin {nbytes} bytes at {address:#x}; give the address and the size of an array", nbytes=nbytes
            )
        other = self._start_before(address + nbytes - 1)
        if other is not None:
            kind, data = self._ranges[other]
            if other + data.size > address:
                raise BusyError(
                    f"{nbytes} bytes at {address:#x} overlap {data.size} {kind} ones at {other:#x}: release these",
                    address=address,
                )
        data = np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)
        self._add("registered", address, data)

    def check(self, kind: PageKind, address: int) -> None:
        """Raise `StaleHandleError` if there is no range of this kind at the address."""
        found = self._ranges.get(address)
        if found is None or found[0] != kind:
            raise StaleHandleError(
                f"there is no {kind} memory at {address:#x}, or it was released before", address=address
            )

    def release(self, kind: PageKind, address: int) -> None:
        """Remove a range. `StaleHandleError` if there is none of this kind at the address."""
        self.check(kind, address)
        del self._ranges[address]
        self._attributes.pop(address, None)
        del self._addresses[bisect_right(self._addresses, address) - 1]

    def find(self, address: int, nbytes: int) -> tuple[PageKind, npt.NDArray[np.uint8]] | None:
        """Return (kind, bytes) of a range, or None if it is not completely inside a known range."""
        start = self._start_before(address)
        if start is None:
            return None
        kind, data = self._ranges[start]
        offset = address - start
        return (kind, data[offset : offset + nbytes]) if offset + nbytes <= data.size else None

    def change(self, address: int, nbytes: int, change: Callable[[ManagedAttributes], ManagedAttributes]) -> None:
        """Change the attributes of the pages of a managed range."""
        start, size = self._managed(address, nbytes)
        first = (address // _PAGE) * _PAGE - start
        last = -(-(address + nbytes) // _PAGE) * _PAGE - start
        of = self._attributes.setdefault(start, ByteValues(size, ManagedAttributes()))
        of.change(max(0, first), min(size, last), change)

    def attributes(self, address: int, nbytes: int) -> ManagedAttributes:
        """Return the attributes that all bytes of a managed range have."""
        start, _ = self._managed(address, nbytes)
        known = self._attributes.get(start)
        if known is None:
            return ManagedAttributes()
        runs = [value for _, value in known.within(address - start, address - start + nbytes)]
        preferred = {run.preferred_location for run in runs}
        prefetched = {run.last_prefetch for run in runs}
        return ManagedAttributes(
            read_mostly=all(run.read_mostly for run in runs),
            preferred_location=preferred.pop() if len(preferred) == 1 else None,
            accessed_by=frozenset.intersection(*(run.accessed_by for run in runs)),
            last_prefetch=prefetched.pop() if len(prefetched) == 1 else None,
        )

    def _managed(self, address: int, nbytes: int) -> tuple[int, int]:
        """Return (start, bytes) of the managed allocation that contains a range; or raise `InvalidArgumentError`."""
        found = self.locate(address) if nbytes > 0 else None
        if found is None or found[0] != "managed" or address + nbytes > found[1] + found[2]:
            raise InvalidArgumentError(
                f"{nbytes} bytes at {address:#x} are not managed memory, and only that can be advised or prefetched",
                address=address,
            )
        return found[1:]

    def locate(self, address: int) -> tuple[PageKind, int, int] | None:
        """Return (kind, start, bytes) of the range that contains an address, or None."""
        start = self._start_before(address)
        if start is None:
            return None
        kind, data = self._ranges[start]
        return (kind, start, data.size) if address < start + data.size else None

    def _start_before(self, address: int) -> int | None:
        """Return the start of the last range that begins at an address or before it, or None."""
        index = bisect_right(self._addresses, address) - 1
        return self._addresses[index] if index >= 0 else None

    def _add(self, kind: PageKind, address: int, data: npt.NDArray[np.uint8]) -> None:
        self._ranges[address] = (kind, data)
        insort(self._addresses, address)
