"""Watch: the reactor's plan for the queue of one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..completion._armed_notifier import ArmedNotifier

__all__ = ["Watch"]


class Watch:
    """When the reactor queries a queue: it sleeps before the first moment, polls until the second, and then parks.

    Only the reactor writes it.

    Attributes
    ----------
    attended : bool
        True while an operation of the queue has a waiter, and the reactor has a plan for it.
    polling : bool
        True while the reactor queries the queue in each turn of the loop.
    poll_from, poll_until : float
        The plan, in seconds by the driver's clock.
    since : float
        The time at which the plan was made.
    predicted : float
        The predicted end of the awaited operation; 0.0 if it is unknown.
    armed : ArmedNotifier or None
        The notifier that is armed for the queue.
    """

    __slots__ = ("armed", "attended", "poll_from", "poll_until", "polling", "predicted", "since")

    def __init__(self) -> None:
        self.attended = self.polling = False
        self.poll_from = self.poll_until = self.since = self.predicted = 0.0
        self.armed: ArmedNotifier | None = None
