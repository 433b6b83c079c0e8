"""Chain: functions that enqueue, one after another, each on its stream behind the work of the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ._state import DONE

if TYPE_CHECKING:
    from ._enqueuing_stream import EnqueuingStream
    from ._ring import Ring
    from ._stream_operation import StreamOperation

__all__ = ["Chain"]


class Chain:
    """Functions that enqueue, in a fixed order, each on its stream behind the work of the one before.

    It is the hot half of a pipeline's item: each function is that of a stage. The slot is what they take.

    Attributes
    ----------
    position : int
        Of the function that was called last, or was about to be: if it has raised, the failure is its own.

    Parameters
    ----------
    names, functions, streams, queues
        Of each stage; the queues are those of the streams.
    """

    __slots__ = ("_functions", "_names", "_queues", "_streams", "position")

    def __init__(
        self, names: Sequence[str], functions: Sequence[Callable[[Any], Any]], streams: Sequence[EnqueuingStream],
        queues: Sequence[Ring],
    ) -> None:  # fmt: skip
        self._names = tuple(names)
        self._functions = tuple(functions)
        self._streams = tuple(streams)
        self._queues: tuple[Ring, ...] = tuple(queues)
        self.position = 0

    def enqueue(self, start: int, slot: Any, ends: list[StreamOperation[Any] | None], returned: dict[str, Any]) -> int:
        """Call the functions from a position on, until one is unusual.

        Parameters
        ----------
        ends
            By position, the operation that ends the work of each function.
        returned
            By name, what each function has returned.

        Returns
        -------
        The position of the first function without an end: it was not called because of the work before it, or was, and
        has not returned its only operation. The number of functions if there is none.
        """
        names, queues = self._names, self._queues
        for position in range(start, len(names)):
            self.position = position
            queue = queues[position]
            if position:
                end = ends[position - 1]
                if end is None or end.status > DONE or not end.submitted_at or queue.obstacles:
                    return position
                if end.status != DONE and end.queue is not queue:
                    queue.follow(end)
            slot._stream = self._streams[position]
            result = self._functions[position](slot)
            returned[names[position]] = result
            pending = queue.pending  # the same as `Ring.ends_with`, without its call
            if (
                not pending
                or pending[-1] is not result
                or queue.obstacles
                or queue.unmarked_wait_at == queue.enqueued
                or queue.on_host
            ):
                return position
            ends[position] = result
        return len(names)

    @staticmethod
    def resolve(ends: list[StreamOperation[Any] | None]) -> None:
        """Resolve the ends of all functions: the last one is done, and each has waited for the one before it."""
        for position in range(len(ends)):
            end = ends[position]
            if end is not None:
                ends[position] = None
                if end.status < DONE:
                    end.queue.resolve_to(end)
