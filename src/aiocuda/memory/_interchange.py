"""The interface through which memory calls `aiocuda.interchange`, a package above it.

`DeviceMemory` and `PinnedPool` receive these objects when they are made. Buffers call them in ``__dlpack__`` and in
similar methods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..completion._reactor import Reactor
    from ..completion._stream_queue import StreamQueue
    from ._block import Block
    from ._buffer import DeviceBuffer
    from ._pinned import PinnedBuffer

__all__ = ["AdoptedMemory", "BufferExports"]


class BufferExports(Protocol):
    """Exports one device's buffers to other libraries. `aiocuda.interchange._exports.Exports` implements it."""

    @property
    def returned(self) -> deque[Any]:
        """Exports that their consumers have released and that `sweep` has not processed."""

    @property
    def held(self) -> Collection[Any]:
        """Exports that `sweep` has not taken back."""

    @property
    def is_cuda(self) -> bool:
        """True if other libraries can use the device's addresses."""

    def device_of(self, buffer: DeviceBuffer) -> tuple[int, int]:
        """Return ``buffer.__dlpack_device__()``."""

    def capsule(
        self, buffer: DeviceBuffer, stream: object, max_version: Any, dl_device: Any, copy: bool | None
    ) -> object:
        """Return ``buffer.__dlpack__(…)``."""

    def host_capsule(
        self,
        array: PinnedBuffer,
        block: Block | None,
        stream: Any,
        max_version: tuple[int, int] | None,
        dl_device: tuple[int, int] | None,
        copy: bool | None,
    ) -> object:
        """Return ``array.__dlpack__(…)`` of a pinned array; ``block`` is None if the array is not pinned."""

    def interface(self, buffer: DeviceBuffer) -> dict[str, Any]:
        """Return ``buffer.__cuda_array_interface__``."""

    def sweep(self, reactor: Reactor, most: int | None = None) -> None:
        """Take back the exports that consumers have released; at most ``most`` of them."""

    def close(self) -> None:
        """Take back no export from now on."""

    def addresses(self) -> set[int]:
        """Return the addresses of the blocks that other libraries still hold after the device has been drained."""


class AdoptedMemory(Protocol):
    """Memory of other libraries that buffers use. `aiocuda.interchange._foreign.ForeignMemory` implements it."""

    @property
    def alive(self) -> Collection[Any]:
        """Weak references to the blocks of adopted memory."""

    def adopt(self, queue: StreamQueue, array: Any, read_only: bool) -> Any:
        """Return a buffer over another library's array: `aiocuda.Stream.adopt`."""

    def sweep(self, most: int | None = None) -> None:
        """Release the arrays of unused buffers; look at most at ``most`` freed buffers."""

    def close(self) -> None:
        """Release all arrays, except those that the device may still access."""
