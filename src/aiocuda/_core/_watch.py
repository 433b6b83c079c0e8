"""Watch: the reactor's plan for the queue of one stream."""

from __future__ import annotations

from typing import Any

__all__ = ["Watch"]


class Watch:
    """How the reactor waits for the awaited operation of a queue: see `aiocuda.completion._wait_rule`.

    Only the reactor writes it.

    Attributes
    ----------
    attended : bool
        True while an operation of the queue has a waiter, and the reactor has a plan for it.
    polling : bool
        True while the reactor queries the queue in each turn of the loop.
    parked : bool
        True from the moment at which the wait needs no poll: a notifier is armed, or the timer queries.
    poll_from, poll_until : float
        When the next query is, and when the poll that begins then ends, in seconds by the driver's clock.
    target : int
        The id of the awaited operation.
    since, looked : float
        The times at which the wait began, and at which it was queried last.
    predicted : float
        The predicted end of the awaited operation; 0.0 if it is unknown.
    repeats : bool
        True if durations of its kind have repeated.
    armed : ArmedNotifier or None
        The notifier that is armed for the queue.
    """

    __slots__ = ("armed", "attended", "looked", "parked", "poll_from", "poll_until", "polling", "predicted", "repeats",
                 "since", "target")  # fmt: skip

    def __init__(self) -> None:
        self.attended = self.polling = self.parked = self.repeats = False
        self.poll_from = self.poll_until = self.since = self.looked = self.predicted = 0.0
        self.target = 0
        self.armed: Any = None
