"""Recorder: one recording, over all of its streams.

Each stream that takes part has a head: the steps that its next one waits for. A verb puts a step behind the head and is
the new one; a wait adds another stream's head to it. So no wait becomes a step: edges are all that is left of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..completion._stream_queue import stream_queue
from ..errors import BusyError, InvalidArgumentError, WrongDeviceError
from ._captured import Captured, task_name
from ._steps import Step

if TYPE_CHECKING:
    from .._device import Device
    from ..stream import Stream

__all__ = ["Recorder"]


class Recorder:
    """What a graph is recorded by. What was captured by it holds it, and so it keeps nothing when it has ended."""

    def __init__(self, device: Device, origin: Stream) -> None:
        self.device = device
        self.origin = origin
        self.token = object()  # for those who need know it only, and hold none of its streams
        self.steps: list[Step] = []
        self.open = self.used = False
        self._heads: dict[Stream, tuple[int, ...]] = {}
        self._were: dict[Stream, type[Stream]] = {}  # what they are when they do not record
        self._task: asyncio.Task[Any] | None = None
        self._task_name = ""

    # -- streams come and go -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record what the first stream is given, by the task that runs now."""
        stream_queue(self.origin).check_loop()
        self._task, self._task_name = asyncio.current_task(), task_name()
        self.open = self.used = True
        self._take(self.origin, ())

    def _take(self, stream: Stream, head: tuple[int, ...]) -> None:
        from ._recording import Recording  # which knows its recorder

        if isinstance(stream, Recording):
            raise BusyError(f"{stream.name} is being captured already: end that capture first, or use another stream")
        self._were[stream] = type(stream)
        self._heads[stream] = head
        stream._recorder = self  # type: ignore[attr-defined]  # declared by what it becomes in the next line
        stream.__class__ = Recording
        stream_queue(stream).recorded = True

    def end(self) -> None:
        """All streams are what they were."""
        self.open = False
        self._task = None
        for stream, kind in self._were.items():
            del stream._recorder  # type: ignore[attr-defined]
            stream.__class__ = kind
            stream_queue(stream).recorded = False
        self._were = {}
        self._heads = {}

    # -- what they are given -------------------------------------------------------------------------------------

    def check(self, stream: Stream) -> None:
        """May the running task record something in this stream?"""
        stream_queue(stream).check()
        if asyncio.current_task() is not self._task:
            raise BusyError(
                f"{stream.name} is being captured into a graph by {self._task_name}, and {task_name()} would record "
                "into it, too: let that end first, or use a stream of its own"
            )

    def add(self, stream: Stream, step: Step) -> Captured[Any]:
        """Put a step behind the stream's head."""
        check_writes(self.steps, step)
        index = len(self.steps)
        self.steps.append(step.behind(self._heads[stream]))
        self._heads[stream] = (index,)
        return Captured.into(self, stream_queue(stream), step.kind, (index,), index)

    def head(self, stream: Stream, kind: str) -> Captured[Any]:
        """All that the stream was given so far, as something to wait for."""
        return Captured.into(self, stream_queue(stream), kind, self._heads[stream], None)

    def wait(self, stream: Stream, other: Captured[Any]) -> Captured[Any]:
        """Later steps of the stream come behind something captured, too. A stream that did not take part now does."""
        if not (self.open and other._recorder is self):
            raise BusyError(
                f"{other!r} was recorded into a graph and does not run by itself, so only what is recorded with it can "
                "wait for it: wait for what graph.launch(stream) returns"
            )
        if stream.device is not self.device:
            raise WrongDeviceError(
                f"{stream.name} is a stream of another device than {self.origin.name}, and a graph is of one: wait for "
                "what graph.launch(stream) returns"
            )
        self.check(stream)
        if stream in self._heads:
            self._heads[stream] = tuple(sorted({*self._heads[stream], *other._after}))
        else:
            self._take(stream, other._after)
        return self.head(stream, "wait")

    # -- what came of it -----------------------------------------------------------------------------------------

    def unjoined(self) -> list[str]:
        """Streams with steps that the first one does not wait for, at its end."""
        reached: set[int] = set()
        left = list(self._heads[self.origin])
        while left:
            index = left.pop()
            if index not in reached:
                reached.add(index)
                left.extend(self.steps[index].node.after)
        return [stream.name for stream, head in self._heads.items() if not reached.issuperset(head)]


def check_writes(steps: Any, step: Step, but: int | None = None) -> None:
    """Two copies of one graph must not write the same host memory: nothing says whose bytes are left."""
    if step.writes is None:
        return
    start, nbytes = step.writes
    for index, other in enumerate(steps):
        if other.writes is not None and index != but:
            begin, size = other.writes
            if begin < start + nbytes and start < begin + size:
                raise InvalidArgumentError(
                    f"step {index} of this graph writes this array already, or part of it: give another one"
                )
