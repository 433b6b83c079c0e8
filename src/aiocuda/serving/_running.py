"""RunningBatch: the requests of a batch, from its formation to its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ._batch import Batch
from ._batch_hooks import BatchHooks, End
from ._request import Request
from ._results import is_failure

__all__ = ["RunningBatch"]


class RunningBatch:
    """The requests of a batch, from its formation to its end.

    Attributes
    ----------
    number : int
        Counts the batches of the batcher, from 0.
    requests : sequence of Request
        In the order of the items.
    began : float
        The loop's time.
    predicted : float
        The seconds that it will take; 0 if that is not known.
    weight : int
        The weight of the requests.
    ends : sequence
        What the listeners of the device want called at its end: see `BatchHooks`.
    """

    __slots__ = ("began", "ends", "number", "predicted", "requests", "weight")

    def __init__(
        self, number: int, requests: Sequence[Request], weight: int, began: float, predicted: float | None
    ) -> None:
        self.number = number
        self.requests = requests
        self.weight = weight
        self.began = began
        self.predicted = predicted or 0.0
        self.ends: Sequence[End] = ()

    @property
    def items(self) -> list[Any]:
        """The items of the requests."""
        return [request.item for request in self.requests]

    def label(self) -> str | None:
        """Return the different labels of the requests, joined by commas; None if no request has one."""
        labels = dict.fromkeys(request.label for request in self.requests if request.label is not None)
        return ", ".join(labels) or None

    def drop_done(self) -> None:
        """Drop the requests that have an outcome, or whose await was cancelled."""
        left = [request for request in self.requests if not request.done]
        if len(left) < len(self.requests):
            self.requests = left
            self.weight = sum(request.weight for request in left)

    def announce(self, hooks: BatchHooks, batch: Batch[Any], now: float) -> None:
        """Call the listeners of the device before the function is called."""
        self.ends = hooks.begin(batch, self.requests, now)

    def report(self, hooks: BatchHooks, found: Iterable[Any], error: BaseException | None) -> None:
        """Call what the listeners have for the end: with the outcomes, or with the error of the function."""
        ends, self.ends = self.ends, ()
        if error is None:
            hooks.end(ends, [outcome if is_failure(outcome) else None for outcome in found])
        else:
            hooks.end(ends, [error] * len(self.requests))

    def remaining(self, now: float) -> float:
        """Return the predicted seconds until it ends."""
        return max(0.0, self.began + self.predicted - now)
