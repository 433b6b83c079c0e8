"""The errors of one program: which are expected, and whether every injected fault was reported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from aiocuda.driver.simulated._upset import Upsets
from aiocuda.errors import ClosedError, DeviceOutOfMemory

__all__ = ["ErrorLog", "PlannedError"]


class PlannedError(Exception):
    """An error that a program raises on purpose, to check how the library handles it."""


class ErrorLog:
    """Collects the errors that operations, tasks and the event loop have reported.

    Parameters
    ----------
    upsets
        The faults that the simulated driver injects.
    """

    def __init__(self, upsets: Upsets) -> None:
        self._upsets = upsets
        self._codes: set[int] = set()
        #: Reports to the loop's exception handler that no injected fault explains.
        self.unexpected: list[str] = []
        #: True if the loop is closed while tasks run on it. They are destroyed, and the loop's handler is called.
        self.loop_closes_early = False
        #: True if items of a pipeline were ended early: an exception has left the pipeline, and hides their failures.
        self.items_ended_early = False
        #: True if the program limits memory, or lets allocations fail, by memory adaptors.
        self.memory_is_limited = False

    def handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle a call of the loop's exception handler."""
        error: BaseException | None = context.get("exception")
        if error is not None:
            self.record(error)
        expected = self._is_expected(error) if error is not None else self.loop_closes_early and "task" in context
        if not expected:
            self.unexpected.append(f"{context.get('message')}: {error!r}")

    def record(self, error: BaseException) -> None:
        """Remember that an error was reported to the program."""
        self.items_ended_early = self.items_ended_early or "was ended early" in str(error)
        self._codes.update(_codes(error))

    def is_planned_shortage(self, error: BaseException) -> bool:
        """True if an error comes from memory that the program itself has limited."""
        return self.memory_is_limited and any(isinstance(each, DeviceOutOfMemory) for each in _chain(error))

    def _is_expected(self, error: BaseException) -> bool:
        """True for a planned error, for something that was closed, and for a code that the driver was to answer."""
        planned = any(isinstance(each, ClosedError | PlannedError) for each in _chain(error))
        return planned or self.is_planned_shortage(error) or not self._injected_codes().isdisjoint(_codes(error))

    def _injected_codes(self) -> set[int]:
        return {int(fault.partition(" ")[2]) for fault in self._upsets.happened if " " in fault}

    def unreported_fault(self) -> str | None:
        """Return the injected fault that nothing has reported; None if there is none, or more than one fault happened.

        With several faults, one may hide another: a loop reports only the first query that the driver refuses. An
        exception that leaves a pipeline hides the failures of its items. Code 2, out of memory, may stay unreported:
        the library tries each allocation twice.
        """
        if sum(self._upsets.happened.values()) == 1 and not self.items_ended_early:
            for code in self._injected_codes() - self._codes - {2}:
                return f"a call was refused with {code}, and no error has reported it"
        return None


def _codes(error: BaseException) -> Iterator[int]:
    """Yield the CUDA error codes of an error and its causes."""
    for each in _chain(error):
        code = getattr(each, "code", None)
        if isinstance(code, int):
            yield code


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the errors of a group, and all causes."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _chain(each)
        error = error.__cause__
