"""Replay: the work of a stage for one slot, captured once and launched for each item."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..completion import Operation
from ..errors import UnsupportedError
from ..graph import CapturedOperation
from ..lowlevel import StreamOperation
from ..stream import Stream
from ._launch import Launch
from ._slot import Slot
from ._slot_memory import Asked
from ._stage import Stage, operations_of

__all__ = ["Replay", "Replayed"]


class Replayed:
    """What a replayed stage returns for an item: the launch's operation, and what the captured function returned."""

    __slots__ = ("_returned", "operation")

    def __init__(self, operation: Operation[None], returned: Any) -> None:
        self.operation = operation
        self._returned = returned

    def result(self) -> Any:
        """Return what the function returned, with results for operations: a download's result is its target array."""
        self.operation.result()  # it raises while the launch is not done
        if isinstance(self._returned, (list, tuple)):
            return [_value(one) for one in self._returned]
        return _value(self._returned)


class Replay:
    """The graph of a stage for one slot.

    Attributes
    ----------
    graph : Graph
    loop : asyncio.AbstractEventLoop
        The event loop that the graph was captured in, and belongs to.
    asked : sequence
        The keys of `SlotMemory.asked` for which the stage was the first one. It asks for them by each launch.
    """

    __slots__ = ("_arguments", "_launch", "_returned", "asked", "graph", "loop")

    def __init__(self, stage: Stage, slot: Slot, stream: Stream) -> None:
        """Call the stage's function, and capture the work that it enqueues on the stream.

        Raises
        ------
        UnsupportedError
            Some of the work cannot be part of a graph, or nothing was captured.
        """
        self.loop = asyncio.get_running_loop()
        self.asked: Sequence[Asked] = ()
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
            raise UnsupportedError("it enqueues no work on slot.stream, so there is nothing to replay for later items")
        self.graph = graph
        self._returned = returned
        self._launch = stage.function if isinstance(stage.function, Launch) and stage.function.varies else None
        self._arguments = [] if self._launch is None else self._launch.arguments(slot)

    def launch(self, slot: Slot, stream: Stream) -> Replayed:
        """Launch the graph for the slot's present item."""
        if self._launch is not None:
            arguments = self._launch.arguments(slot)
            if not all(map(_same, arguments, self._arguments)):
                self.graph.update(self._returned, *arguments)
                self._arguments = arguments
        return Replayed(self.graph.launch(stream), self._returned)

    def close(self) -> None:
        """Close the graph. It is destroyed after its last launch."""
        self.graph.close()


def _value(returned: Any) -> Any:
    return returned.value if isinstance(returned, StreamOperation) else returned


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, (int, float)):
        return False
    return one == other and (bool(one) or repr(one) == repr(other))  # -0.0 equals 0.0, and is a different argument
