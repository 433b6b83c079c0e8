"""Memory: device, pinned and managed; copies, fills and prefetches.

Addresses are integers. Host addresses are real ones on every driver. Copies take host memory that is pinned
(`pinned_allocate`, `pin`) or managed; nothing here stages pageable memory.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, Protocol, TypeAlias

#: What ``cuMemAdvise`` can be told.
Advice: TypeAlias = Literal[
    "set_read_mostly",
    "unset_read_mostly",
    "set_preferred_location",
    "unset_preferred_location",
    "set_accessed_by",
    "unset_accessed_by",
]


@dataclasses.dataclass(frozen=True, slots=True)
class ManagedAttributes:
    """What holds of a whole range of managed memory. A place is a device's index, or -1 for the host."""

    read_mostly: bool = False
    preferred_location: int | None = None  #: None: nowhere, or not the same all over
    accessed_by: frozenset[int] = frozenset()
    last_prefetch: int | None = None  #: where it was last prefetched to, done or not; None as above


class Allocation(NamedTuple):
    """What an address was found in: somebody's whole allocation, in bytes."""

    device: int  #: whose memory it is; -1 for managed memory, which is every device's
    address: int
    nbytes: int
    managed: bool


class Memory(Protocol):
    """Verbs about bytes. Except for the **may block** ones, all are in stream order."""

    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes. ``cuMemGetInfo``."""

    def locate(self, address: int) -> Allocation | None:
        """The device or managed memory, whoever allocated it, that an address lies in. ``cuPointerGetAttributes``.

        None for anything else: host memory, pinned or not, and addresses that are nobody's.
        """

    def allocate(self, device: int, nbytes: int, stream: int) -> int:
        """Device memory that is valid for work enqueued on ``stream`` from now on; ``nbytes`` > 0.

        ``cuMemAllocFromPoolAsync``, from a pool of ours that keeps what is freed. No room:
        `DeviceOutOfMemory`, with ``requested`` and ``free`` filled in.
        """

    def deallocate(self, address: int, stream: int) -> None:
        """Give it back once the work already enqueued on ``stream`` is done. ``cuMemFreeAsync``."""

    def pool_reserved(self, device: int) -> int:
        """Bytes that the pool holds, in use or not. ``CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT``."""

    def pool_trim(self, device: int, keep: int) -> None:
        """Give unused bytes beyond ``keep`` back to the device. **May block.** ``cuMemPoolTrimTo``."""

    def pinned_allocate(self, nbytes: int) -> int:
        """Page-locked host memory, usable by every device. **May block.** ``cuMemHostAlloc``."""

    def pinned_deallocate(self, address: int) -> None:
        """**May block**, until all devices are idle. ``cuMemFreeHost``."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock somebody's own memory. **May block.** ``cuMemHostRegister``."""

    def unpin(self, address: int) -> None:
        """**May block.** ``cuMemHostUnregister``."""

    def managed_allocate(self, device: int, nbytes: int) -> int:
        """One address for host and device. ``cuMemAllocManaged``: 0.1 ms beside a held kernel (measured)."""

    def managed_deallocate(self, address: int) -> None:
        """**May block**, until all devices are idle. ``cuMemFree``."""

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Host to device. ``cuMemcpyHtoDAsync``."""

    def download(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Device to host. ``cuMemcpyDtoHAsync``."""

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Within one device. ``cuMemcpyDtoDAsync``."""

    def copy_peer(
        self, stream: int, target: int, target_device: int, source: int, source_device: int, nbytes: int
    ) -> None:
        """From one device to another; peer access is enabled if it can be. ``cuMemcpyPeerAsync``.

        Devices that cannot reach one another: `UnsupportedError`.
        """

    def fill(self, stream: int, target: int, pattern: bytes, count: int) -> None:
        """Write ``pattern`` (1, 2, 4, 8 or 16 bytes) ``count`` times. ``cuMemsetD8Async`` and its kin."""

    def prefetch(self, stream: int, address: int, nbytes: int, device: int) -> None:
        """Bring managed memory to a device, or to the host (-1). ``cuMemPrefetchAsync``."""

    def advise(self, address: int, nbytes: int, advice: Advice, device: int) -> None:
        """Say how managed memory will be used. Not in stream order; rounded out to pages. **May block.**

        ``cuMemAdvise``. ``device`` is -1 for the host, and means nothing to the advices that name no place. What is no
        managed memory: `InvalidArgumentError`.
        """

    def managed_attributes(self, address: int, nbytes: int) -> ManagedAttributes:
        """What has been advised, and where it was last prefetched to. **May block.** ``cuMemRangeGetAttribute``."""
