"""Estimate: the expected duration of one kind of operation. Outlook: the operation that is awaited, and its end.

A duration begins at the submission, or when the previous operation of the queue was resolved, if that is later. It ends
when the operation is resolved, by the host's clock. So it is known as an interval: from the last query that found the
operation unfinished to the one that found it done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._hot import Countdown

if TYPE_CHECKING:
    from ._ring import Ring
    from ._stream_operation import StreamOperation

__all__ = ["CALLBACK_SECONDS", "INSTANT", "Estimate", "Outlook"]

#: Weight of a new exact sample: after three samples, half of a change is learned.
WEIGHT = 0.2

#: An interval that is shorter than this, or than a fiftieth of its end, is an exact sample. That of a callback is not,
#: since the end was up to 0.7 ms before it: by the mean of callbacks, no poll would begin before the end.
EXACT_SECONDS = 100e-6
EXACT_PART = 0.02

#: Durations repeat if they differ by at most this, or by this part.
REPEAT_SECONDS = 200e-6
REPEAT_PART = 0.05

#: A host callback wakes the loop at most so late, usually: an operation that a task waits for has ended after that.
CALLBACK_SECONDS = 700e-6

#: Durations repeat from this value of `Estimate.agreed` on.
REPEATED = 3

#: `Estimate.agreed` counts up to this.
MOST_AGREED = 4


class Estimate:
    """The expected duration of one kind of operation.

    Attributes
    ----------
    kernel : str or None
        The name of the kernel of a launch.
    seconds : float or None
        The expected duration; None if unknown.
    agreed : int
        0 to 4: a sample that agrees with ``seconds``, and with its prediction if there was one, adds one; each other
        sample subtracts one. At 0, the next sample that differs replaces ``seconds``. So a rare outlier changes
        nothing, and durations that vary never get far. Where several streams all take 1 ms, and then all 10 ms, the
        samples of one round agree with each other, but not with their predictions, which were made before the round.
    """

    __slots__ = ("_after_wait", "agreed", "kernel", "seconds")

    def __init__(self, kernel: str | None = None) -> None:
        self.kernel = kernel
        self.seconds: float | None = None
        self.agreed = 0
        self._after_wait: Estimate | None = None

    @property
    def after_wait(self) -> Estimate:
        """The estimate of the same operation directly after a wait for another stream: its duration includes the wait.

        In a pipeline that duration is the period of the pipeline, so it repeats.
        """
        if self._after_wait is None:
            self._after_wait = Estimate(self.kernel)
        return self._after_wait

    def add(self, least: float, most: float, count: int = 1, foreseen: float = 0.0) -> None:
        """Add a sample: together, ``count`` operations took at least ``least`` and at most ``most`` seconds.

        ``foreseen``: the seconds that were predicted for them when their wait began; 0.0 without a prediction.
        """
        width = most - least
        is_exact = width <= EXACT_SECONDS or width <= EXACT_PART * most
        least /= count
        most /= count
        if self.seconds is None:
            self.seconds = most
            return
        known = self.seconds
        if width > CALLBACK_SECONDS and not is_exact and least <= known <= most:
            return  # no task has waited, so the end may have been long before: nothing is learned
        # The duration of the sample: its end if it is exact, else the time in the interval that is nearest to `known`.
        nearest = most if is_exact or known > most else least if known < least else known
        off = nearest - known if nearest > known else known - nearest
        agrees = off <= REPEAT_SECONDS or off <= REPEAT_PART * known
        if agrees:
            self.seconds = known + WEIGHT * (nearest - known) if is_exact else nearest
            if foreseen:  # the prediction has to agree with the sample, too
                foreseen /= count
                off = foreseen - most if foreseen > most else least - foreseen
                agrees = off <= REPEAT_SECONDS or off <= REPEAT_PART * foreseen
        elif not self.agreed:
            self.seconds = most
        if agrees and self.agreed < MOST_AGREED:
            self.agreed += 1
        elif not agrees and self.agreed:
            self.agreed -= 1

    def shorten(self, factor: float) -> None:
        """Scale the estimate by a factor below 1: operations of several kinds have ended before their predicted end.

        Only the sum of their durations is known, because one query has found all of them done.
        """
        if self.seconds is not None:
            self.seconds *= factor


class _Instant(Estimate):
    """The estimate of markers and of waits for other streams. It learns nothing."""

    __slots__ = ()

    def add(self, least: float, most: float, count: int = 1, foreseen: float = 0.0) -> None:
        """Do nothing."""

    def shorten(self, factor: float) -> None:
        """Do nothing."""


INSTANT = _Instant()
INSTANT.seconds = 0.0
INSTANT.agreed = MOST_AGREED


class Outlook:
    """Finds the operation of a queue that is awaited, and predicts its end.

    Attributes
    ----------
    awaited : StreamOperation or None
        What `find` has returned last; None if that may have changed.
    """

    __slots__ = ("awaited",)

    def __init__(self) -> None:
        self.awaited: StreamOperation[Any] | None = None

    def forget(self) -> None:
        """Reset `awaited`: other operations are in the queue, or in another order."""
        self.awaited = None

    def note_waiter(self, operation: StreamOperation[Any] | None) -> None:
        """Reset `awaited` if an operation with a new waiter may be older: ``operation``; None for an unknown one."""
        if operation is None or self.awaited is None or operation.id < self.awaited.id:
            self.awaited = None

    def find(self, queue: Ring) -> tuple[StreamOperation[Any] | None, float | None, bool]:
        """Return the oldest operation with a waiter, its predicted end, and whether the durations up to it repeat.

        If the waiter is the `Countdown` of a `gather`, return the last of its operations before another waiter: no task
        resumes before that. An operation with a copy-out counts as awaited, and while the host queue is not empty, the
        middle one of `pending`: the stream is refilled when it is half empty.
        """
        pending = queue.pending
        refill = len(pending) // 2 if queue.on_host else -1
        expected: float | None = None
        repeats = True
        countdown: object = None
        found: tuple[StreamOperation[Any] | None, float | None, bool] = None, None, False
        for index, operation in enumerate(pending):
            if index == 0:  # the beginning of its duration
                expected = max(operation.submitted_at, queue.last_resolved)
            estimate = operation.estimate
            seconds = None if estimate is None else estimate.seconds
            if estimate is None or seconds is None or expected is None:
                expected, repeats = None, False  # for all later ones, too
            else:
                expected += seconds
                repeats = repeats and estimate.agreed >= REPEATED
            waiter = operation.waiters
            copies_out = operation.extra is not None and operation.extra.copy_out is not None
            if waiter is None and not copies_out and index != refill:
                continue
            if countdown is None:
                found = operation, expected, repeats
                if type(waiter) is not Countdown or copies_out or index == refill:
                    break
                countdown = waiter  # look for later operations of the same `gather`
            elif waiter is countdown and not copies_out:
                found = operation, expected, repeats
            else:
                break
        self.awaited = found[0]
        return found

    def patience(self, queue: Ring, operation: StreamOperation[Any], now: float) -> float:
        """Return the time until which an await repeats its query; 0.0 for no repetition: its end is not near."""
        longest = queue.device_hot.linger
        if queue.reactor_hot.attended:
            longest /= 2  # other tasks wait, too: they go on while the loop turns
        estimate = operation.estimate
        seconds = None if estimate is None else estimate.seconds
        # A long operation is not awaited in this way: while those before it are unresolved, the sum below is too early.
        if (
            seconds is None
            or seconds > 2 * longest
            or max(operation.submitted_at, queue.last_resolved) + seconds > now + longest
        ):
            return 0.0
        return now + longest

    def shorten(self, queue: Ring, first: StreamOperation[Any], last: StreamOperation[Any], now: float) -> None:
        """Shorten the estimates of operations that have ended before the predicted end of the last one.

        They are of different kinds. Only the kinds of the first and of the last one are known here.
        """
        start = max(first.submitted_at, queue.last_resolved)
        for estimate in {first.estimate, last.estimate}:
            if estimate is not None:
                estimate.shorten((now - start) / (queue.watch.predicted - start))
