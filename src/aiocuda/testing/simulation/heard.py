"""What a run heard of what went wrong: only what was to go wrong, and all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from ...driver.simulated._upset import Upsets
from ...errors import ClosedError, DeviceOutOfMemory

__all__ = ["Heard", "PlannedError"]


class PlannedError(Exception):
    """The program raises it, to see what becomes of it."""


class Heard:
    """The reports to a loop's exception handler, and the errors of operations and of a program.

    Parameters
    ----------
    upsets
        What is to go wrong.
    """

    def __init__(self, upsets: Upsets) -> None:
        self._upsets = upsets
        self._codes: set[int] = set()
        #: Of what nobody has planned.
        self.unplanned: list[str] = []
        #: The loop is closed under its tasks, which are destroyed then.
        self.loop_goes = False
        #: Memory is limited, or allocations fail, by what the program has put in front of the pool.
        self.scarce = False

    def told(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler."""
        error: BaseException | None = context.get("exception")
        if error is not None:
            self.error(error)
        planned = self._is_planned(error) if error is not None else self.loop_goes and "task" in context
        if not planned:
            self.unplanned.append(f"{context.get('message')}: {error!r}")

    def error(self, error: BaseException) -> None:
        """Somebody was told by an error."""
        self._codes.update(_codes(error))

    def is_scarce(self, error: BaseException) -> bool:
        """Is it for want of memory, of which the program has made too little?"""
        return self.scarce and any(isinstance(each, DeviceOutOfMemory) for each in _chain(error))

    def _is_planned(self, error: BaseException) -> bool:
        """Was it refused, or did it fault, by plan? Or has somebody closed what it was for?"""
        meant = any(isinstance(each, ClosedError | PlannedError) for each in _chain(error))
        return meant or self.is_scarce(error) or not self._planned().isdisjoint(_codes(error))

    def _planned(self) -> set[int]:
        return {int(what.partition(" ")[2]) for what in self._upsets.happened if " " in what}

    def unheard(self) -> str | None:
        """What went wrong, and nobody was told; looked at where no more than one thing did.

        A loop is told once that the driver has refused to say how far it is. An allocation that finds no room is tried
        once more, so out of memory may be no news.
        """
        if sum(self._upsets.happened.values()) == 1:
            for code in self._planned() - self._codes - {2}:
                return f"a call was refused with {code}, and nobody was told"
        return None


def _codes(error: BaseException) -> Iterator[int]:
    """What the driver had answered."""
    for each in _chain(error):
        code = getattr(each, "code", None)
        if isinstance(code, int):
            yield code


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and all that it came of."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _chain(each)
        error = error.__cause__
