"""The exception to raise or report when items or stages of a pipeline failed or were skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .._base._failure import raisable
from .._base._user_code import LEAVES_LOOP
from ..errors import ClosedError, DeviceFault, SkippedError
from ..lowlevel import resources_of

if TYPE_CHECKING:
    from ..device import Device

__all__ = ["combine", "report", "report_unraised", "reportable", "root_failure"]


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


def report_unraised(error: BaseException, failures: Iterable[BaseException | None], device: Device) -> None:
    """Report failures that the caller does not get: ``error`` is no failure, but a cancellation or the like."""
    if not isinstance(error, Exception):
        report([failure for failure in failures if failure is not None and failure is not error], device)


def report(failures: list[BaseException], device: Device) -> None:
    """Pass failures without a waiter to the loop's exception handler."""
    message = "aiocuda: a pipeline's item or source failed after the consumer had left"
    for failure in reportable(failures, device):
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": failure})


def reportable(failures: list[BaseException], device: Device) -> list[BaseException]:
    """Return the failures to report of items without a waiter.

    The root failure of a skipped item counts only if no item failed by itself. It may be a wait between two stages
    that the driver has refused.
    """
    own = [failure for failure in dict.fromkeys(failures) if not isinstance(failure, SkippedError)]
    found = own or [root_failure(failure) for failure in failures[:1]]
    found = [failure for failure in found if not isinstance(failure, LEAVES_LOOP)]
    if device.closed or resources_of(device).closing:
        found = _without_closed(found)  # the code that closes the device during a run ends the items, too
    return found


def _without_closed(failures: list[BaseException]) -> list[BaseException]:
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
