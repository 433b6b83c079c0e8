"""Sharing: what a stream has to do with other libraries, their streams and their arrays."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from .._types import ProcessLocal
from ..completion._stream_queue import StreamQueue
from ..errors import BusyError
from ._adopt import adopt
from ._hook import StreamHook
from ._lending import lend

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["Sharing"]


class Sharing(ProcessLocal):
    """The part of `aiocuda.Stream` that others see."""

    device: Device
    _hook: StreamHook | None
    _queue: StreamQueue

    def adopt(self, array: Any, *, read_only: bool = False) -> Any:
        """Another library's array as a buffer, there at once: the same memory, nothing is copied.

        This stream waits, on the device, for what the producer has enqueued. The buffer holds the array, and lets go of
        it when it was freed, or nobody holds it any more, and everything that uses it is done.

        Parameters
        ----------
        array
            Anything with ``__dlpack__`` or ``__cuda_array_interface__``: arrays of PyTorch and CuPy, say. It is
            C-contiguous and on this stream's device. A bare DLPack capsule has no producer to be asked to wait: order
            it by `wait`.
        read_only
            Take an array that its producer calls read-only. That nothing here writes it is the caller's promise.

        Returns
        -------
        DeviceBuffer
            Over managed memory too; a `PinnedBuffer` over page-locked host memory. For that the
            producer's work must be done: DLPack orders host memory by no stream.

        Raises
        ------
        InvalidArgumentError
            It is not contiguous, or read-only, or says of itself what cannot be.
        InvalidTypeError
            It is no device array, or NumPy has no dtype for its items.
        WrongDeviceError
            It is on another device, or on another kind of device.
        StaleHandleError
            A capsule that was used before.
        BusyError
            A buffer of ours that still waits on the host; or the producer's stream is being captured.
        """
        return adopt(self.device, self._queue, array, read_only)

    def lend(self) -> AbstractAsyncContextManager[int]:
        """The stream's CUDA handle, for another library to enqueue on, as long as an ``async with`` block lasts.

        Everything that still waits on the host goes to the device first; until the block ends nothing may wait there,
        so that the order stays what both sides see. While somebody captures the stream our verbs raise `BusyError`, and
        the capture has to end before the block does.

        The CUDA stream is never destroyed from then on, as the other library may still use it: PyTorch does so when it
        frees a pinned tensor. Once this stream is closed, a later one may have the same handle.
        """
        if self._hook is not None:
            return self._hook.call("lend", lend, self.device, self._queue)
        return lend(self.device, self._queue)

    def __cuda_stream__(self) -> tuple[int, int]:
        """CUDA's stream protocol, version 0: (version, handle). The CUDA stream is never destroyed, as after `lend`."""
        self._queue.check()
        if self._queue.host_queue.entries:
            raise BusyError(f"{self._queue.name} still has work on the host: use `async with stream.lend()`")
        export = self._queue.device_state.driver.stream_handle
        handle = self._queue.handle
        return (0, export(handle) if self._hook is None else self._hook.call("__cuda_stream__", export, handle))
