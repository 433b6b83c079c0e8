"""RunningBatch: the requests of a batch, from its formation to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ._batch_hooks import End
from ._request import Request

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
    task : asyncio.Task or None
        Calls the function.
    ends : list
        What to call at its end: see `BatchHooks`.
    """

    __slots__ = ("began", "ends", "number", "predicted", "requests", "task")

    def __init__(self, number: int, requests: Sequence[Request], began: float, predicted: float | None) -> None:
        self.number = number
        self.requests = requests
        self.began = began
        self.predicted = predicted or 0.0
        self.task: asyncio.Task[None] | None = None
        self.ends: list[End] = []

    @property
    def items(self) -> list[Any]:
        """The items of the requests."""
        return [request.item for request in self.requests]

    def label(self) -> str | None:
        """Return the different labels of the requests, joined by commas; None if no request has one."""
        labels = dict.fromkeys(request.label for request in self.requests if request.label is not None)
        return ", ".join(labels) or None

    @property
    def weight(self) -> int:
        """The weight of the requests."""
        return sum(request.weight for request in self.requests)

    def drop_done(self) -> None:
        """Drop the requests that have an outcome, or whose await was cancelled."""
        self.requests = [request for request in self.requests if not request.done]

    def remaining(self, now: float) -> float:
        """Return the predicted seconds until it ends."""
        return max(0.0, self.began + self.predicted - now)
