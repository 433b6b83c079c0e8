"""Transfers: the copies, fills and prefetches of a stream."""

from __future__ import annotations

import functools
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..._base._arrays import address_of, check_alike
from ..._core import CLOSED, DONE, BoundCopy, Estimate, Extra, Ring, StreamOperation, new_operation, nothing
from ...completion._progress import check_awaited
from ...completion._waiting_calls import WaitingCalls
from ...errors import BusyError, InvalidArgumentError, InvalidTypeError, UnsupportedError, WrongDeviceError
from ...memory._allocations import Allocations
from ...memory._block import Block
from ...memory._buffer import DeviceBuffer, block_of
from ...memory._managed import ManagedBlock
from ...memory._pinned import PinnedBuffer, pinned_block_of
from ...memory._staging import SMALL_BYTES, move_small, stage_down, stage_up
from ...memory._unified import UnifiedBuffer, place_of
from ...memory.interchange._host_arrays import as_source, as_target
from .._resources import DeviceResources
from ._memory_access import MemoryAccess

__all__ = ["Transfers", "check_overlap", "pattern_of", "refuse_host_copy"]

#: Copies that a stream keeps bound. When there are more, all are dropped.
MOST_BOUND = 256

#: Item sizes, in bytes, that a device can fill.
FILL_SIZES = (1, 2, 4, 8, 16)


