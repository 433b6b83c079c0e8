"""Imported: the queues of streams that somebody else made, or knows by CUDA's own handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._device_resources import resources_of
from ..completion._stream_queue import StreamQueue
from ..errors import InvalidTypeError, WrongLoopError

if TYPE_CHECKING:
    from .._device import Device
    from .._loop_state import LoopState

__all__ = ["handle_of", "import_queue", "queue_of"]


def handle_of(thing: object) -> int:
    """The handle that an integer is, or that an object with ``__cuda_stream__`` has."""
    told = getattr(thing, "__cuda_stream__", None)
    if told is not None:
        answer = told() if callable(told) else told  # a property, in what was written before the protocol was
        if not (isinstance(answer, tuple) and len(answer) == 2 and answer[0] == 0):
            raise InvalidTypeError(f"__cuda_stream__ of {thing!r} is (0, handle) in the version known here: {answer!r}")
        thing = answer[1]
    if isinstance(thing, bool) or not isinstance(thing, int):
        raise InvalidTypeError(
            f"a stream's handle is an integer, or an object with __cuda_stream__ has it, not {thing!r}; PyTorch's is "
            "torch_stream.cuda_stream, CuPy's cupy_stream.ptr"
        )
    return thing


def import_queue(device: Device, loop_state: LoopState, handle: int) -> StreamQueue:
    """A queue of its own for somebody's stream. It goes once nobody holds its face and nothing is unfinished."""
    resources_of(device).streams.forget_dropped(loop_state)
    device.driver.stream_import(device.index, handle)
    queue = StreamQueue(loop_state.reactor, handle, f"imported-{handle:#x}", imported=True)
    loop_state.queues[queue] = None
    return queue


def queue_of(device: Device, handle: int) -> StreamQueue:
    """The queue of a stream that others name by CUDA's handle: ours if we made it, else one that is imported.

    Raises
    ------
    WrongLoopError
        It is a stream of ours, of another loop.
    """
    here = resources_of(device).loop_states.here()
    has_handle = device.driver.stream_has_handle
    for loop_state in resources_of(device).loop_states:
        for queue in tuple(loop_state.queues):
            if queue.ended or (queue.imported and loop_state is not here):
                continue
            if not (queue.imported or device.asynchronous):
                continue  # the default stream is nobody's: it is imported
            if queue.handle == handle if queue.imported else has_handle(queue.handle, handle):
                if loop_state is not here:
                    raise WrongLoopError(f"{queue.name} belongs to another event loop: name a stream of this one")
                return queue
    return import_queue(device, here, handle)
