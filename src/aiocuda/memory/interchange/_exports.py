"""Exports: our buffers that other libraries hold.

A capsule holds its block until the consumer releases it. Then an event is recorded in the consumer's stream, and the
memory is freed after that event, as after an operation of our own. The host never waits, neither at the export nor at
the release.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from ..._core import INTERNAL, Ring, StreamOperation
from ...completion._device_state import DeviceState
from ...completion._reactor import Reactor
from ...errors import AiocudaError, BusyError, DeviceFault, InvalidArgumentError, InvalidTypeError
from .._block import Block, ExternalUse
from .._buffer import DeviceBuffer, block_of
from .._pinned import PinnedBuffer
from .._unified import UnifiedBuffer
from . import _array_interface, _dlpack
from ._dlpack import ExportedArray, UnsupportedExportError

__all__ = ["BusyExportError", "Export", "Exports"]

_LEGACY: Final = 1  # CU_STREAM_LEGACY, as both protocols call it
_NO_STREAM: Final = -1
_NOTHING_WAITS: Final = (
    "the consumer names no stream that could wait for it: await it, or have the consumer name its stream"
)


class BusyExportError(BusyError, BufferError):
    """The buffer cannot be exported now. It is a `BufferError`, too, as array libraries expect."""


class Export(ExternalUse):
    """One capsule: the use of a block by a consumer that has not released it.

    Attributes
    ----------
    block
        The exported block.
    reactor
        Of the loop of the consumer's stream; None if the consumer named no stream.
    handle
        CUDA's handle of the consumer's stream; None if it named no stream.
    queue
        The queue of the consumer's stream, if aiocuda has made that stream.
    refused
        True once an event after the consumer's work could not be recorded, and that was reported.
    """

    __slots__ = ("_stream", "block", "handle", "queue", "reactor", "refused")

    def __init__(self, block: Block, reactor: Reactor | None, handle: int | None, queue: Ring | None) -> None:
        super().__init__()
        self.block = block
        self.reactor = reactor
        self.handle = handle
        self.queue = queue
        self.refused = False
        self._stream = _stream_object(handle)  # keeps the stream

    def refuse(self) -> None:
        """No event could be recorded after the consumer's work, and that is reported."""
        self.refused = True