class Transfers:
    """The copies, fills and prefetches of a stream: the methods of `aiocuda.Stream` with these names, and their counts.

    ``copies`` counts the copies within a device and between devices.
    """

    __slots__ = ("_access", "_bound", "_driver", "_estimates", "_host_writes", "_made", "_peers", "_pinned_pool",
                 "_queue", "_resources", "_staging", "allocations", "bytes_copied", "bytes_downloaded",
                 "bytes_uploaded", "copies", "downloads", "fills", "uploads")  # fmt: skip

    def __init__(self, resources: DeviceResources, queue: Ring, access: MemoryAccess) -> None:
        self._resources = resources
        self._driver = resources.driver
        self._queue = queue
        self._access = access
        self._staging = resources.loop_states.here().staging
        self._pinned_pool = resources.pinned_pool
        self._host_writes = resources.host_writes
        self._peers: set[tuple[int, int]] = set()  #: targets and sources of the copies between devices so far
        self.allocations = Allocations()  #: what the program has allocated through the stream
        #: Repeated copies, by the ids of target and source.
        self._bound: dict[tuple[int, int], BoundCopy] = {}
        #: The device buffer of each copy that was made before, by the same ids: later, another pair may have them.
        self._made: dict[tuple[int, int], weakref.ref[DeviceBuffer]] = {}
        self._estimates: dict[tuple[str, int], Estimate] = {}  # by kind, and the power of two at or above the size
        self.uploads = self.downloads = self.copies = self.fills = 0
        self.bytes_uploaded = self.bytes_downloaded = self.bytes_copied = 0

    def upload(self, array: Any) -> StreamOperation[DeviceBuffer]:
        if type(array) is np.ndarray and array.nbytes <= SMALL_BYTES:
            operation = self._upload_small(array)
            if operation is not None:
                return operation
        source = as_source(array, self._pinned_pool)
        queue = self._queue
        queue.check()
        target = self._resources.memory.empty(queue, source.shape, source.dtype, marked=False)
        try:
            operation = self._up(target, source, target)
        except BaseException:
            # No caller has the buffer: it is freed after its allocation.
            block_of(target).allocated_by(queue.submit_marker())
            raise
        if source.nbytes:
            # If the operation has an event already, that comes after the allocation. One on the host may never get one.
            block_of(target).allocated_by(operation if operation.lease is not None else queue.submit_marker())
        self.allocations.add(block_of(target))
        return operation

    def _upload_small(self, array: npt.NDArray[Any]) -> StreamOperation[DeviceBuffer] | None:
        """Enqueue the upload of an array that fits a small staging buffer. None if anything is unusual.

        The host reads the array now, so the operation need not hold it.
        """
        queue, staging, nbytes = self._queue, self._staging, array.nbytes
        queue.check()
        address = address_of(array)
        if not nbytes or queue.obstacles or not array.flags.c_contiguous:
            return None
        if self._host_writes.writer(address, nbytes) is not None:
            return None
        small = staging.take_small()
        if small is None:
            return None
        target: DeviceBuffer | None = None
        try:
            target = self._resources.memory.empty(queue, array.shape, array.dtype, marked=False)
            move_small(small, address, nbytes)
            block = target._block
            assert block is not None
            call = (queue.handle, block.address, small, nbytes)
            operation = queue.enqueue("upload", self._estimate("upload", nbytes), self._driver.upload, call, target)
        except BaseException:
            staging.return_small(small)
            if target is not None:
                block_of(target).allocated_by(queue.submit_marker())  # no caller has the buffer: see `upload`
            raise
        block.uses[queue] = operation
        self.uploads += 1
        self.bytes_uploaded += nbytes

        def passed() -> None:
            block.forget(queue, operation)  # a buffer would hold itself: see `_set_result`
            staging.return_small(small)

        if operation.status <= DONE and (operation.extra is None or operation.failure is None):
            operation.value = target
        if operation.status < DONE or not operation.is_settled:  # the device may use both, also if it is abandoned
            extra = operation.extra = operation.extra or Extra()
            extra.on_settled = passed
        else:
            passed()
        if block.allocation_event is None:
            block.allocated_by(operation if operation.lease is not None else queue.submit_marker())
        allocations = self.allocations
        allocations.references.append(weakref.ref(block))
        if len(allocations.references) > allocations.most:
            allocations.live()
        return operation

    def download(self, buffer: DeviceBuffer, out: npt.NDArray[Any] | None) -> StreamOperation[npt.NDArray[Any]]:
        if not isinstance(buffer, DeviceBuffer):
            check_awaited(buffer, "the buffer to download")
            raise InvalidTypeError(
                f"download takes a device buffer, as stream.empty and `await stream.upload(array)` make, not "
                f"{type(buffer).__name__}{_buffer_of(buffer)}"
            )
        if out is not None:
            return self._down(as_target(out, self._pinned_pool), buffer, out)
        array: npt.NDArray[Any] = np.empty(buffer.shape, buffer.dtype)
        return self._down(array, buffer, array)

    def copy(self, target: Any, source: Any) -> StreamOperation[None]:
        bound = self._bound.get((id(target), id(source)))
        if bound is not None:
            if type(target) is DeviceBuffer:
                operation = bound.repeat(target, source)
                if operation is not None:
                    self.uploads += 1
                    self.bytes_uploaded += target.nbytes
                    return operation
            else:
                operation = bound.repeat(source, target)
                if operation is not None:
                    self.downloads += 1
                    self.bytes_downloaded += source.nbytes
                    return operation
        return self._copy_checked(target, source)

    def _copy_checked(self, target: Any, source: Any) -> StreamOperation[None]:
        """Enqueue a copy with all checks. The second copy between the same two objects is bound for the third."""
        if isinstance(target, DeviceBuffer):
            if isinstance(source, DeviceBuffer):
                return self._between(target, source)
            operation = self._up(target, as_source(source, self._pinned_pool))
            if type(source) is PinnedBuffer and type(target) is DeviceBuffer:
                self._bind("upload", target, source, (id(target), id(source)))
            return operation
        if isinstance(source, DeviceBuffer):
            operation = self._down(as_target(target, self._pinned_pool), source, None)
            if type(target) is PinnedBuffer and type(source) is DeviceBuffer:
                self._bind("download", source, target, (id(target), id(source)))
            return operation
        refuse_host_copy(target, source)

    def _bind(self, kind: str, device: DeviceBuffer, host: PinnedBuffer, key: tuple[int, int]) -> None:
        """Bind a copy between device and pinned memory, if the stream has made it before."""
        made = self._made.get(key)
        if made is None or made() is not device:
            if len(self._made) >= MOST_BOUND:
                self._made.clear()
                self._bound.clear()
            self._made[key] = weakref.ref(device)
            return
        known = self._bound.get(key)
        if known is None or not known.binds(device, host):
            if device.nbytes and pinned_block_of(host) is not None:
                estimate = self._estimate(kind, device.nbytes)
                self._bound[key] = BoundCopy(kind, self._queue, device, host, estimate, self._host_writes)

    def _up(self, target: DeviceBuffer, source: npt.NDArray[Any], result: object = None) -> StreamOperation[Any]:
        """Copy to the device: by DMA from pinned memory, staged from other memory."""
        queue = self._queue
        if _get_running_loop() is not queue.loop or queue.obstacles & CLOSED or self._driver.fault is not None:
            queue.check()  # raises; without a reason to raise the call is saved
        check_alike(target, source)
        nbytes = target.nbytes
        if nbytes == 0:
            self.uploads += 1
            operation = queue.enqueue("upload", None, nothing, ())
            self._set_result(operation, result)
            return operation
        pinned, address = _place_of(source)
        self._prepare(target._block)
        estimate = self._estimate("upload", nbytes)
        if pinned is not None:
            call = (queue.handle, target.address, address, nbytes)
            operation = self._direct("upload", pinned, estimate, self._driver.upload, call, (target, source))
        else:
            # By DMA the device reads, in the order of streams. Here the host reads, now or soon.
            writer = self._host_writes.writer(address, nbytes)
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
            self._set_result(operation, result, target._block, *((pinned,) if pinned is not None else ()))
        self.uploads += 1
        self.bytes_uploaded += nbytes
        return operation

    def _down(self, target: npt.NDArray[Any], source: DeviceBuffer, result: object) -> StreamOperation[Any]:
        """Copy to the host: by DMA into pinned memory, staged into other memory."""
        queue = self._queue
        if _get_running_loop() is not queue.loop or queue.obstacles & CLOSED or self._driver.fault is not None:
            queue.check()  # raises; without a reason to raise the call is saved
        check_alike(source, target)
        nbytes = source.nbytes
        pinned, address = _place_of(target)
        if nbytes == 0:
            operation = queue.enqueue("download", None, nothing, ())
            self._set_result(operation, result)
        else:
            self._prepare(source._block)
            estimate = self._estimate("download", nbytes)
            writer = self._host_writes.writer(address, nbytes)
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
            self._host_writes.add(address, nbytes, operation)
            if result is not None:
                self._set_result(operation, result, source._block, *((pinned,) if pinned is not None else ()))
        self.downloads += 1
        self.bytes_downloaded += nbytes
        return operation

    def _prepare(self, memory: Block) -> None:
        """Prepare memory of the device, unless this stream uses it already."""
        used = memory.uses.get(self._queue)
        # If that operation failed or was skipped, so were the waits before it.
        if used is None or (used.extra is not None and used.failure is not None) or not memory.ready:
            self._access.prepare(memory)

    def _direct(
        self, kind: str, pinned: Block, estimate: Estimate, call: Callable[..., object], arguments: tuple[Any, ...],
        keep: object,
    ) -> StreamOperation[Any]:  # fmt: skip
        """Copy by DMA, once the host memory is page-locked. The operation fails if that cannot be locked."""
        queue = self._queue
        gate = None if pinned.ready and queue in pinned.uses else self._access.prepare(pinned)
        if gate is None:
            operation: StreamOperation[Any] = new_operation(
                queue, kind, estimate, keep
            )  # `enqueue`, with one call less
            queue.submit(operation, call, arguments)
        else:
            operation = queue.rare.enqueue_gated(kind, gate, call, arguments, keep)
        pinned.uses[queue] = operation
        return operation

    def _between(self, target: DeviceBuffer, source: DeviceBuffer) -> StreamOperation[None]:
        """Copy within the device, or to or from another one."""
        queue = self._queue
        queue.check()
        check_alike(target, source)
        nbytes = target.nbytes
        if nbytes == 0:
            self.copies += 1
            return queue.enqueue("copy", None, nothing, ())
        to, origin = block_of(target), block_of(source)
        check_overlap(target, source)
        here = self._resources.index
        to_place = here if to.device == here else self._place(to)
        place = here if origin.device == here else self._place(origin)
        if here not in (to_place, place):
            raise WrongDeviceError(
                f"copy from device {origin.device} to device {to.device} on a stream of device {here}: "
                "use a stream of one of the two"
            )
        for block, at in ((to, to_place), (origin, place)):
            if at == here or block.driver is not self._driver:
                self._access.prepare(block)  # raises, if the block is another driver's
            else:
                block.check()
                self._access.note_cross_device_use(block)
                if block.allocation_event is not None:
                    queue.follow(block.allocation_event)
        estimate = self._estimate("copy", nbytes)
        if to_place == place:
            call: tuple[int, ...] = (queue.handle, target.address, source.address, nbytes)
            operation = queue.enqueue("copy", estimate, self._driver.copy, call, (target, source))
        else:
            call = (queue.handle, target.address, to_place, source.address, place, nbytes)
            copy_peer = self._driver.copy_peer if (to_place, place) in self._peers else self._first_copy_peer
            operation = queue.enqueue("copy", estimate, copy_peer, call, (target, source))
        for block, at in ((to, to_place), (origin, place)):
            if at == here:
                block.uses[queue] = operation
            else:
                block.used_by_peer(queue, operation)
        self._note(source, "copy", writes=False)
        self._note(target, "copy", writes=True)
        self.copies += 1
        self.bytes_copied += nbytes
        return operation

    def _first_copy_peer(self, stream: int, target: int, to: int, source: int, place: int, nbytes: int) -> None:
        """Copy from one device to another. The first copy of a process between the two enables peer access."""
        waiting = WaitingCalls.of(self._driver)
        waiting.run("cuCtxEnablePeerAccess", self._driver.copy_peer, stream, target, to, source, place, nbytes)
        self._peers.add((to, place))

    def _place(self, block: Block) -> int:
        """Return the device of memory that is not this device's: shared managed memory counts as that of the stream."""
        here = self._resources
        if isinstance(block, ManagedBlock) and block.driver is here.driver and block.obstacle(here.properties) is None:
            return here.index
        return block.device

    def fill(self, buffer: DeviceBuffer, value: object) -> StreamOperation[None]:
        queue = self._queue
        queue.check()
        if not isinstance(buffer, DeviceBuffer):
            check_awaited(buffer, "the buffer to fill")
            cure = _buffer_of(buffer) or ": NumPy has a.fill(value)"
            raise InvalidTypeError(f"fill takes a device buffer, not {type(buffer).__name__}{cure}")
        pattern = pattern_of(buffer.dtype, value)
        block = block_of(buffer)
        block.check()
        if buffer.nbytes == 0:
            self.fills += 1
            return queue.enqueue("fill", None, nothing, ())
        self._access.prepare(block)
        estimate = self._estimate("fill", buffer.nbytes)
        call = (queue.handle, buffer.address, pattern, buffer.nbytes // len(pattern))
        operation = queue.enqueue("fill", estimate, self._driver.fill, call, buffer)
        block.uses[queue] = operation
        self._note(buffer, "fill", writes=True)
        self.fills += 1
        return operation

    def prefetch(self, buffer: UnifiedBuffer, to: Any) -> StreamOperation[None]:
        queue = self._queue
        queue.check()
        if not isinstance(buffer, UnifiedBuffer):
            check_awaited(buffer, "the buffer to prefetch")
            raise InvalidArgumentError(
                f"only managed memory can be prefetched, not {buffer!r}: make it by device.unified(shape, dtype)"
            )
        index = place_of(to, queue.device_state, "prefetched")
        block = block_of(buffer)
        block.check()
        properties = self._resources.properties
        if not properties.concurrent_managed_access:
            raise UnsupportedError(
                f"{properties.name} prefetches nothing: it has no concurrent managed access "
                "(device.properties.concurrent_managed_access), and moves managed memory when a kernel is launched"
            )
        if buffer.nbytes == 0:
            return queue.enqueue("prefetch", None, nothing, ())
        self._access.prepare(block)
        estimate = self._estimate("prefetch", buffer.nbytes)
        call = (queue.handle, buffer.address, buffer.nbytes, index)
        operation = queue.enqueue("prefetch", estimate, self._driver.prefetch, call, buffer)
        block.uses[queue] = operation
        buffer._used(index, "prefetch", reads=False, writes=False, asked=True)
        return operation

    def _note(self, buffer: DeviceBuffer, operation: str, writes: bool) -> None:
        """Note that managed memory moves to the device that reads or writes it."""
        if isinstance(buffer, UnifiedBuffer):
            buffer._used(self._resources.index, operation, reads=not writes, writes=writes)

    def _estimate(self, kind: str, nbytes: int) -> Estimate:
        key = (kind, nbytes.bit_length())
        found = self._estimates.get(key)
        if found is None:
            found = self._estimates[key] = self._queue.device_state.predictor.estimate(key)
        return found

    def _set_result(self, operation: StreamOperation[Any], value: object, *blocks: Block) -> None:
        """Set the operation's result, unless it has failed already.

        The blocks record the operation as their user, and the operation holds its result: a buffer would hold itself.
        So the blocks forget the operation once it has passed.
        """
        if operation.failure is not None or operation.status > DONE:
            return
        operation.value = value
        queue, release = self._queue, operation.on_settled

        def passed() -> None:
            for block in blocks:
                block.forget(queue, operation)
            if release is not None:
                release()

        if blocks:
            operation.on_settled = passed


def _place_of(array: npt.NDArray[Any]) -> tuple[Block | None, int]:
    """Return the pinned block that holds the array, None if it is not pinned; and the array's address."""
    if isinstance(array, PinnedBuffer):
        return array._pinned_block(), array.address
    return None, address_of(array)


def _held(source: npt.NDArray[Any]) -> object:
    """Return the array with a buffer export of it: NumPy and bytearray refuse to resize while that exists."""
    try:
        return (source, memoryview(source))  # type: ignore[arg-type]  # an ndarray exports a buffer
    except (ValueError, TypeError, BufferError):
        return source  # a dtype that exports no buffer: float8, datetime64 …


def check_overlap(target: DeviceBuffer, source: DeviceBuffer) -> None:
    """Raise if two ranges of equal size overlap."""
    if target._block is source._block and abs(target.address - source.address) < target.nbytes:
        raise InvalidArgumentError(f"source and target overlap in one buffer: {source!r} and {target!r}")


def refuse_host_copy(target: Any, source: Any) -> NoReturn:
    """Raise the error of a copy between two objects that are no device buffers."""
    as_target(target)
    as_source(source)
    raise InvalidArgumentError("neither side of the copy is device memory: use NumPy between host arrays")


@functools.lru_cache(maxsize=256)
def _int_pattern(dtype: np.dtype[Any], value: int) -> bytes:
    """Return the pattern of an integer, cached: NumPy needs 15 µs for it."""
    return _any_pattern(dtype, value)


def pattern_of(dtype: np.dtype[Any], value: object) -> bytes:
    """Return the bytes of one item with this value; the first byte only, if all are equal."""
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


def _buffer_of(thing: object) -> str:
    """Return the cure for an object that has a buffer and is none; else nothing."""
    return ": its .buffer is one" if hasattr(type(thing), "buffer") else ""
