"""Capture: the block in which streams record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..completion._stream_queue import stream_queue
from ..errors import BusyError, InvalidArgumentError
from ._graph import Graph
from ._recorder import Recorder

if TYPE_CHECKING:
    from .._device import Device
    from ..stream import Stream

__all__ = ["Capture"]


class Capture:
    """What `aiocuda.Stream.capture` returns: a context manager, for ``with`` or ``async with``, over the `Graph`.

    Left by ``with``, the graph is made ready on a worker, and its first launch waits in its stream until it is; left by
    ``async with``, it is ready.
    """

    __slots__ = ("_graph", "_recorder")

    def __init__(self, device: Device, stream: Stream) -> None:
        self._graph = Graph(device, stream_queue(stream))
        self._recorder = Recorder(device, stream)

    def __enter__(self) -> Graph:
        recorder = self._recorder
        if recorder.used:
            raise BusyError("a capture is made once: call stream.capture() again")
        stream_queue(recorder.origin).check()
        recorder.begin()
        return self._graph

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        recorder, graph = self._recorder, self._graph
        unjoined = recorder.unjoined()
        recorder.end()
        if kind is not None:
            graph.close()
        elif unjoined:
            graph.close()
            names = ", ".join(unjoined)
            raise InvalidArgumentError(
                f"the capture of {recorder.origin.name} ends, and does not wait for {names}, captured with it: "
                f"{recorder.origin.name}.wait({unjoined[0]}) at the end of the block"
            )
        else:
            graph._recorded(recorder)

    async def __aenter__(self) -> Graph:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.__exit__(kind, *exc)
        if kind is None:
            await self._graph