class Exports:
    """The exported buffers of one device.

    Attributes
    ----------
    returned
        Exports that consumers have released, left by finalisers.
    queue_of
        Returns the queue of a stream by CUDA's handle, and imports a stream that has none.
    is_cuda
        True if other libraries can use the addresses. They cannot on a driver without a GPU.
    """

    __slots__ = ("_closed", "_complete", "_driver", "_held", "_peek", "is_cuda", "queue_of", "returned")

    def __init__(self, device_state: DeviceState, queue_of: Callable[[int], Ring]) -> None:
        self.queue_of = queue_of
        self.returned: list[Export] = []  # the first is looked at next; they are few, and a deque takes 700 bytes more
        self._driver = device_state.driver
        self.is_cuda = self._driver.name == "cuda"
        self._held: dict[Export, None] = {}
        self._complete: WeakSet[Block] | None = None  # without CUDA: those of `note_complete`
        #: (device, address, bytes) → the bytes, if the host can read the driver's device memory.
        self._peek: Callable[[int, int, int], npt.NDArray[np.uint8]] | None = getattr(self._driver, "peek", None)
        self._closed = False

    @property
    def held(self) -> Collection[Export]:
        """The exports that have not been taken back."""
        return self._held.keys()

    # -- export --------------------------------------------------------------------------------------------------

    def note_complete(self, buffers: Iterable[DeviceBuffer]) -> None:
        """Note that buffers are complete when the program gets them. Without CUDA, others get copies in host memory."""
        if not self.is_cuda and self._peek is not None:
            self._complete = self._complete or WeakSet()
            self._complete.update(map(block_of, buffers))

    def _is_complete(self, buffer: DeviceBuffer) -> bool:
        return self._complete is not None and block_of(buffer) in self._complete

    def device_of(self, buffer: DeviceBuffer) -> tuple[int, int]:
        """Return the (DLPack device type, index) of an export: host memory, if that is a copy of a complete buffer."""
        return (_dlpack.CPU, 0) if self._is_complete(buffer) else self.memory_of(buffer)

    def memory_of(self, buffer: DeviceBuffer) -> tuple[int, int]:
        """Return (DLPack device type, index). Without CUDA the type is one that no other library accepts."""
        cuda = _dlpack.CUDA_MANAGED if isinstance(buffer, UnifiedBuffer) else _dlpack.CUDA
        return (cuda if self.is_cuda else _dlpack.EXTENSION, max(block_of(buffer).device, 0))

    def capsule(
        self, buffer: DeviceBuffer, stream: object, max_version: Any, dl_device: Any, copy: bool | None
    ) -> object:
        """Return a capsule: `DeviceBuffer.__dlpack__`."""
        block = block_of(buffer)
        block.check()
        if self._is_for_host(stream, dl_device):
            self._check_complete(buffer)
            self._check_idle(block, "its consumer would read it now: await it first")
            return self._copy(buffer, max_version, dl_device, copy)
        device, handle = self._request(buffer, stream, dl_device, copy)
        queue = None
        if handle is None:
            self._check_idle(block)
        elif handle == _NO_STREAM:
            self._unfinished(block)
        else:
            queue = self.queue_of(handle)
            self._order(queue, block)
        reactor = None if queue is None else queue.reactor
        # The queue of an imported stream may be closed before the release; the stream is imported again then.
        export = Export(block, reactor, handle, None if queue is not None and queue.rare.imported else queue)
        exported = ExportedArray(buffer.address, buffer.shape, buffer.dtype, export, self.returned)
        # From here on the finaliser of `exported` undoes everything.
        self._held[export] = None
        block.begin_external_use(export)
        return _dlpack.make(exported, buffer.dtype, device, max_version)

    def _request(
        self, buffer: DeviceBuffer, stream: object, dl_device: Any, copy: bool | None
    ) -> tuple[tuple[int, int], int | None]:
        """Return the device of a capsule and the handle of the consumer's stream, or raise."""
        if copy:
            raise UnsupportedExportError(
                "copy=True is not done here: copy it in the order of a stream, stream.copy(stream.empty_like(b), b)"
            )
        here = self.memory_of(buffer)
        device = here if dl_device is None else (operator.index(dl_device[0]), operator.index(dl_device[1]))
        managed = here[0] == _dlpack.CUDA_MANAGED
        if device != here and not (managed and device in ((_dlpack.CPU, 0), (_dlpack.CUDA, here[1]))):
            raise UnsupportedExportError(
                f"{buffer!r} is on {_dlpack.device_name(here[0])} {here[1]}, and was asked for on "
                f"{_dlpack.device_name(device[0])} {device[1]}: bring it there by stream.copy or stream.download"
            )
        handle = self._handle(stream)
        if handle is None and device[0] == _dlpack.CUDA:
            handle = _LEGACY  # the protocol's default
        return device, handle

    # -- copies, without CUDA ------------------------------------------------------------------------------------

    def _is_for_host(self, stream: object, dl_device: Any) -> bool:
        """True if a consumer on the host asks. Without CUDA only `Stream.adopt` names a stream, or our device."""
        return not self.is_cuda and stream is None and (dl_device is None or dl_device[0] != _dlpack.EXTENSION)

    def _check_complete(self, buffer: DeviceBuffer) -> None:
        if not self._is_complete(buffer):
            raise UnsupportedExportError(
                f"{buffer!r} is not CUDA's memory, and no other library can use it: `await stream.download(buffer)` is "
                "a NumPy array, for torch.from_numpy and others. Only the batches of a loader are exported here, as "
                "copies in host memory"
            )

    def _copy(self, buffer: DeviceBuffer, max_version: Any, dl_device: Any, copy: bool | None) -> object:
        """Return a capsule over a copy of a complete buffer, in host memory."""
        if copy is False:
            raise UnsupportedExportError(f"{buffer!r} is not CUDA's memory, and is exported as a copy: drop copy=False")
        device = (_dlpack.CPU, 0) if dl_device is None else (operator.index(dl_device[0]), operator.index(dl_device[1]))
        if device != (_dlpack.CPU, 0):
            raise UnsupportedExportError(
                f"{buffer!r} is exported as a copy in {_dlpack.device_name(_dlpack.CPU)}, and was asked for on "
                f"{_dlpack.device_name(device[0])} {device[1]}: move the copy there"
            )
        assert self._peek is not None
        found = self._peek(block_of(buffer).device, buffer.address, buffer.nbytes)
        return _dlpack.make_copy(found.view(buffer.dtype).reshape(buffer.shape), max_version)

    # -- export to another thread --------------------------------------------------------------------------------

    def hold(self, buffer: DeviceBuffer) -> Export:
        """Note that another thread has a buffer, and may export it, until `let_go`."""
        block = block_of(buffer)
        export = Export(block, None, _NO_STREAM, None)
        self._held[export] = None
        block.begin_external_use(export)
        return export

    def let_go(self, export: Export) -> None:
        """End `hold`: the caller makes the free of the block wait for the work of that thread."""
        self._held.pop(export, None)
        export.block.end_external_use(export)

    def held_capsule(
        self,
        buffer: DeviceBuffer,
        returned: deque[None],
        stream: object,
        max_version: Any,
        dl_device: Any,
        copy: bool | None,
    ) -> tuple[object, int | None]:
        """Return a capsule of a buffer that `hold` holds, and the handle of the consumer's stream. **Any thread.**

        No stream waits: the work on the buffer is done. None is appended to ``returned`` when the consumer releases it.
        """
        if self._is_for_host(stream, dl_device):
            self._check_complete(buffer)
            capsule = self._copy(buffer, max_version, dl_device, copy)
            returned.append(None)  # the consumer has a copy
            return capsule, None
        device, handle = self._request(buffer, stream, dl_device, copy)
        exported = ExportedArray(buffer.address, buffer.shape, buffer.dtype, None, returned)
        return _dlpack.make(exported, buffer.dtype, device, max_version), None if handle == _NO_STREAM else handle

    # -- other exports -------------------------------------------------------------------------------------------

    def host_capsule(
        self,
        array: PinnedBuffer,
        block: Block | None,
        stream: Any,
        max_version: tuple[int, int] | None,
        dl_device: tuple[int, int] | None,
        copy: bool | None,
    ) -> object:
        """Return a capsule of NumPy: `PinnedBuffer.__dlpack__`. The consumer may read the memory immediately."""
        for operation in () if block is None else block.unfinished():
            raise BusyExportError(f"{operation!r} uses this array, and its consumer may read it now: await it first")
        pinned = (_dlpack.CUDA_HOST, 0)
        if dl_device == pinned and (block is None or copy):
            raise UnsupportedExportError(
                "pinned memory was asked for, but a copy of a pinned array is not pinned, nor is an array whose device "
                "has been closed: leave dl_device out, or copy the data to device.pinned(shape, dtype) and export that"
            )
        wanted = None if dl_device == pinned else dl_device
        capsule = np.ndarray.__dlpack__(array, stream=stream, max_version=max_version, dl_device=wanted, copy=copy)
        if dl_device == pinned:
            _dlpack.set_device(capsule, pinned)
        return capsule

    def interface(self, buffer: DeviceBuffer) -> dict[str, Any]:
        """Return the dictionary: `DeviceBuffer.__cuda_array_interface__`."""
        block = block_of(buffer)
        block.check()
        found = _array_interface.write(buffer.address, buffer.shape, buffer.dtype, self._ordered_stream(block))
        block.note_interface()
        return found

    def _handle(self, stream: object) -> int | None:
        """Return the ``stream`` argument of ``__dlpack__`` as an integer or None."""
        if stream is None:
            return None
        if isinstance(stream, (bool, np.bool_)) or not hasattr(stream, "__index__"):
            raise InvalidTypeError(f"a consumer's stream is 1, 2, a handle, -1 or None, not {stream!r}")
        handle = operator.index(stream)
        if handle < _NO_STREAM or (handle == 0 and self.is_cuda):
            raise InvalidArgumentError(f"a consumer's stream is 1, 2, a handle, -1 or None, not {handle}")
        return handle

    def _unfinished(self, block: Block) -> list[tuple[StreamOperation[Any], int]]:
        """Return the unfinished operations that use the block, each with its event.

        Raises
        ------
        BusyExportError
            One of them is still on the host: a consumer could not wait for it.
        """
        fault = self._driver.fault
        if fault is not None:
            raise fault.again()
        found = []
        for operation in block.unfinished():
            lease = operation.lease
            if isinstance(operation, ExternalUse) or operation.is_settled:
                continue  # consumers order their work among themselves
            if lease is None:
                raise BusyExportError(
                    f"{operation!r} uses this buffer and is still on the host: await it before the export"
                )
            found.append((operation, lease.handle))
        return found

    def _check_idle(self, block: Block, why: str = _NOTHING_WAITS) -> None:
        """Raise if an operation uses the block."""
        for operation, _ in self._unfinished(block):
            work = f"the work of {operation.queue.name}" if operation.kind is INTERNAL else repr(operation)
            raise BusyExportError(f"{work} uses this buffer, and {why}")

    def _order(self, queue: Ring, block: Block) -> None:
        """Let a stream wait for all operations that use the block, before other libraries enqueue there."""
        waits = [(operation, event) for operation, event in self._unfinished(block) if operation.queue is not queue]
        if not waits:
            return
        if queue.shared and queue.rare.is_captured():
            raise BusyExportError(
                f"{queue.name} is being captured, and a graph cannot wait for {waits[0][0]!r}: await that first"
            )
        queue.note_wait()
        for _, event in waits:
            self._driver.stream_wait(queue.handle, event)

    def _ordered_stream(self, block: Block) -> int | None:
        """Return the handle of a stream that waits for all operations that use the block; None if there are none."""
        unfinished = self._unfinished(block)
        if not unfinished:
            return None
        queues = {operation.queue: None for operation, _ in sorted(unfinished, key=lambda use: -use[0].id)}
        queue = next((queue for queue in queues if not queue.closed), None)  # that of the newest operation
        if queue is None:
            raise BusyExportError(
                f"{unfinished[-1][0]!r} uses this buffer, and its stream has been closed: await it, or wait for it in "
                "another stream"
            )
        self._order(queue, block)
        return self._driver.stream_handle(queue.handle) or _LEGACY

    # -- release -------------------------------------------------------------------------------------------------

    def sweep(self, reactor: Reactor, most: int | None = None) -> None:
        """Take back the exports that consumers have released; at most ``most`` of them, None means all."""
        if self._closed:
            return  # the memory stays allocated; `DeviceMemory.close` warns of it
        for _ in range(len(self.returned) if most is None else min(most, len(self.returned))):
            try:
                export = self.returned.pop(0)
            except IndexError:
                return  # another loop has taken it
            back = False
            try:
                back = self._take_back(reactor, export)
            except DeviceFault:
                return  # the watchdog reports the fault; the memory stays allocated
            except AiocudaError as error:
                if not export.refused:
                    export.refuse()
                    reactor.report(
                        f"another library has released {export.block}, but no event could be recorded in its stream; "
                        "this is repeated later, and the memory stays allocated until it succeeds",
                        error,
                    )
            finally:
                if not back:
                    self.returned.append(export)

    def _take_back(self, reactor: Reactor, export: Export) -> bool:
        """End an export after the consumer's work; False if that is not possible now."""
        home = export.reactor
        if home is not None and home is not reactor and not (home.closed or home.loop.is_closed()):
            return False  # only that loop may use the consumer's stream
        end: StreamOperation[Any] | None = None
        queue = export.queue
        if queue is None and export.handle not in (None, _NO_STREAM):
            queue = self.queue_of(export.handle)
        if queue is not None and ((queue.ended and not queue.rare.lent) or queue.loop is not reactor.loop):
            end = queue.tail()  # a stream that aiocuda has made; it receives no further work
        elif queue is not None:
            if queue.shared and queue.rare.is_captured():
                return False  # an event would become part of the graph
            end = queue.submit_marker()
            failure = end.failure
            if failure is not None:  # the end of the consumer's work is unknown: try again later
                failure.poison.delivered = export.refused  # the loop's handler gets the failure once
                export.refuse()
                return False
        self._held.pop(export, None)
        export.block.end_external_use(export)
        if end is not None and not end.is_settled:
            export.block.depend(end)  # which holds the block: a finaliser would free the memory without a wait
        return True

    # -- close ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take back no export from now on: the device has been drained, so nothing would wait for the marker."""
        self._closed = True

    def addresses(self) -> set[int]:
        """Return the addresses of the blocks that may still be in use after the device has been drained.

        A consumer holds them, or has released them on a stream of another library, for which the drain did not wait.
        """
        done = {export for export in list(self.returned) if export.queue is not None}  # a copy: finalisers append
        return {export.block.address for export in list(self._held) if export not in done}

    def owns(self, address: int) -> bool:
        """True if an address lies in a block that consumers hold."""
        blocks = [export.block for export in list(self._held)]
        return any(0 <= address - block.address < max(block.nbytes, 1) for block in blocks)


def _stream_object(handle: int | None) -> object:
    """Return CuPy's object of the consumer's stream, if it is CuPy's current one: without it CuPy destroys the stream.

    An event is recorded in that stream when the consumer releases the memory, and the driver does not report that a
    stream has been destroyed. Streams of PyTorch and JAX live as long as the process.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or handle is None or handle <= 2:
        return None
    current = cupy.cuda.get_current_stream()
    return current if current.ptr == handle else None
