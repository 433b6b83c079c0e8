"""Estimate: the expected duration of one kind of operation.

A duration begins at the submission, or when the previous operation of the queue was resolved, if that is later. It ends
when the operation is resolved, by the host's clock. There are two kinds of samples. A *caught* operation was seen
unfinished and then finished by polling; its sample is exact to one turn of the loop. A *coarse* sample was found
finished after a sleep or a park, and is only an upper bound: a parked thread wakes 0.4-0.7 ms late (measured).
"""

from __future__ import annotations

__all__ = ["INSTANT", "Estimate"]

#: Weight of a new sample: after three samples, half of a change is learned; one outlier moves the estimate by a fifth.
WEIGHT = 0.2


class Estimate:
    """The expected duration of one kind of operation, and its variation.

    Without the variation, one late wake-up would cause the next: in a pipeline, the gap that it leaves comes again as
    an operation that is late by the same time.

    Attributes
    ----------
    kernel : str or None
        The name of the kernel of a launch.
    seconds : float or None
        The expected duration; None if unknown.
    spread : float
        The mean deviation in seconds, as TCP uses it for its time-outs (RFC 6298).
    """

    __slots__ = ("_after_wait", "kernel", "seconds", "spread")

    def __init__(self, kernel: str | None = None) -> None:
        self.kernel = kernel
        self.seconds: float | None = None
        self.spread = 0.0
        self._after_wait: Estimate | None = None

    @property
    def after_wait(self) -> Estimate:
        """The estimate of the same operation directly after a wait for another stream: its duration includes the wait.

        In a pipeline this is the period of the pipeline, and it repeats.
        """
        if self._after_wait is None:
            self._after_wait = Estimate(self.kernel)
        return self._after_wait

    def caught(self, sample: float) -> None:
        """Add an exact sample."""
        known = self.seconds
        if known is None:
            self.seconds = sample
        else:
            self.seconds = known + WEIGHT * (sample - known)
            self.spread += WEIGHT * (abs(sample - known) - self.spread)

    def overslept(self, bound: float) -> None:
        """Add an upper bound: the operation was done at the first query, ``bound`` seconds after its start."""
        if self.seconds is None or bound < self.seconds:
            self.seconds = bound

    def shorten(self, factor: float) -> None:
        """Scale the estimate: together with operations of other kinds, its operations took less time than predicted."""
        if self.seconds is not None:
            self.seconds *= factor

    def overdue(self, bound: float) -> None:
        """Add a sample of a parked operation that exceeded its estimate, and ended shortly before ``bound``."""
        if self.seconds is None:
            self.seconds = bound
        elif bound > self.seconds:
            self.spread = max(self.spread, (bound - self.seconds) / 2)
            self.seconds += (bound - self.seconds) / 2


class _Instant(Estimate):
    """The estimate of markers and of waits for other streams. It learns nothing."""

    __slots__ = ()

    def caught(self, sample: float) -> None:
        """Do nothing."""

    def overslept(self, bound: float) -> None:
        """Do nothing."""

    def shorten(self, factor: float) -> None:
        """Do nothing."""

    def overdue(self, bound: float) -> None:
        """Do nothing."""


INSTANT = _Instant()
INSTANT.seconds = 0.0
