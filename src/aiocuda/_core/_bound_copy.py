"""BoundCopy: a copy that a stream repeats, between the same device buffer and the same pinned array."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ._bound_call import BoundCall

if TYPE_CHECKING:
    from ._block_fields import BlockFields
    from ._estimate import Estimate
    from ._ring import Ring
    from ._stream_operation import StreamOperation

__all__ = ["BoundCopy"]


class BoundCopy(BoundCall):
    """A copy between a device buffer and a pinned array, with everything bound that does not change.

    It refers to both weakly: the memory is freed as if it did not exist.

    Parameters
    ----------
    kind
        ``"upload"`` or ``"download"``.
    host_writes
        The record of the host memory that downloads write.
    """

    __slots__ = ("_address", "_device", "_dtype", "_host", "_host_writes", "_nbytes", "_shape", "_uploads")

    def __init__(self, kind: str, queue: Ring, device: Any, host: Any, estimate: Estimate, host_writes: Any) -> None:
        stream, nbytes = queue.handle, device.nbytes
        driver = queue.driver
        if kind == "upload":
            ends = (stream, device.address, host.address, nbytes)
            super().__init__(queue, kind, estimate, driver.recorded_upload(*ends), lambda _: driver.upload(*ends))
        else:
            ends = (stream, host.address, device.address, nbytes)
            super().__init__(queue, kind, estimate, driver.recorded_download(*ends), lambda _: driver.download(*ends))
        self._uploads = kind == "upload"
        self._device: Any = weakref.ref(device)
        self._host: Any = weakref.ref(host)
        self._address, self._nbytes = host.address, nbytes
        self._shape, self._dtype = host.shape, host.dtype
        self._host_writes = host_writes

    def binds(self, device: object, host: object) -> bool:
        """True if it was made for these two objects."""
        return self._device() is device and self._host() is host

    def repeat(self, device: Any, host: Any) -> StreamOperation[None] | None:
        """Enqueue the copy again. Return None if anything is unusual: then it needs all checks.

        A measured hot path: it reads the blocks' attributes directly. The array may have been changed in place.
        """
        if self._device() is not device or self._host() is not host:
            return None
        memory: BlockFields = device._block
        pinned: BlockFields = host._block
        queue, flags = self.queue, host.flags
        used = memory.uses.get(queue)
        if (
            used is None
            or not (memory.ready and pinned.ready)
            or queue not in pinned.uses
            or (used.extra is not None and used.failure is not None)
            or memory.owner.closed
            or pinned.owner.closed
            or host.dtype is not self._dtype
            or host.shape != self._shape
        ):
            return None
        if self._uploads:
            if not flags.c_contiguous:
                return None
            memory.uses[queue] = pinned.uses[queue] = operation = self.enqueue((), (device, host))
            return operation
        if not flags.carray or self._host_writes.writer(self._address, self._nbytes) is not None:
            return None
        memory.uses[queue] = pinned.uses[queue] = operation = self.enqueue((), (device, host))
        self._host_writes.add(self._address, self._nbytes, operation)
        return operation
