"""Instrument: the hooks of a listener, which `Device.listen` calls for every operation of a device."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

__all__ = ["Instrument", "Listener", "ResolveListener", "SubmitListener"]


class SubmitListener(Protocol):
    """A listener with the hook `on_submit`."""

    def on_submit(self, operation: Any, /) -> object:
        """Called when a stream has accepted the operation."""


class ResolveListener(Protocol):
    """A listener with the hook `on_resolve`."""

    def on_resolve(self, operation: Any, start: int, end: int, /) -> object:
        """Called when the operation has finished. ``start`` and ``end`` are timing events, or 0."""


#: What `Device.listen` accepts.
Listener: TypeAlias = SubmitListener | ResolveListener


class Instrument(Protocol):
    """A base class for listeners, with hooks that do nothing.

    A listener needs no base class: `aiocuda.Device.listen` accepts every object with one of the two hooks. The hooks
    run in the event loop of the operation's stream, in a context with the context variables of the task that enqueued
    the operation. They must return at once and must not raise. A hook must not await, and must enqueue nothing.
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
