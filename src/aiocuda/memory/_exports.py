"""Exports: buffers of ours in the hands of other libraries.

A capsule holds its block until the consumer lets go of it. Then an event is recorded in the stream that the consumer
had named, and the memory goes back behind that, as behind any use of our own. The host waits for nothing: not when a
buffer is handed out, not when it comes back.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..completion._device_state import DeviceState
from ..completion._operation import INTERNAL, Operation
from ..completion._reactor import Reactor
from ..completion._stream_queue import StreamQueue
from ..errors import AiocudaError, BusyError, DeviceFault, InvalidArgumentError, InvalidTypeError
from . import _array_interface, _dlpack
from ._block import Block
from ._dlpack import Held, UnsupportedExportError

if TYPE_CHECKING:
    from ._buffer import DeviceBuffer

__all__ = ["BusyExportError", "Export", "Exports"]

_LEGACY: Final = 1  # CU_STREAM_LEGACY, as both protocols call it
_NO_STREAM: Final = -1


class BusyExportError(BusyError, BufferError):
    """It cannot be handed out just now. A `BufferError`, as array libraries expect."""


class Export:
    """One capsule. In its block's record of uses it stands for somebody who has not come to an end."""

    __slots__ = ("_kept", "block", "handle", "is_settled", "queue", "reactor", "refused")

    #: What a free asks of whoever uses a block: there is no event to wait for yet.
    lease = None

    def __init__(self, block: Block, reactor: Reactor | None, handle: int | None, queue: StreamQueue | None) -> None:
        self.block = block
        self.reactor = reactor
        self.handle = handle  # of the consumer's stream
        self.queue = queue  # that stream, if it is one of ours
        self.refused = False
        self.is_settled = False  # until it is taken back
        self._kept = _stream_object(handle)


