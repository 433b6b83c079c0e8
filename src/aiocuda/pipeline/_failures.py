"""Failures: what is told where several items or stages of a pipeline failed, or were skipped."""

from __future__ import annotations

from collections.abc import Iterable

from ..completion._failure import raisable
from ..errors import ClosedError, DeviceFault, SkippedError

__all__ = ["but_closed", "causes", "combine", "first_cause"]


def first_cause(error: BaseException) -> BaseException:
    """What the first item that failed, all before it being done, failed with.

    If its work was skipped, that was for something of its own: an operation that its stage did not return.
    """
    cause = error.__cause__
    if not isinstance(error, SkippedError) or not isinstance(cause, Exception):
        return error
    found = raisable(cause)
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def causes(failures: list[BaseException]) -> list[BaseException]:
    """What is to be told of items that nobody waits for: what they were skipped for only where that is none of theirs.

    It may be a wait of the pipeline's own, say, that the driver has refused.
    """
    own = [one for one in dict.fromkeys(failures) if not isinstance(one, SkippedError)]
    return own or [first_cause(one) for one in failures[:1]]


def but_closed(failures: list[BaseException]) -> list[BaseException]:
    """All but what was closed, also where that is one of several failures of an item."""
    found: list[BaseException] = []
    for failure in failures:
        rest = failure.split(ClosedError)[1] if isinstance(failure, BaseExceptionGroup) else failure
        if rest is not None and not isinstance(rest, ClosedError):
            found.append(rest)
    return found


def combine(failures: Iterable[BaseException], what: str) -> BaseException:
    """What is raised when several failed.

    A device's fault is one failure, however many saw it; what was skipped did nothing wrong, what went before it did.
    """
    every = list(failures)
    found: list[BaseException] = []
    for failure in [one for one in every if not isinstance(one, SkippedError)] or every[:1]:
        seen = isinstance(failure, DeviceFault) and any(isinstance(one, DeviceFault) for one in found)
        if not seen and not any(one is failure for one in found):
            found.append(failure)
    return found[0] if len(found) == 1 else BaseExceptionGroup(f"{len(found)} {what} failed", found)
