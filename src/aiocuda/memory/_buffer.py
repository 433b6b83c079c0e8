"""Device buffers: memory of a device, as an array."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt

from .._mistakes import refuses
from .._types import Span
from ..completion._operation import Operation
from ..completion._stream_queue import stream_queue
from ..errors import BusyError, ClosedError, InvalidArgumentError, InvalidTypeError, WrongDeviceError
from ._arrays import as_dtype, as_shape
from ._block import Block
from ._dlpack import CUDA

if TYPE_CHECKING:
    from ..completion._stream_queue import StreamQueue
    from ._allocator import DeviceMemory
    from ._foreign import ForeignMemory
    from ._managed import ManagedPool

__all__ = ["DeviceBuffer"]


class HasQueue(Protocol):
    """An `aiocuda.Stream`, as memory sees it."""

    @property
    def _queue(self) -> StreamQueue: ...


class HasOperation(Protocol):
    """An `aiocuda.Event`, as memory sees it."""

    @property
    def operation(self) -> Operation[Any]: ...


@refuses("has no arithmetic on the host: launch a kernel on it, or compute with `await stream.download(buffer)`")
class DeviceBuffer:
    """Memory on a device, seen as a C-contiguous array.

    Made by `aiocuda.Stream.empty`, `empty_like` and `upload`. It may be used on its own stream at once, and on any
    other stream of the device: the first use there waits, on the device, for the allocation. Contents are ordered
    by streams and their waits, as in CUDA. It goes back to the pool when it is freed, or when nobody holds it any
    more; operations that use it hold it.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    nbytes : int
    """

    __slots__ = ("__weakref__", "_argument", "_block", "_memory", "_offset", "dtype", "nbytes", "shape")

    #: What DLPack calls this kind of memory.
    _device_type: ClassVar[int] = CUDA

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
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize if nbytes is None else nbytes

    #: What a kernel gets of it. Made when a kernel first asks: many buffers are only copied to and from.
    _argument: object

    def __getattr__(self, name: str) -> Any:
        if name != "_argument":
            lacking = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name == "__cuda_array_interface__":  # its property has said so, and comes here for it
                lacking = (
                    f"{self!r} is not CUDA's memory, and its address means nothing to other libraries: download it"
                )
            elif not name.startswith("_"):
                lacking += ": streams work on its memory, and `await stream.download(buffer)` is a NumPy array of it"
            raise AttributeError(lacking, name=name, obj=self)
        span = Span(self._block.address + self._offset, self.shape, self.dtype)
        self._argument = found = self._memory.driver.argument(span)
        return found

    @property
    def address(self) -> int:
        """Where it begins, in the device's address space. 0 for a buffer of no bytes."""
        self._block.check()
        return self._block.address + self._offset

    @property
    def size(self) -> int:
        """How many items."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """How many dimensions."""
        return len(self.shape)

    @property
    def device(self) -> Any:
        """The `aiocuda.Device` that it lives on."""
        return self._memory.device

    @property
    def freed(self) -> bool:
        """Has it, or the buffer that it is a slice of, been freed?"""
        return self._block.freed

    def free(self, stream: HasQueue | None = None) -> None:
        """Give the memory back, behind everything that uses it, without waiting for it.

        ``cuMemFreeAsync``. Slices of it are freed with it.

        Parameters
        ----------
        stream
            Whose order the memory goes back in; its own stream if left out. Streams that used the buffer are waited
            for on the device in any case.

        Raises
        ------
        StaleHandleError
            It has been freed before.
        """
        block = self._block
        if block.freed or self._memory.closed:
            block.check()
        queue = None
        if stream is not None:
            try:
                queue = stream_queue(stream)
            except AttributeError:
                raise InvalidTypeError(f"a buffer is freed on an aiocuda.Stream, not on {stream!r}") from None
        self._memory.free(block, queue)

    def add_dependency(self, other: Operation[Any] | HasOperation) -> None:
        """Give the memory back only behind this, too: work on it that aiocuda does not know of as work on it.

        The free waits for it on the device, as for everything that uses the buffer. What is done already adds nothing.

        Parameters
        ----------
        other
            An operation or an event of any stream of this driver, on this loop.

        Raises
        ------
        StaleHandleError
            The buffer has been freed, or the event released.
        ClosedError
            The buffer's device is just being closed, and the operation is one of another device, or opening.
        WrongDeviceError
            It belongs to another driver.
        BusyError
            It was recorded into a graph: that runs when the graph is launched.
        """
        self._block.check()
        operation = other if isinstance(other, Operation) else getattr(other, "operation", None)
        if not isinstance(operation, Operation):
            raise InvalidTypeError(f"a buffer depends on an operation or an event, not on {type(other).__name__}")
        if operation.queue.device_state.driver is not self._memory.driver:
            raise WrongDeviceError(f"{operation!r} belongs to another driver: await it before the buffer is freed")
        operation.queue.check_loop()
        if operation.status < 0:  # recorded into a graph, and never enqueued: it would never pass
            raise BusyError(
                f"{operation!r} was recorded into a graph and does not run by itself: add what graph.launch(stream) "
                "returns"
            )
        device_state, queue = self._memory.device_state, operation.queue
        if queue.device_state is not device_state and not operation.is_settled:
            if device_state.closing:
                raise ClosedError(
                    f"{device_state.properties.name} is being closed: its memory waits for nothing new any more"
                )
            device_state.note_cross_device_use(queue)  # so that it is not closed before the dependency has passed
        self._block.depend(operation)

    @property
    def satisfied(self) -> bool:
        """Is nothing left that a free would wait for, uses and dependencies, as far as the loop knows?"""
        return not self._block.unfinished()

    def clear_dependencies(self) -> None:
        """Forget what `add_dependency` has added. Uses of the buffer are waited for all the same."""
        self._block.check()
        self._block.dependencies = None

    def __getitem__(self, index: Any) -> Self:
        """A view of a contiguous part. It shares the memory."""
        offset, shape = _slice(index, self.shape, self.dtype.itemsize)
        return type(self)(self._memory, self._block, self._offset + offset, shape, self.dtype)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise InvalidTypeError(
            "device memory is not assigned to: `stream.fill(buffer[…], value)` or `stream.copy(buffer[…], array)`"
        )

    def reshape(self, *shape: Any) -> Self:
        """A view with another shape of as many items."""
        wanted = shape[0] if len(shape) == 1 else shape
        given = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
        # The one that follows from the others. Not `given.index(-1)`: an array in it would be asked for its truth.
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
            raise InvalidArgumentError(f"{self.size} items of shape {self.shape} cannot take shape {wanted}")
        return type(self)(self._memory, self._block, self._offset, extents, self.dtype)

    def view(self, dtype: npt.DTypeLike) -> Self:
        """The same bytes read as another dtype; the last dimension's length changes with the item size."""
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
        """A capsule for another library: ``torch.from_dlpack(buffer)``, ``cupy.from_dlpack(buffer)``.

        The consumer's stream waits, on the device, for what uses the buffer now. As long as the consumer holds the
        memory it does not go back; when it lets go, the memory goes back behind what that stream was given by then.
        Call it on the event loop.

        Parameters
        ----------
        stream
            The consumer's: 1 or None for CUDA's legacy default stream, 2 for the thread's own, or a handle. -1: the
            consumer comes behind the buffer's uses, and lets go behind its own, by itself.
        max_version
            The newest DLPack that the consumer knows. None asks for the form before 1.0.
        dl_device
            Where the consumer wants it, (device type, index). Managed memory may be asked for as CUDA's or the host's.
        copy
            True is refused.

        Raises
        ------
        BusyError
            What uses the buffer is still on the host; or it is unfinished, and the consumer names no stream for managed
            memory, which the host may look at. It is a `BufferError`, too.
        UnsupportedError
            It cannot be handed out like that. It is a `BufferError`, too.
        """
        return self._memory.exports.capsule(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(DLPack device type, index): 2 is CUDA, 13 managed memory, 12 a driver without CUDA, which only we take."""
        return self._memory.exports.device_of(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of Numba's protocol. Its ``stream`` is behind everything that uses the buffer now.

        The consumer holds this buffer, and nobody tells us of its stream: let go of what it made when that is done.

        Raises
        ------
        AttributeError
            The driver is not CUDA: no other library could use the address.
        BusyError
            What uses the buffer is still on the host: await it.
        UnsupportedError
            The protocol has no word for this dtype.
        """
        if not self._memory.exports.is_cuda:
            raise AttributeError  # `__getattr__` says why
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


def _slice(index: Any, shape: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...]]:
    """(offset in bytes, shape) of a basic index whose result is contiguous."""
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
    split = False  # a dimension before this one has more than one item of the result
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
    """(start, length) of one dimension's index."""
    try:
        if isinstance(part, slice):
            start, stop, step = part.indices(extent)
            if step != 1:
                raise InvalidArgumentError(f"a slice of a buffer must have step 1, not {step}: it is a contiguous view")
            return start, max(0, stop - start)
        if isinstance(part, (bool, np.bool_, np.ndarray)):
            raise TypeError
        start = operator.index(part)
    except TypeError:
        raise InvalidTypeError(f"a buffer is indexed by integers and slices, not {part!r}") from None
    if not -extent <= start < extent:
        raise InvalidArgumentError(f"index {start} is out of range for a dimension of {extent}")
    return start % extent, 1