class Exports:
    """What others hold of one device's memory.

    Attributes
    ----------
    returned
        What consumers have let go of, left by finalisers.
    lane_of
        The queue of a stream by its CUDA handle, ours or imported for the purpose.
    """

    queue_of: Callable[[int], StreamQueue]

    def __init__(self, device_state: DeviceState) -> None:
        self._device_state = device_state
        self._driver = device_state.driver
        self.returned: deque[Export] = deque()
        self._alive: dict[Export, None] = {}

    # -- handing out ---------------------------------------------------------------------------------------------

    @property
    def is_cuda(self) -> bool:
        """Do addresses mean anything to other libraries? On a driver without a GPU they do not."""
        return self._driver.name == "cuda"

    def device_of(self, buffer: DeviceBuffer) -> tuple[int, int]:
        """(DLPack device type, index). Without CUDA it is one that no other library takes."""
        index = buffer._block.device
        return (buffer._device_type if self.is_cuda else _dlpack.EXTENSION, max(index, 0))

    def capsule(
        self, buffer: DeviceBuffer, stream: object, max_version: Any, dl_device: Any, copy: bool | None
    ) -> object:
        """`DeviceBuffer.__dlpack__`."""
        block = buffer._block
        block.check()
        if copy:
            raise UnsupportedExportError(
                "copy=True is not done here: copy it in the order of a stream, stream.copy(stream.empty_like(b), b)"
            )
        here = self.device_of(buffer)
        device = here if dl_device is None else (operator.index(dl_device[0]), operator.index(dl_device[1]))
        managed = here[0] == _dlpack.CUDA_MANAGED
        if device != here and not (managed and device in ((_dlpack.CPU, 0), (_dlpack.CUDA, here[1]))):
            raise UnsupportedExportError(
                f"{buffer!r} is on {_dlpack.device_name(here[0])} {here[1]}, and was asked for on "
                f"{_dlpack.device_name(device[0])} {device[1]}: bring it there by stream.copy or stream.download"
            )
        handle = self._handle(stream)
        if handle is None and device[0] == _dlpack.CUDA:
            handle = _LEGACY  # so the protocol has it
        queue = None
        if handle is None:
            self._check_idle(block)
        elif handle == _NO_STREAM:
            self._unfinished(block)
        else:
            queue = self.queue_of(handle)
            self._order(queue, block)
        export = Export(block, None if queue is None else queue.reactor, handle, queue)
        if queue is not None and queue.imported:
            export.queue = None  # it may be forgotten meanwhile, and found again
        held = Held(buffer.address, buffer.shape, buffer.dtype, export, self.returned)
        # From here on the end of `held` undoes it all.
        self._alive[export] = None
        block.used_by_peer(export, export)  # type: ignore[arg-type]  # it stands for one
        return _dlpack.make(held, buffer.dtype, device, max_version)

    def interface(self, buffer: DeviceBuffer) -> dict[str, Any]:
        """`DeviceBuffer.__cuda_array_interface__`."""
        block = buffer._block
        block.check()
        return _array_interface.write(buffer.address, buffer.shape, buffer.dtype, self._tail(block))

    def _handle(self, stream: object) -> int | None:
        if stream is None:
            return None
        if isinstance(stream, (bool, np.bool_)) or not hasattr(stream, "__index__"):
            raise InvalidTypeError(f"a consumer's stream is 1, 2, a handle, -1 or None, not {stream!r}")
        handle = operator.index(stream)
        if handle < _NO_STREAM or (handle == 0 and self.is_cuda):
            raise InvalidArgumentError(f"a consumer's stream is 1, 2, a handle, -1 or None, not {handle}")
        return handle

    def _unfinished(self, block: Block) -> list[tuple[Operation[Any], int]]:
        """What the device is still to do with the block, each with its event.

        Raises
        ------
        BusyExportError
            Some of it is still on the host: no consumer could come behind it.
        """
        fault = self._driver.fault
        if fault is not None:
            raise fault.again()
        found = []
        for operation in block.unfinished():
            lease = operation.lease
            if isinstance(operation, Export) or operation.is_settled:
                continue  # what another consumer does is not ours to order
            if lease is None:
                raise BusyExportError(
                    f"{operation!r} uses this buffer and is still on the host: await it before the buffer is handed out"
                )
            found.append((operation, lease.handle))
        return found

    def _check_idle(self, block: Block) -> None:
        for operation, _ in self._unfinished(block):
            work = f"what {operation.queue.name} was given" if operation.kind is INTERNAL else repr(operation)
            raise BusyExportError(
                f"{work} uses this buffer, and whoever takes it names no stream to come behind that: await it, or have "
                "the consumer name its stream"
            )

    def _order(self, queue: StreamQueue, block: Block) -> None:
        """Let a stream come behind all that uses the block, at once: its owner enqueues there without asking us."""
        waits = [(operation, event) for operation, event in self._unfinished(block) if operation.queue is not queue]
        if not waits:
            return
        if queue.shared and queue.is_captured():
            raise BusyExportError(
                f"{queue.name} is being captured, and a graph cannot wait for {waits[0][0]!r}: await that first"
            )
        queue.note_wait()
        for _, event in waits:
            self._driver.stream_wait(queue.handle, event)

    def _tail(self, block: Block) -> int | None:
        """The handle of a stream that is behind all that uses the block; None if nothing does any more."""
        unfinished = self._unfinished(block)
        if not unfinished:
            return None
        queues = {operation.queue: None for operation, _ in sorted(unfinished, key=lambda use: -use[0].id)}
        queue = next((queue for queue in queues if not queue.closed), None)  # the newest user's
        if queue is None:
            raise BusyExportError(
                f"{unfinished[-1][0]!r} uses this buffer, and its stream has been closed: await it, or wait for it in "
                "another stream"
            )
        self._order(queue, block)
        return self._driver.stream_handle(queue.handle) or _LEGACY

    # -- taking back ---------------------------------------------------------------------------------------------

    def sweep(self, reactor: Reactor, most: int | None = None) -> None:
        """Take back what consumers have let go of. ``most`` is the number of capsules to look at; None for all."""
        for _ in range(len(self.returned) if most is None else min(most, len(self.returned))):
            try:
                export = self.returned.popleft()
            except IndexError:
                return  # another loop was quicker
            back = False
            try:
                back = self._take_back(reactor, export)
            except DeviceFault:
                return  # latched: the watchdog tells everybody, and the memory stays where it is
            except AiocudaError as error:
                if not export.refused:
                    export.refused = True
                    reactor.report(
                        f"another library has let go of {export.block}, and its stream cannot be asked how far it is; "
                        "it is asked again, and the memory stays allocated until then",
                        error,
                    )
            finally:
                if not back:
                    self.returned.append(export)

    def _take_back(self, reactor: Reactor, export: Export) -> bool:
        home = export.reactor
        if home is not None and home is not reactor and not (home.closed or home.loop.is_closed()):
            return False  # the consumer's stream is that loop's to follow
        end: Operation[Any] | None = None
        queue = export.queue
        if queue is None and export.handle not in (None, _NO_STREAM):
            queue = self.queue_of(export.handle)
        if queue is not None and ((queue.ended and not queue.lent) or queue.loop is not reactor.loop):
            end = queue.tail()  # of ours, and nobody enqueues there any more
        elif queue is not None:
            if queue.shared and queue.is_captured():
                return False  # an event would become part of somebody's graph
            end = queue.submit_marker()
            failure = end.failure
            if failure is not None:  # nobody knows when the consumer is done: it is asked again
                failure.poison.delivered = export.refused  # the loop is told once
                export.refused = True
                return False
        self._alive.pop(export, None)
        export.is_settled = True
        peers = export.block.peers
        if peers is not None:
            peers.pop(export, None)  # type: ignore[call-overload]  # it stood for a queue
        if end is not None and not end.is_settled:
            export.block.depend(end)  # which holds it, where nobody else does: a finaliser waits for nothing
        return True

    # -- the end -------------------------------------------------------------------------------------------------

    def addresses(self) -> set[int]:
        """Blocks that others hold when the device has been drained. What our own streams took and let go is done."""
        done = {export for export in list(self.returned) if export.queue is not None}  # finalisers add to it meanwhile
        return {export.block.address for export in list(self._alive) if export not in done}

    def owns(self, address: int) -> bool:
        """Does an address lie in a block that was handed out, and has not come back?"""
        blocks = [export.block for export in list(self._alive)]
        return any(0 <= address - block.address < max(block.nbytes, 1) for block in blocks)


def _stream_object(handle: int | None) -> object:
    """CuPy's object for the consumer's stream, if it is that: CuPy destroys a stream with it.

    An event is to be recorded there when the consumer lets go, and a stream that is gone cannot be told from one that
    is there. Streams of PyTorch and JAX live as long as the process.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or handle is None or handle <= 2:
        return None
    current = cupy.cuda.get_current_stream()
    return current if current.ptr == handle else None
