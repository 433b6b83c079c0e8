"""BlockingWatch: finds stages whose coroutine blocks the event loop. LoopTimes: how long each stage has the loop."""

from __future__ import annotations

import threading
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final

import numpy as np

from .._base._advice import advise
from .._base._loop_watch import LIMIT, cancel_sample, sample_at
from .._base._stacks import stack_of
from .._base._types import SourceLine
from ._stage import Stage

__all__ = ["BlockingWatch", "LoopTimes"]

#: Steps that must have blocked the loop at the same line. One may be late because other programs had the processor.
STEPS: Final = 3

#: Items of a stage whose times are kept for the median.
MOST_TIMES: Final = 64


class BlockingWatch:
    """Times the steps of stages that are suspected to block the loop. A step runs from one await to the next.

    A stage is suspected if an item took longer than a step may. Other stages run without any additional call.

    Attributes
    ----------
    suspects : set of int
        The positions of the stages whose steps are timed.
    """

    __slots__ = ("_blocked", "_guard", "suspects")

    def __init__(self, guard: Callable[..., object]) -> None:
        self._guard = guard  # calls a function that has no waiter, and reports its error
        self.suspects: set[int] = set()
        self._blocked: dict[tuple[int, int], list[float]] = {}  # seconds, by the stage's position and the line

    @property
    def blocking(self) -> frozenset[int]:
        """The positions of the stages that have blocked the loop."""
        return frozenset(position for position, _ in self._blocked)

    def add_time(self, position: int, seconds: float) -> None:
        """Suspect a stage from now on if it took that long for an item."""
        if seconds > LIMIT:
            self.suspects.add(position)

    async def call(self, position: int, stage: Stage, slot: object) -> Any:
        """Return what the stage returns for a slot, and time the steps of its coroutine."""
        function: Any = stage.function
        return await _in_steps(function(slot), _Step(self, position, stage.name))

    def blocked(self, position: int, name: str, line: SourceLine, seconds: float) -> None:
        """Count a step that has blocked the loop. Warn if it is not the first one at this line."""
        times = self._blocked.setdefault((position, line.line), [])
        times.append(seconds)
        if len(times) == STEPS:
            self._guard(
                advise,
                "blocking stage",
                line,
                f"stage {name!r} of a pipeline blocked the event loop here {STEPS} times, for {max(times) * 1e3:.0f} "
                "ms at most; meanwhile no task ran, and no work was enqueued: run the function that blocks by "
                "`await device.offload(function, ...)` or asyncio.to_thread",
            )
        elif len(times) > STEPS:
            times.pop()


class LoopTimes:
    """The time for which each stage that awaits has the event loop: its steps, and not what it waits for.

    The pipeline calls some items' stages by `call`, those that it times on the device, too.
    """

    def __init__(self, stages: int) -> None:
        self._times: list[deque[float]] = [deque(maxlen=MOST_TIMES) for _ in range(stages)]  # by the stage's position

    async def call(self, position: int, stage: Stage, slot: object) -> Any:
        """Return what the stage returns for a slot, and time the steps of its coroutine."""
        function: Any = stage.function
        steps = _StepTime()
        returned = await _in_steps(function(slot), steps)
        self._times[position].append(steps.seconds)
        return returned

    def typical_seconds(self) -> list[float]:
        """Return the median time for one item, by the stage's position; 0.0 for a stage without times."""
        return [float(np.median(times)) if times else 0.0 for times in self._times]

    def reset(self) -> None:
        """Forget all times."""
        for times in self._times:
            times.clear()


class _StepTime:
    """The time of all steps of one coroutine."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin(self, coroutine: Any) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self.seconds += time.monotonic() - self._began


class _Step:
    """The running step of one coroutine. A thread samples its line if the step takes too long."""

    def __init__(self, watch: BlockingWatch, position: int, name: str) -> None:
        self._watch = watch
        self._position = position
        self._name = name
        self._thread_id = threading.get_ident()
        self._coroutine: Any = None
        self._began = 0.0
        self._line: SourceLine | None = None

    def begin(self, coroutine: Any) -> None:
        self._coroutine = coroutine
        self._line = None
        self._began = time.monotonic()
        sample_at(self, self._began + LIMIT)

    def end(self) -> None:
        seconds = time.monotonic() - self._began
        cancel_sample(self)
        line, self._line = self._line, None
        if seconds > LIMIT and line is not None:
            self._watch.blocked(self._position, self._name, line, seconds)

    def sample(self) -> None:
        """Note the innermost line in the file of the stage's function. Called by a thread."""
        file = getattr(getattr(self._coroutine, "cr_code", None), "co_filename", None)
        for frame in stack_of(self._thread_id):
            if frame.f_code.co_filename == file:
                self._line = SourceLine.of_frame(frame)
                return


@types.coroutine
def _in_steps(coroutine: Coroutine[Any, Any, Any], step: _StepTime | _Step) -> Generator[Any, Any, Any]:
    """Run a coroutine, and time each of its steps."""
    value: Any = None
    error: BaseException | None = None
    while True:
        step.begin(coroutine)
        try:
            yielded = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        finally:
            step.end()
        value = error = None
        try:
            value = yield yielded
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as thrown:  # noqa: BLE001 - the coroutine gets it
            error = thrown
