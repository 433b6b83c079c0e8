"""Instrument: the hooks of a listener, called for every operation and batch of a device in a `Device.listen` block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Literal, Protocol, TypeAlias

__all__ = [
    "BatchListener",
    "EndedRequest",
    "Instrument",
    "Listener",
    "Outcome",
    "ResolveListener",
    "StartedBatch",
    "SubmitListener",
]

#: What became of a request of a `MicroBatcher`.
Outcome: TypeAlias = Literal["answered", "failed", "expired", "cancelled"]


class SubmitListener(Protocol):
    """A listener with the hook `on_submit`."""

    def on_submit(self, operation: Any, /) -> object:
        """Called when a stream has accepted the operation."""


class ResolveListener(Protocol):
    """A listener with the hook `on_resolve`."""

    def on_resolve(self, operation: Any, start: int, end: int, /) -> object:
        """Called when the operation has finished. ``start`` and ``end`` are timing events, or 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class StartedBatch:
    """A batch of an `aiocuda.serving.MicroBatcher` whose function is about to be called, for `BatchListener`.

    Attributes
    ----------
    function
        The name of the batcher's function.
    number
        Counts the batches of the batcher, from 0.
    size, weight
        The number of items, and the sum of their weights.
    contexts
        For each request, the context variables of the task that has called ``submit``; None if the listener did not
        listen then.
    waited_s
        For each request, the seconds since the call of ``submit``.
    batcher
        The batcher's own number, unique in the process.
    """

    function: str
    number: int
    size: int
    weight: int
    contexts: Sequence[Context | None]
    waited_s: Sequence[float]
    batcher: int


@dataclasses.dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request of a `MicroBatcher` that has its outcome now, for the hook ``on_outcome`` of the library's listeners.

    Attributes
    ----------
    batcher, function
        As in `StartedBatch`.
    number
        Counts the requests of the batcher, from 1.
    label
        The label of the task that has called ``submit``, or None.
    outcome
        ``"expired"`` if its deadline has passed; ``"failed"`` for another exception.
    seconds
        The seconds since the call of ``submit``.
    waited_s
        The seconds from the call of ``submit`` until its batch was formed; None if it was in none.
    batch
        The number of its batch; None if no batch has got it.
    """

    batcher: int
    function: str
    number: int
    label: str | None
    outcome: Outcome
    seconds: float
    waited_s: float | None
    batch: int | None


class BatchListener(Protocol):
    """A listener with the hook `on_batch`."""

    def on_batch(self, batch: StartedBatch, /) -> Callable[[Sequence[BaseException | None]], object] | None:
        """Called in the batch's own task and context, before its function.

        Return None, or a function. This is called when the batch has ended, with a sequence that has one entry for each
        request: its exception, or None if it has a result.
        """


#: What `Device.listen` accepts.
Listener: TypeAlias = SubmitListener | ResolveListener | BatchListener


class Instrument(Protocol):
    """A base class for listeners, with hooks that do nothing.

    A listener needs no base class: `aiocuda.Device.listen` accepts every object with one of the two hooks, or with that
    of `BatchListener`. The two hooks run in the event loop of the operation's stream, in a context with the context
    variables of the task that enqueued the operation. They must return at once and must not raise. A hook must not
    await, and must enqueue nothing.
    """

    #: True to record a timing event before and after every operation, for `on_resolve`.
    timing: bool = False

    def on_submit(self, operation: Any) -> None:
        """Called when a stream has accepted the operation."""

    def on_resolve(self, operation: Any, start: int, end: int) -> None:
        """Called when the operation has finished, failed or was skipped; before its waiters resume.

        Parameters
        ----------
        operation
            An `aiocuda.Operation`. It is not `done` yet.
        start, end
            The timing events before and after the operation, valid during the call. 0 without timing, for an operation
            that was enqueued before a listener with timing began, and for one that did not run.
        """
