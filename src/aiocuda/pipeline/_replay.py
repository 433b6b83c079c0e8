"""Replay: what a stage gives to the device for one slot, captured once and launched for each item."""

from __future__ import annotations

from typing import Any

from ..completion._operation import Operation
from ..errors import UnsupportedError
from ..graph import CapturedOperation
from ..stream import Stream
from ._launch import Launch
from ._slot import Slot
from ._stage import Stage, operations_of

__all__ = ["Replay", "Replayed"]


class Replayed:
    """What a stage that is replayed has returned for an item: what its function returned, once the launch is done."""

    __slots__ = ("_returned", "operation")

    def __init__(self, operation: Operation[None], returned: Any) -> None:
        self.operation = operation
        self._returned = returned

    def result(self) -> Any:
        """Operations replaced by their results: a download's is the array that it goes to."""
        self.operation.result()  # raises, while it is not done
        if isinstance(self._returned, (list, tuple)):
            return [_value(one) for one in self._returned]
        return _value(self._returned)


class Replay:
    """A stage's graph for one slot. It belongs to the event loop that it was captured in.

    Attributes
    ----------
    loop : asyncio.AbstractEventLoop
    """

    __slots__ = ("_arguments", "_graph", "_launch", "_returned", "loop")

    def __init__(self, stage: Stage, slot: Slot, stream: Stream) -> None:
        """Call the stage's function, and capture what it gives to the stream.

        Raises
        ------
        UnsupportedError
            Something of it cannot be part of a graph; or nothing was captured.
        """
        self.loop = stream._queue.loop
        with stream.capture() as graph:
            returned = stage.function(slot)
            for operation in operations_of(stage, returned) or ():
                if not isinstance(operation, CapturedOperation):
                    raise UnsupportedError(
                        f"{operation!r} was not enqueued on slot.stream, so it is not captured and would not run for "
                        "the next item: enqueue all of the stage's work there"
                    )
        if not len(graph):
            graph.close()
            raise UnsupportedError("it gives slot.stream nothing to do, so there is nothing to replay for later items")
        self._graph = graph
        self._returned = returned
        self._launch = stage.function if isinstance(stage.function, Launch) and stage.function.varies else None
        self._arguments = [] if self._launch is None else self._launch.arguments(slot)

    def launch(self, slot: Slot, stream: Stream) -> Replayed:
        """All of it, for the item that the slot has now."""
        if self._launch is not None:
            arguments = self._launch.arguments(slot)
            if not all(map(_same, arguments, self._arguments)):
                self._graph.update(self._returned, *arguments)
                self._arguments = arguments
        return Replayed(self._graph.launch(stream), self._returned)

    def close(self) -> None:
        """Give the graph back, behind its launches."""
        self._graph.close()


def _value(returned: Any) -> Any:
    return returned.value if isinstance(returned, Operation) else returned


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, (int, float)):
        return False
    return one == other and (bool(one) or repr(one) == repr(other))  # -0.0 is equal to 0.0, and another argument
