"""Device buffers: memory of a device, as an array."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from .._base._arrays import as_dtype, as_shape
from .._base._keeps import keeps
from .._base._mistakes import or_none, refuses
from .._base._names import CURES
from .._base._types import Span
from .._core import HasOperation, Operation, StreamOperation
from ..errors import BusyError, ClosedError, InvalidArgumentError, InvalidTypeError, WrongDeviceError
from ._block import Block

if TYPE_CHECKING:
    from ..completion._stream_queue import HasQueue
    from ._allocator import DeviceMemory
    from ._managed import ManagedPool
    from .interchange._foreign import ForeignMemory

__all__ = ["NO_BLOCK", "DeviceBuffer", "block_of", "offset_of"]

#: The cure for `with` and `async with` of a buffer.
NO_BLOCK = "needs no block: the memory is freed when nothing refers to it, or by buffer.free()"


@keeps(shape="buffer.reshape(…) returns a buffer of the same memory", dtype="buffer.view(dtype) returns one")
@refuses(
    "has no arithmetic on the host: launch a kernel on it, or compute with `await stream.download(buffer)`",
    "__float__", "__int__", __enter__=NO_BLOCK, __aenter__=NO_BLOCK,
)  # fmt: skip
class DeviceBuffer:
    """Device memory as a C-contiguous array.

    Made by `aiocuda.Stream.empty`, `empty_like` and `upload`. It can be used immediately, on its own stream and on any
    other stream of the device: the first use on another stream waits, on the device, for the allocation. Streams and
    their waits order the accesses, as in CUDA. The memory returns to the pool when the buffer is freed, or when the
    last reference to it is gone; operations that use the buffer hold a reference.

    Attributes
    ----------
    nbytes : int
    """

    __slots__ = ("__weakref__", "_argument", "_block", "_dtype", "_memory", "_offset", "_shape", "nbytes")

    @or_none
    def __init__(
        self,
        memory: DeviceMemory | ManagedPool | ForeignMemory,
        block: Block,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        nbytes: int | None = None,
    ) -> None:
        self._memory = memory
        self._block = block
        self._offset = offset
        self._shape = shape
        self._dtype = dtype
        if nbytes is None:
            if shape is None:
                raise InvalidTypeError("a buffer is made by a stream: stream.empty(shape, dtype)")
            nbytes = math.prod(shape) * dtype.itemsize
        self.nbytes = nbytes

    #: The driver's kernel argument. `__getattr__` makes it at the first launch: many buffers are only copied.
    _argument: object

    def __getattr__(self, name: str) -> Any:
        if name != "_argument":
            lacking = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name == "__cuda_array_interface__":  # the property has raised AttributeError, so Python calls this
                lacking = (
                    f"{self!r} is not CUDA's memory, and its address means nothing to other libraries: download it"
                )
            elif not name.startswith("_"):
                cures = CURES.get(type(self).__name__, {})
                lacking += ": " + cures.get(
                    name, "streams work on its memory, and `await stream.download(buffer)` is a NumPy array of it"
                )
            raise AttributeError(lacking, name=name, obj=self)
        span = Span(self._block.address + self._offset, self.shape, self.dtype)
        self._argument = found = self._memory.driver.argument(span)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of items along each dimension. `reshape` returns a buffer with another one."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the items. `view` returns a buffer with another one."""
        return self._dtype

    @property
    def address(self) -> int:
        """The address of the first byte on the device; 0 for a buffer of no bytes."""
        block = self._block
        if block.freed or block.owner.closed:
            block.check()  # raises
        return block.address + self._offset

    @property
    def size(self) -> int:
        """The number of items."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def device(self) -> Any:
        """The `aiocuda.Device` of the memory."""
        return self._memory.device

    @property
    def freed(self) -> bool:
        """True once the buffer, or the buffer that it is a slice of, has been freed."""
        return self._block.freed

    def free(self, stream: HasQueue | None = None) -> None:
        """Free the memory after all enqueued work that uses it. The call does not wait. ``cuMemFreeAsync``.

        Slices of the buffer are freed with it.

        Parameters
        ----------
        stream
            The memory is freed in the order of this stream; of the buffer's own stream if left out. In both cases the
            free waits, on the device, for all streams that used the buffer.

        Raises
        ------
        StaleHandleError
            The buffer has been freed before.
        """
        block = self._block
        if block.freed or self._memory.closed:
            block.check()
        queue = None
        if stream is not None:
            try:
                queue = stream._queue
            except AttributeError:
                raise InvalidTypeError(f"a buffer is freed on an aiocuda.Stream, not on {stream!r}") from None
        self._memory.free(block, queue)

    def add_dependency(self, other: Operation[Any] | HasOperation) -> None:
        """Free the memory only after this operation, too: for work that uses the buffer without aiocuda knowing it.

        The free waits for it on the device. An operation that is done already has no effect.

        Parameters
        ----------
        other
            An operation or an event of any stream of this driver, on this loop.

        Raises
        ------
        StaleHandleError
            The buffer has been freed, or the event released.
        ClosedError
            The buffer's device is being closed, and the operation belongs to another device, or to another opening of
            this one.
        WrongDeviceError
            The operation belongs to another driver.
        BusyError
            The operation was recorded into a graph: it runs when the graph is launched.
        """
        self._block.check()
        operation = other if isinstance(other, Operation) else getattr(other, "operation", None)
        if not isinstance(operation, StreamOperation):
            raise InvalidTypeError(f"a buffer depends on an operation or an event, not on {type(other).__name__}")
        if operation.queue.device_state.driver is not self._memory.driver:
            raise WrongDeviceError(f"{operation!r} belongs to another driver: await it before the buffer is freed")
        operation.queue.check_loop()
        if operation.status < 0:  # recorded into a graph and not enqueued: it never passes
            raise BusyError(
                f"{operation!r} was recorded into a graph and does not run by itself: add what graph.launch(stream) "
                "returns"
            )
        device_state, queue = self._memory.device_state, operation.queue
        if queue.device_state is not device_state and not operation.is_settled:
            if device_state.closing:
                raise ClosedError(
                    f"{device_state.properties.name} is being closed: its memory accepts no new dependencies"
                )
            device_state.note_cross_device_use(queue)  # keeps the device open until the dependency has passed
        self._block.depend(operation)

    @property
    def satisfied(self) -> bool:
        """True if a free would wait for nothing: all uses and dependencies have passed. Queries as `Operation.done`."""
        unfinished = self._block.unfinished()
        for use in unfinished:
            if isinstance(use, StreamOperation):
                use.queue.glance()
        return not unfinished or not self._block.unfinished()

    def _awaited(self) -> list[StreamOperation[Any]]:
        """Return what `aiocuda.wait` waits for: the unfinished uses."""
        return self._block.awaited()

    def clear_dependencies(self) -> None:
        """Remove the operations that `add_dependency` has added. A free still waits for the uses of the buffer."""
        self._block.check()
        self._block.clear_dependencies()

    def __getitem__(self, index: Any) -> Self:
        """Return a view of a contiguous part, in the same memory."""
        if type(index) is slice and len(self.shape) == 1 and type(index.start) is type(index.stop) is int:
            start, stop, step = index.indices(self.shape[0])
            if step == 1 and start < stop:  # `_slice` takes three times as long
                itemsize = self.dtype.itemsize
                offset, length = self._offset + start * itemsize, stop - start
                return type(self)(self._memory, self._block, offset, (length,), self.dtype, length * itemsize)
        offset, shape = _slice(index, self.shape, self.dtype.itemsize)
        return type(self)(self._memory, self._block, self._offset + offset, shape, self.dtype)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise InvalidTypeError(
            "device memory cannot be assigned to: `stream.fill(buffer[…], value)` or `stream.copy(buffer[…], array)`"
        )

    def reshape(self, *shape: Any) -> Self:
        """Return a view with another shape of the same size."""
        wanted = shape[0] if len(shape) == 1 else shape
        given = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
        # The extent to be computed. Not `given.index(-1)`: comparing an array gives an array, which has no truth value.
        at = next((at for at, extent in enumerate(given) if isinstance(extent, int) and extent == -1), None)
        if at is not None:
            given[at] = 1
        try:
            extents = as_shape(given)
        except InvalidArgumentError:
            extents = (-1,)
        known = math.prod(extents)
        if at is not None and known > 0:
            extents = (*extents[:at], self.size // known, *extents[at + 1 :])
        if math.prod(extents) != self.size:
            raise InvalidArgumentError(
                f"{self.size} items of shape {self.shape} cannot take shape {wanted}: give one of as many items, or -1 "
                "for one extent"
            )
        return type(self)(self._memory, self._block, self._offset, extents, self.dtype)

    def view(self, dtype: npt.DTypeLike) -> Self:
        """Return a view of the same bytes with another dtype; the last dimension changes with the item size."""
        found = as_dtype(dtype)
        if not self.shape:
            raise InvalidArgumentError("a 0-d buffer has no last dimension to view as another dtype: reshape it first")
        last, rest = divmod(self.shape[-1] * self.dtype.itemsize, found.itemsize)
        if rest:
            raise InvalidArgumentError(
                f"the last dimension has {self.shape[-1]} items of {self.dtype}, which are no whole number of {found}"
            )
        return type(self)(self._memory, self._block, self._offset, (*self.shape[:-1], last), found)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule for another library: ``torch.from_dlpack(buffer)``, ``cupy.from_dlpack(buffer)``.

        The consumer's stream waits, on the device, for the work that uses the buffer now. The memory is not freed while
        the consumer holds it. When the consumer releases it, it is freed after all work that the consumer's
        stream has received. Call this on the event loop.

        Without CUDA, no other library can use the memory. There a buffer of a loader's batch is exported as a copy in
        host memory, and other buffers are refused.

        Parameters
        ----------
        stream
            The consumer's: 1 or None for CUDA's legacy default stream, 2 for the thread's own, or a handle. -1: the
            consumer waits for the buffer's uses by itself, and releases the memory after its own.
        max_version
            The newest DLPack version that the consumer supports. None requests the form before 1.0.
        dl_device
            The requested (device type, index). Managed memory may be requested as CUDA's or as the host's.
        copy
            True is refused, except where the export is a copy: there False is refused.

        Raises
        ------
        BusyError
            An operation that uses the buffer is still on the host; or one is unfinished, and the consumer names no
            stream for memory that the host may read, which is managed memory or a copy. It is a `BufferError`, too.
        UnsupportedError
            This request cannot be met: await `Stream.download` for an array. It is a `BufferError`, too.
        """
        return self._memory.exports.capsule(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (DLPack device type, index): 2 is CUDA, 13 managed memory; without CUDA 12, and 1 for a copy."""
        return self._memory.exports.device_of(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of Numba's protocol. Its ``stream`` waits for all work that uses the buffer now.

        The consumer holds this buffer, but does not name its own stream: drop the consumer's array only when its work
        is done.

        Raises
        ------
        AttributeError
            The driver is not CUDA: no other library could use the address.
        BusyError
            An operation that uses the buffer is still on the host: await it.
        UnsupportedError
            The protocol cannot express this dtype.
        """
        if not self._memory.exports.is_cuda:
            raise AttributeError  # Python then calls `__getattr__`, which has the message
        return self._memory.exports.interface(self)

    def __len__(self) -> int:
        if not self.shape:
            raise InvalidTypeError("a 0-d buffer has no length")
        return self.shape[0]

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidTypeError("this is device memory: use `await stream.download(buffer)` for a NumPy array")

    def __bool__(self) -> NoReturn:
        raise InvalidTypeError(
            "a device buffer has no truth value: compare it with None, or `await stream.download(buffer)`"
        )

    def __iter__(self) -> NoReturn:
        raise InvalidTypeError("a device buffer cannot be iterated: use `await stream.download(buffer)`")

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError("device memory cannot be pickled or copied: use `await stream.download(buffer)`")

    def __repr__(self) -> str:
        state = "freed" if self._block.freed else f"{self.nbytes} bytes"
        return (
            f"<{type(self).__name__} shape={self.shape} dtype={self.dtype} "
            f"device={self._memory.driver.name}:{self._block.device} {state}>"
        )


#: Return the block that a buffer is a view of. In C: hot paths call it.
block_of: Callable[[DeviceBuffer], Block] = operator.attrgetter("_block")

#: Return the offset, in bytes, of a buffer in its block.
offset_of: Callable[[DeviceBuffer], int] = operator.attrgetter("_offset")


def _slice(index: Any, shape: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...]]:
    """Return (offset in bytes, shape) of a basic index; its result must be contiguous."""
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    ellipses = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1 or len(parts) - len(ellipses) > len(shape):
        raise InvalidArgumentError(f"too many indices for shape {shape}: {index!r}")
    for at in ellipses:
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    ranges = [_range(part, extent) for part, extent in zip(parts, shape, strict=True)]
    result = tuple(length for part, (_, length) in zip(parts, ranges, strict=True) if isinstance(part, slice))
    if 0 in result:
        return 0, result
    stride = math.prod(shape) * itemsize
    offset = 0
    split = False  # True once an earlier dimension of the result has more than one item
    for (start, length), extent in zip(ranges, shape, strict=True):
        stride //= extent
        if split and length != extent:
            raise InvalidArgumentError(
                f"{index!r} of shape {shape} is not contiguous: slice the leading dimension only"
            )
        split = split or length > 1
        offset += start * stride
    return offset, result


def _range(part: Any, extent: int) -> tuple[int, int]:
    """Return (start, length) of the index of one dimension."""
    try:
        if isinstance(part, slice):
            start, stop, step = part.indices(extent)
            if step != 1:
                raise InvalidArgumentError(
                    f"a slice of a buffer must have step 1, not {step}: it is a contiguous view. A kernel takes other "
                    "items, or `(await stream.download(buffer))[index]`"
                )
            return start, max(0, stop - start)
        if isinstance(part, (bool, np.bool_, np.ndarray)):
            raise TypeError
        start = operator.index(part)
    except TypeError:
        given = "an array or a list" if isinstance(part, (list, np.ndarray)) else repr(part)
        raise InvalidTypeError(
            f"a buffer is indexed by integers and slices, not {given}: a kernel takes other items, or "
            "`(await stream.download(buffer))[index]`"
        ) from None
    if not -extent <= start < extent:
        raise InvalidArgumentError(f"index {start} is out of range for a dimension of {extent}")
    return start % extent, 1
