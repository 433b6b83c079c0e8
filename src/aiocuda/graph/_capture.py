"""Capture: the block in which streams record."""

from __future__ import annotations

from ..errors import BusyError, InvalidArgumentError
from ..stream import Stream
from ._graph import Graph
from ._recorder import Recorder

__all__ = ["Capture"]


class Capture:
    """What `aiocuda.Stream.capture` returns: a context manager, for ``with`` or ``async with``, over the `Graph`.

    After ``with``, a worker thread builds the graph, and its first launch waits in its stream until it is built. After
    ``async with``, it is built.
    """

    __slots__ = ("_graph", "_recorder")

    def __init__(self, stream: Stream) -> None:
        self._graph = Graph(stream._resources, stream._queue)
        self._recorder = Recorder(stream._resources, stream)

    def __enter__(self) -> Graph:
        recorder = self._recorder
        if recorder.used:
            raise BusyError("a capture is made once: call stream.capture() again")
        recorder.origin._queue.check()
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
            graph._build(recorder)

    async def __aenter__(self) -> Graph:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.__exit__(kind, *exc)
        if kind is None:
            await self._graph
