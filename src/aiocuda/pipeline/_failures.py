"""The exception to raise or report when items or stages of a pipeline failed or were skipped."""

from __future__ import annotations

from collections.abc import Iterable

from .._base._failure import raisable
from ..errors import ClosedError, DeviceFault, SkippedError

__all__ = ["combine", "reportable", "root_failure", "without_closed"]


def root_failure(error: BaseException) -> BaseException:
    """Return the root failure of the first item that failed, when all items before it are done.

    If its work was skipped, the root failure is that of an operation of its own that the stage did not return.
    """
    cause = error.__cause__
    if not isinstance(error, SkippedError) or not isinstance(cause, Exception):
        return error
    failure = raisable(cause)
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    return failure


def reportable(failures: list[BaseException]) -> list[BaseException]:
    """Return the failures to report of items without a waiter.

    The root failure of a skipped item counts only if no item failed by itself. It may be a wait between two stages
    that the driver has refused.
    """
    own = [failure for failure in dict.fromkeys(failures) if not isinstance(failure, SkippedError)]
    return own or [root_failure(failure) for failure in failures[:1]]


def without_closed(failures: list[BaseException]) -> list[BaseException]:
    """Return the failures without every `ClosedError`, also without those in exception groups."""
    kept: list[BaseException] = []
    for failure in failures:
        rest = failure.split(ClosedError)[1] if isinstance(failure, BaseExceptionGroup) else failure
        if rest is not None and not isinstance(rest, ClosedError):
            kept.append(rest)
    return kept


def combine(failures: Iterable[BaseException], noun: str) -> BaseException:
    """Return the exception to raise for several failures: the only one that counts, or a group.

    A `DeviceFault` counts once, however many operations failed with it. A `SkippedError` counts only if there is
    nothing else.
    """
    every = list(failures)
    found: list[BaseException] = []
    for failure in [each for each in every if not isinstance(each, SkippedError)] or every[:1]:
        is_known_fault = isinstance(failure, DeviceFault) and any(isinstance(each, DeviceFault) for each in found)
        if not is_known_fault and not any(each is failure for each in found):
            found.append(failure)
    return found[0] if len(found) == 1 else BaseExceptionGroup(f"{len(found)} {noun} failed", found)
