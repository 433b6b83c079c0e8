"""Streams of other libraries: found or imported by CUDA's handle."""

from __future__ import annotations

from .._core import Ring
from ..completion._device_state import DeviceState
from ..completion._stream_queue import new_queue
from ..errors import WrongLoopError
from ._device_streams import DeviceStreams
from ._loop_state import LoopState, LoopStates

__all__ = ["StreamImports"]


class StreamImports:
    """Finds the stream queue of a CUDA stream handle, or imports the stream."""

    __slots__ = ("_device_state", "_loop_states", "_streams")

    def __init__(self, device_state: DeviceState, loop_states: LoopStates, streams: DeviceStreams) -> None:
        self._device_state = device_state
        self._loop_states = loop_states
        self._streams = streams

    def import_queue(self, loop_state: LoopState, handle: int) -> Ring:
        """Return a new queue of another library's stream. It is closed once it is unreferenced and idle."""
        self._streams.forget_dropped(loop_state)
        stream = self._device_state.driver.stream_import(self._device_state.device, handle)
        queue = new_queue(loop_state.reactor, stream, f"imported-{handle:#x}", imported=True)
        loop_state.queues[queue] = None
        return queue

    def queue_of(self, handle: int) -> Ring:
        """Return the queue of a stream by CUDA's handle: an existing one, else a newly imported one.

        Raises
        ------
        WrongLoopError
            aiocuda has made the stream, in another loop.
        """
        here = self._loop_states.exporting()
        has_handle = self._device_state.driver.stream_has_handle
        for loop_state in self._loop_states:
            for queue in list(loop_state.queues):
                if queue.ended or (queue.rare.imported and loop_state is not here):
                    continue
                if not (queue.rare.imported or self._device_state.asynchronous):
                    continue  # the default stream is not one that aiocuda has made: it is imported
                if has_handle(queue.handle, handle):
                    if loop_state is not here:
                        raise WrongLoopError(f"{queue.name} belongs to another event loop: name a stream of this one")
                    return queue
        return self.import_queue(here, handle)
