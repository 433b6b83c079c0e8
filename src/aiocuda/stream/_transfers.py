"""Transfers: copies, fills and prefetches of a stream."""

from __future__ import annotations

import functools
from asyncio import _get_running_loop
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..completion._operation import DONE, Operation, new_operation
from ..completion._prediction import Estimate
from ..completion._stream_queue import StreamQueue
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, UnsupportedError, WrongDeviceError
from ..interchange._host_arrays import as_source, as_target
from ..memory._arrays import address_of, check_awaited
from ..memory._block import Block
from ..memory._buffer import DeviceBuffer
from ..memory._pinned import PinnedBuffer
from ..memory._staging import stage_down, stage_up
from ..memory._unified import UnifiedBuffer, place_of
from ._use import lend, meet

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["Transfers", "check_alike", "pattern_of"]

#: Item sizes that a device fills by itself.
FILL_SIZES = (1, 2, 4, 8, 16)


class Transfers:
    """The copying half of a stream."""

    __slots__ = ("_claims", "_device", "_driver", "_queue", "_staging", "bytes_copied", "bytes_downloaded",
                 "bytes_uploaded", "copies", "downloads", "fills", "uploads")  # fmt: skip

    def __init__(self, device: Device, queue: StreamQueue) -> None:
        self._device = device
        self._driver = device.driver
        self._queue = queue
        self._staging = device._loop_states.here().staging
        self._claims = device._targets
        self.uploads = self.downloads = self.copies = self.fills = 0
        self.bytes_uploaded = self.bytes_downloaded = self.bytes_copied = 0

    # -- the verbs -----------------------------------------------------------------------------------------------

    def copy(self, target: Any, source: Any) -> Operation[None]:
        """Host to device, device to host, or device to device."""
        if isinstance(target, DeviceBuffer):
            if isinstance(source, DeviceBuffer):
                return self._between(target, source)
            return self.up(target, as_source(source, self._device._pinned))
        if isinstance(source, DeviceBuffer):
            return self.down(as_target(target, self._device._pinned), source, None)
        for side, thing in (("target", target), ("source", source)):
            (as_target if side == "target" else as_source)(thing)
        raise InvalidArgumentError("neither side of the copy is device memory: use NumPy between host arrays")

    def up(self, target: DeviceBuffer, source: npt.NDArray[Any], result: object = None) -> Operation[Any]:
        """Host to device: by DMA from pinned memory, else staged."""
        queue = self._queue
        if _get_running_loop() is not queue.loop or queue.closed or self._driver.fault is not None:
            queue.check()  # raises; what may go on is spared the call
        check_alike(target, source)
        nbytes = target.nbytes
        if nbytes == 0:
            self.uploads += 1
            operation = queue.enqueue("upload", None, _nothing, ())
            self.result(operation, result)
            return operation
        pinned, address = _place_of(source)
        self._meet(target._block)
        estimate = self._estimate("upload", nbytes)
        if pinned is not None:
            call = (queue.handle, target.address, address, nbytes)
            operation = self._direct("upload", pinned, estimate, self._driver.upload, call, (target, source))
        else:
            # By DMA the device reads in its own order; here the host does, now or soon.
            writer = self._claims.writer(address, nbytes)
            if writer is not None:
                raise BusyError(
                    f"{writer!r} is writing this {source.shape} array, or part of it: await it before the array is read"
                )
            keep = (target, _held(source))
            operation = stage_up(self._staging, queue, target.address, address, nbytes, keep, estimate)
        target._block.uses[queue] = operation
        if type(target) is not DeviceBuffer:
            self._note(target, "upload", writes=True)
        if result is not None:
            self.result(operation, result, target._block, *((pinned,) if pinned is not None else ()))
        self.uploads += 1
        self.bytes_uploaded += nbytes
        return operation

    def down(self, target: npt.NDArray[Any], source: DeviceBuffer, result: object) -> Operation[Any]:
        """Device to host: by DMA into pinned memory, else staged."""
        queue = self._queue
        if _get_running_loop() is not queue.loop or queue.closed or self._driver.fault is not None:
            queue.check()  # raises; what may go on is spared the call
        check_alike(source, target)
        nbytes = source.nbytes
        pinned, address = _place_of(target)
        if nbytes == 0:
            operation = queue.enqueue("download", None, _nothing, ())
            self.result(operation, result)
        else:
            self._meet(source._block)
            estimate = self._estimate("download", nbytes)
            writer = self._claims.writer(address, nbytes)
            if writer is not None:
                raise BusyError(
                    f"{writer!r} is writing this {target.shape} array, or part of it: await it first, or give another "
                    "`out`"
                )
            if pinned is not None:
                call = (queue.handle, address, source.address, nbytes)
                operation = self._direct("download", pinned, estimate, self._driver.download, call, (source, target))
            else:
                keep = (source, target)
                operation = stage_down(self._staging, queue, address, source.address, nbytes, keep, estimate)
            source._block.uses[queue] = operation
            if type(source) is not DeviceBuffer:
                self._note(source, "download", writes=False)
            self._claims.add(address, nbytes, operation)
            if result is not None:
                self.result(operation, result, source._block, *((pinned,) if pinned is not None else ()))
        self.downloads += 1
        self.bytes_downloaded += nbytes
        return operation

    def _meet(self, memory: Block) -> None:
        """What `meet` does, for memory of the device; which this stream need not ask for twice."""
        used = memory.uses.get(self._queue)
        # One that failed or was skipped has taken the waits in front of it along.
        if used is None or (used._extra is not None and used._failure is not None) or not memory.ready:
            meet(self._queue, memory, self._device)

    def _direct(
        self,
        kind: str,
        pinned: Block,
        estimate: Estimate,
        call: Callable[..., object],
        arguments: tuple[Any, ...],
        keep: object,
    ) -> Operation[Any]:
        """By DMA, as soon as the host's side is page-locked; if it cannot be, this is what fails with it."""
        queue = self._queue
        gate = None if pinned.ready and queue in pinned.uses else meet(queue, pinned, self._device)
        if gate is None:
            operation: Operation[Any] = new_operation(queue, kind, estimate, keep)  # `enqueue`, for a call less
            queue.submit(operation, call, arguments)
        else:
            operation = queue.enqueue_behind(kind, gate, call, arguments, keep)
        pinned.uses[queue] = operation
        return operation

    def _between(self, target: DeviceBuffer, source: DeviceBuffer) -> Operation[None]:
        """Device to device."""
        queue = self._queue
        queue.check()
        check_alike(target, source)
        nbytes = target.nbytes
        if nbytes == 0:
            self.copies += 1
            return queue.enqueue("copy", None, _nothing, ())
        to, origin = target._block, source._block
        if to is origin and abs(target.address - source.address) < nbytes:
            raise InvalidArgumentError(f"source and target overlap in one buffer: {source!r} and {target!r}")
        here = self._device.index
        if here not in (to.device, origin.device):
            raise WrongDeviceError(
                f"copy from device {origin.device} to device {to.device} on a stream of device {here}: "
                "use a stream of one of the two"
            )
        for buffer in (target, source):
            block = buffer._block
            if block.device == here or block.driver is not self._driver:
                meet(queue, block, self._device)  # which says so, where it is another driver's
            else:
                block.check()
                lend(block, queue)
                if block.allocation_event is not None:
                    queue.follow(block.allocation_event)
        estimate = self._estimate("copy", nbytes)
        if to.device == origin.device:
            call: tuple[int, ...] = (queue.handle, target.address, source.address, nbytes)
            operation = queue.enqueue("copy", estimate, self._driver.copy, call, (target, source))
        else:
            call = (queue.handle, target.address, to.device, source.address, origin.device, nbytes)
            operation = queue.enqueue("copy", estimate, self._driver.copy_peer, call, (target, source))
        for buffer in (target, source):
            if buffer._block.device == here:
                buffer._block.uses[queue] = operation
            else:
                buffer._block.used_by_peer(queue, operation)
        self._note(source, "copy", writes=False)
        self._note(target, "copy", writes=True)
        self.copies += 1
        self.bytes_copied += nbytes
        return operation

    def fill(self, buffer: DeviceBuffer, value: object) -> Operation[None]:
        """Every item the same."""
        queue = self._queue
        queue.check()
        if not isinstance(buffer, DeviceBuffer):
            check_awaited(buffer, "the buffer to fill")
            raise InvalidTypeError(f"fill takes a device buffer, not {type(buffer).__name__}: NumPy has a.fill(value)")
        pattern = pattern_of(buffer.dtype, value)
        buffer._block.check()
        if buffer.nbytes == 0:
            self.fills += 1
            return queue.enqueue("fill", None, _nothing, ())
        meet(queue, buffer._block, self._device)
        estimate = self._estimate("fill", buffer.nbytes)
        call = (queue.handle, buffer.address, pattern, buffer.nbytes // len(pattern))
        operation = queue.enqueue("fill", estimate, self._driver.fill, call, buffer)
        buffer._block.uses[queue] = operation
        self._note(buffer, "fill", writes=True)
        self.fills += 1
        return operation

    def prefetch(self, buffer: UnifiedBuffer, to: Any) -> Operation[None]:
        """Managed memory to a device, or to the host."""
        queue = self._queue
        queue.check()
        if not isinstance(buffer, UnifiedBuffer):
            check_awaited(buffer, "the buffer to prefetch")
            raise InvalidArgumentError(
                f"only managed memory can be prefetched, not {buffer!r}: make it by device.unified(shape, dtype)"
            )
        index = place_of(to, queue.device_state, "prefetched")
        buffer._block.check()
        if not self._device.properties.concurrent_managed_access:
            raise UnsupportedError(
                f"{self._device.name} prefetches nothing: it has no concurrent managed access "
                "(device.properties.concurrent_managed_access), and moves managed memory when a kernel is launched"
            )
        if buffer.nbytes == 0:
            return queue.enqueue("prefetch", None, _nothing, ())
        meet(queue, buffer._block, self._device)
        estimate = self._estimate("prefetch", buffer.nbytes)
        call = (queue.handle, buffer.address, buffer.nbytes, index)
        operation = queue.enqueue("prefetch", estimate, self._driver.prefetch, call, buffer)
        buffer._block.uses[queue] = operation
        buffer._used(index, "prefetch", reads=False, writes=False, asked=True)
        return operation

    # -- what they share -----------------------------------------------------------------------------------------

    def _note(self, buffer: DeviceBuffer, operation: str, writes: bool) -> None:
        """Managed memory moves to the device that reads or writes it."""
        if isinstance(buffer, UnifiedBuffer):
            buffer._used(self._device.index, operation, reads=not writes, writes=writes)

    def _estimate(self, kind: str, nbytes: int) -> Estimate:
        return self._queue.device_state.predictor.estimate((kind, nbytes.bit_length()))

    def result(self, operation: Operation[Any], value: object, *blocks: Block) -> None:
        """What the operation's result is to be, unless it has failed already.

        The blocks' records of use hold the operation, and it its result: so they forget it once it has passed, or a
        buffer would hold itself.
        """
        if operation._failure is not None or operation._state > DONE:
            return
        operation._value = value
        queue, release = self._queue, operation._release

        def passed() -> None:
            for block in blocks:
                if block.uses.get(queue) is operation:
                    del block.uses[queue]
                if block.allocation_event is operation:
                    block.allocation_event = None
            if release is not None:
                release()

        if blocks:
            operation._release = passed


def _place_of(array: npt.NDArray[Any]) -> tuple[Block | None, int]:
    """The pinned block that an array lies in, None if it is not pinned; and where it begins."""
    if isinstance(array, PinnedBuffer):
        return array._pinned_block(), array.address
    return None, address_of(array)


def _held(source: npt.NDArray[Any]) -> object:
    """Hold a buffer export as well as the array: NumPy and bytearray refuse to resize meanwhile."""
    try:
        return (source, memoryview(source))  # type: ignore[arg-type]  # an ndarray exports a buffer
    except (ValueError, TypeError, BufferError):
        return source  # a dtype that exports no buffer: float8, datetime64 …


def check_alike(device: DeviceBuffer, other: Any) -> None:
    """One dtype and one shape; but bytes are bytes, and one item has no shape to be lost."""
    if device.shape == other.shape and device.dtype == other.dtype:
        return
    if device.dtype != other.dtype and not _is_raw(other):
        sizes = "" if device.nbytes == other.nbytes else f", and {device.nbytes} bytes are not {other.nbytes}"
        raise InvalidTypeError(
            f"dtypes differ: {device.dtype} of shape {device.shape} and {other.dtype} of shape {tuple(other.shape)}"
            f"{sizes}; convert by a.astype({str(device.dtype)!r}), make the array or the buffer with that dtype=, or, "
            f"if the same bytes are meant, say so: buffer.view({str(other.dtype)!r})"
        )
    if device.nbytes != other.nbytes:
        raise InvalidArgumentError(
            f"sizes differ: {device.nbytes} bytes of shape {device.shape} {device.dtype} on one side, "
            f"{other.nbytes} bytes of shape {tuple(other.shape)} {other.dtype} on the other"
        )
    if device.shape != other.shape and device.size > 1 and not _is_raw(other):
        raise InvalidArgumentError(
            f"shapes differ: {device.shape} and {tuple(other.shape)} of {device.dtype}; if the items are to stay in "
            f"their order, say so: buffer.reshape({tuple(other.shape)})"
        )


def _is_raw(other: Any) -> bool:
    return other.ndim == 1 and bool(other.dtype == np.uint8)


@functools.lru_cache(maxsize=256)
def _int_pattern(dtype: np.dtype[Any], value: int) -> bytes:
    """That of an integer, which NumPy takes 15 µs to look at."""
    return _any_pattern(dtype, value)


def pattern_of(dtype: np.dtype[Any], value: object) -> bytes:
    """One item's bytes, or fewer if they repeat."""
    return _int_pattern(dtype, value) if type(value) is int else _any_pattern(dtype, value)


def _any_pattern(dtype: np.dtype[Any], value: object) -> bytes:
    if dtype.itemsize not in FILL_SIZES:
        raise UnsupportedError(f"a device fills items of {FILL_SIZES} bytes, and {dtype} has {dtype.itemsize}")
    given = np.asarray(value)
    if given.ndim:
        raise InvalidArgumentError(f"fill takes one value, not an array of shape {given.shape}: upload the array")
    if dtype.kind in "iu" and isinstance(value, int) and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise _out_of_range(value, dtype)
    if given.dtype.kind not in "biufcSUMmV" or not np.can_cast(given.dtype, dtype, "same_kind"):
        if not (given.dtype.kind in "iu" and dtype.kind in "iu"):
            raise InvalidTypeError(f"{value!r} cannot be stored as {dtype}: fill takes a value of the buffer's dtype")
    try:
        with np.errstate(over="raise"):
            item = np.asarray(value, dtype)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise InvalidArgumentError(f"{value!r} does not fit {dtype} ({error})") from None
    if dtype.kind in "iu" and int(item) != int(given):
        raise _out_of_range(value, dtype)
    pattern = item.tobytes()
    return pattern[:1] if pattern == pattern[:1] * len(pattern) else pattern


def _out_of_range(value: object, dtype: np.dtype[Any]) -> InvalidArgumentError:
    limits = np.iinfo(dtype)
    return InvalidArgumentError(f"{value!r} does not fit {dtype}, which takes {limits.min} to {limits.max}")


def _nothing() -> None:
    """A copy of no bytes is only a place in the order."""
