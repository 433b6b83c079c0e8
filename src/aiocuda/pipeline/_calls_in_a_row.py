"""CallsInARow: notices calls of `Pipeline.execute_iteration` one after the other, which do not overlap."""

from __future__ import annotations

from typing import Final

from .._base._advice import advise
from .._base._types import SourceLine

__all__ = ["CallsInARow"]

#: Calls in a row that began right after the call before them had ended.
CALLS: Final = 3

#: What "right after" means: within this share of the time of the iteration before.
SHARE: Final = 0.1


class CallsInARow:
    """Advises `Pipeline.submit`, once, if iterations that could overlap follow each other.

    Steps of a `ManagedContext` get no advice: the context calls the pipeline, not the program.
    """

    __slots__ = ("_calls", "_ended", "_is_wanted", "_seconds")

    def __init__(self) -> None:
        self._is_wanted = True
        self._calls = 0  # that began right after the call before them
        self._ended = -1.0  # the time at which the last call ended; negative if there was none
        self._seconds = 0.0  # that it took

    def begin(self, now: float) -> None:
        """Note that a call begins, and no other is unfinished. It may give the advice, which a filter may raise."""
        if self._ended >= 0 and now - self._ended <= SHARE * self._seconds:
            self._calls += 1
        else:
            self._calls = 0
        if self._calls < CALLS or not self._is_wanted:
            return
        line = SourceLine.of_direct_caller("pipeline")
        if line is None:
            return
        self._is_wanted = False
        advise(
            "calls in a row", line,
            f"{CALLS} times in a row execute_iteration was called right after the call before had ended, so the items "
            "of this pipeline do not overlap: `ticket = await pipeline.submit(item)` waits for a free slot only, and "
            "`async for result in pipeline.run(items)` overlaps, too",
        )  # fmt: skip

    def end(self, began: float, now: float) -> None:
        """Note that a call has ended, which began at that time."""
        self._ended = now
        self._seconds = now - began

    def interrupt(self) -> None:
        """Note that calls overlap."""
        self._calls, self._ended = 0, -1.0
