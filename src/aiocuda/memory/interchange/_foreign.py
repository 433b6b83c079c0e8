"""Foreign memory: allocated by another library, and used by our buffers.

A block of it holds the producer's array. The array is released once the block has been freed, or nothing refers to it,
and all operations that use it have passed: the producer may then use the memory again, in an order that aiocuda
cannot see. The release happens in a sweep on a loop, because it runs code of the producer.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from ..._core import Ring, StreamOperation
from ...completion._device_state import DeviceState
from ...completion._progress import check_awaited
from ...errors import BusyError, InvalidArgumentError, InvalidTypeError, WrongDeviceError
from .._block import Block
from .._buffer import DeviceBuffer
from .._deferred_frees import SWEEP_LIMIT, DeferredFrees
from .._pinned import PinnedBuffer, PinnedPool
from . import _array_interface, _dlpack
from ._exports import Exports

__all__ = ["ForeignMemory", "check_contiguous", "reach"]

_LEGACY: Final = 1  # CU_STREAM_LEGACY, as DLPack calls it

#: Memory that a device may still access after it was closed with unfinished work. It is never released.
_leaked: list[object] = []


class ForeignBlock(Block):
    """A block of another library's memory.

    Attributes
    ----------
    producer
        The object that holds the memory.
    """

    __slots__ = ("producer",)

    producer: object

    def __init__(
        self,
        memory: ForeignMemory,
        producer: object,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        allocation_event: StreamOperation[Any] | None,
        home: Ring | None,
    ) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        index = memory.device_state.device
        super().__init__(memory.driver, index, address if nbytes else 0, nbytes, home, memory, shape, dtype)
        self.producer = producer
        self.allocation_event = allocation_event

    def release(self) -> None:
        """Let the other library have its memory back: nothing uses the block."""
        self.producer = None

    def __del__(self) -> None:
        # This may run on any thread, at any point of the program: it must do nothing else.
        self.owner.dropped.append(getattr(self, "producer", None))


class ForeignMemory:
    """The memory of other libraries that one device's buffers use.

    Attributes
    ----------
    device_state, driver, properties
        Of the opened device.
    device
        The `aiocuda.Device`, for `DeviceBuffer.device`.
    exports
        Our buffers that other libraries hold: these may be adopted again.
    closed
        True once the device has been closed.
    dropped
        Producers of dropped blocks, left by finalisers; see `ForeignBlock`.
    """

    __slots__ = ("_blocks", "_deferred_frees", "_pinned", "closed", "device", "device_state", "driver", "dropped",
                 "exports", "properties")  # fmt: skip

    def __init__(self, device_state: DeviceState, device: object, exports: Exports, pinned: PinnedPool) -> None:
        self.device_state = device_state
        self.driver = device_state.driver
        self.properties = device_state.properties
        self.device = device
        self.exports = exports
        self.closed = False
        self.dropped: list[Any] | deque[Any] = []
        self._pinned = pinned
        self._deferred_frees: DeferredFrees[ForeignBlock] = DeferredFrees()
        self._blocks: dict[weakref.ref[ForeignBlock], None] = {}

    @property
    def alive(self) -> Collection[weakref.ref[ForeignBlock]]:
        """Weak references to the blocks that exist."""
        return self._blocks.keys()

    # -- adopt ---------------------------------------------------------------------------------------------------

    def adopt(self, queue: Ring, array: Any, read_only: bool) -> DeviceBuffer | PinnedBuffer:
        """Return a buffer over another library's array: `aiocuda.Stream.adopt`."""
        queue.check()
        check_awaited(array, "what is to be adopted")
        if isinstance(array, DeviceBuffer) and array.device is not self.device:
            raise WrongDeviceError(
                f"{array!r} is a buffer of another device already: bring it over by stream.copy(target, source)"
            )
        if _dlpack.is_capsule(array):
            return self._from_capsule(queue, array, read_only, "the capsule", ordered=False)
        if hasattr(type(array), "__dlpack__"):
            return self._from_dlpack(queue, array, read_only)
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is not None:
            return self._from_interface(array, _array_interface.read(interface), read_only)
        raise InvalidTypeError(
            f"{type(array).__name__} has neither __dlpack__ nor __cuda_array_interface__: a host array goes by "
            "stream.upload(array)"
        )

    def _from_dlpack(self, queue: Ring, array: Any, read_only: bool) -> DeviceBuffer | PinnedBuffer:
        """Adopt an array with ``__dlpack__``. The producer lets our stream wait for its work."""
        is_ours = isinstance(array, DeviceBuffer)
        place = self.exports.memory_of(array) if is_ours else array.__dlpack_device__()
        kind, index = (int(part) for part in place)
        what = f"this {type(array).__name__}"
        self._check_device(what, kind, index)
        if kind == _dlpack.CUDA_HOST:
            pinned = np.from_dlpack(array)  # which holds the producer
            _check_writable(what, not pinned.flags.writeable, read_only)
            return self._pinned.borrow(pinned)[0]
        handle = self.driver.stream_handle(queue.handle)
        stream = handle or (_LEGACY if kind != _dlpack.EXTENSION else handle)
        try:
            capsule = array.__dlpack__(stream=stream, max_version=_dlpack.VERSION)
        except TypeError:  # older than DLPack 1.0
            capsule = array.__dlpack__(stream=stream)
        return self._from_capsule(queue, capsule, read_only, what, ordered=True)

    def _from_capsule(self, queue: Ring, capsule: object, read_only: bool, what: str, *, ordered: bool) -> DeviceBuffer:
        """Adopt the array in a capsule. ``ordered``: the producer has let this stream wait for its work."""
        tensor = _dlpack.read(capsule)
        self._check_device(what, tensor.device_type, tensor.device_id)
        if tensor.device_type == _dlpack.CUDA_HOST:
            raise InvalidTypeError(f"{what} has pinned memory: pass the array that it was made from")
        if tensor.device_type == _dlpack.EXTENSION and not self.exports.owns(tensor.address):
            raise WrongDeviceError(
                f"{what} is on an extension device that is not {self.device!r}: only buffers that were exported "
                "there can be adopted"
            )
        if tensor.strides is not None:
            check_contiguous(what, tensor.shape, tensor.strides, tensor.dtype.itemsize)
        _check_writable(what, tensor.read_only, read_only)
        producer = _dlpack.take(capsule)
        allocation_event = queue.submit_marker() if ordered else None
        return self._buffer(producer, tensor.address, tensor.shape, tensor.dtype, allocation_event, queue)

    def _from_interface(self, array: object, interface: _array_interface.Interface, read_only: bool) -> DeviceBuffer:
        """Adopt an array with ``__cuda_array_interface__``. It names no device, so the driver looks up the address."""
        what = f"this {type(array).__name__}"
        shape, strides, itemsize = interface.shape, interface.strides, interface.dtype.itemsize
        _check_writable(what, interface.read_only, read_only)
        low, high = reach(shape, strides or _c_strides(shape, itemsize), itemsize)
        if high > low:
            found = self.driver.locate(interface.address)
            if found is None:
                raise InvalidArgumentError(
                    f"{what} has the address {interface.address:#x}, where there is no memory of a device",
                    address=interface.address,
                )
            if found.device not in (-1, self.device_state.device):
                raise self._other_device(what, found.device)
            begin = interface.address - found.address
            if begin + low < 0 or begin + high > found.nbytes:
                raise InvalidArgumentError(
                    f"{what} of shape {shape} and strides {strides} reaches from byte {begin + low} to "
                    f"{begin + high} of an allocation of {found.nbytes}"
                )
        if strides is not None:
            check_contiguous(what, shape, strides, itemsize)
        allocation_event = None if interface.stream is None else self._mark(interface.stream)
        return self._buffer(array, interface.address, shape, interface.dtype, allocation_event, None)

    def _mark(self, handle: int) -> StreamOperation[Any]:
        """Return an event after all work in the producer's stream, for each stream's first use of the buffer."""
        queue = self.exports.queue_of(handle)
        if queue.shared and queue.rare.is_captured():
            raise BusyError(f"{queue.name}, the producer's stream, is being captured: end that first")
        return queue.submit_marker()

    def _buffer(
        self,
        producer: object,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        allocation_event: StreamOperation[Any] | None,
        home: Ring | None,
    ) -> DeviceBuffer:
        """Return a buffer over checked memory. First uses in streams but ``home`` wait for ``allocation_event``."""
        block = ForeignBlock(self, producer, address, shape, dtype, allocation_event, home)
        self._blocks[weakref.ref(block, self._blocks.pop)] = None
        return DeviceBuffer(self, block, 0, shape, dtype)

    def _check_device(self, what: str, kind: int, index: int) -> None:
        """Raise unless an array of this DLPack device can be used on our device."""
        if kind == _dlpack.CPU:
            raise WrongDeviceError(
                f"{what} is in {_dlpack.device_name(kind)}: bring it to the device by `await stream.upload(x)`"
            )
        if kind == _dlpack.CUDA_HOST:
            return  # usable by every device
        if kind not in ((_dlpack.CUDA, _dlpack.CUDA_MANAGED) if self.exports.is_cuda else (_dlpack.EXTENSION,)):
            raise WrongDeviceError(f"{what} is on {_dlpack.device_name(kind)}, the stream on {self.device!r}")
        if index != self.device_state.device and kind != _dlpack.CUDA_MANAGED:
            raise self._other_device(what, index)

    def _other_device(self, what: str, index: int) -> WrongDeviceError:
        own = self.device_state.device
        return WrongDeviceError(
            f"{what} is on device {index}, the stream on device {own}: adopt it on a stream of device {index}, "
            "then bring it over by stream.copy(target, source)",
            device=index,
            expected=own,
        )

    # -- release -------------------------------------------------------------------------------------------------

    def free(self, block: Block, queue: Ring | None) -> None:
        """Release a block once all operations that use it have passed. ``queue`` is only checked."""
        assert isinstance(block, ForeignBlock)
        if queue is not None and (
            queue.device_state.driver is not self.driver or queue.device_state.device != self.device_state.device
        ):
            raise WrongDeviceError(f"{queue.name} is a stream of another device: free on a stream of this one")
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        if queue is not None:
            queue.check()
        block.retire()
        self._deferred_frees.add(block)
        self.sweep(SWEEP_LIMIT)

    def sweep(self, most: int | None = None) -> None:
        """Release the arrays of unused buffers. ``most`` limits the freed buffers to look at; None means all."""
        if self.driver.fault is not None or self.closed:
            return
        for block in self._deferred_frees.take(most):
            block.release()
        self.dropped.clear()

    def close(self) -> None:
        """Release all arrays, except those that the device may still access."""
        self.closed = True
        if self.driver.fault is not None:
            _leaked.extend((self._deferred_frees, self.dropped))  # and the producers that finalisers append later
            return
        for known in list(self._blocks):
            block = known()
            if block is None:
                continue  # deleted since
            if block.unfinished():
                _leaked.append(block)
            else:
                block.release()  # the buffer cannot be used any more
        self._deferred_frees.clear()
        self.dropped = deque(maxlen=0)  # there are no sweeps any more: later producers are released immediately


def reach(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return (lowest, highest + 1) byte of an array, relative to its first item. Strides are in bytes."""
    if 0 in shape:
        return 0, 0
    steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + itemsize


def check_contiguous(what: str, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Raise unless the items lie in C order without gaps. A dimension of one item may have any stride."""
    if 0 in shape:
        return
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            raise InvalidArgumentError(
                f"{what} of shape {tuple(shape)} is not C-contiguous, its strides are {tuple(strides)} bytes: pass "
                "x.contiguous() (PyTorch) or cupy.ascontiguousarray(x)",
                strides=tuple(strides),
            )
        expected *= extent


def _check_writable(what: str, is_read_only: bool, read_only: bool) -> None:
    if is_read_only and not read_only:
        raise InvalidArgumentError(
            f"{what} is read-only, and a buffer may be written: if no operation writes it, use "
            "stream.adopt(x, read_only=True); else copy it first"
        )


def _c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of a C-contiguous array."""
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))
