"""Listeners: the listeners of one device, and the hooks that each has. `Reports` calls them for one stream."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from .._core import Ring, StreamOperation

__all__ = ["Hooks", "Listeners", "Listening", "Reports"]

#: A listener and one of its hooks.
Hook: TypeAlias = tuple[object, Callable[..., object]]
Hooks: TypeAlias = tuple[Hook, ...]


class Listening(NamedTuple):
    """A listener and its hooks, which are read once: when it begins to listen. A hook that it lacks is None."""

    listener: object
    timing: bool
    submit: Callable[..., object] | None
    resolve: Callable[..., object] | None
    batch: Callable[..., object] | None
    follow: Callable[..., object] | None
    outcome: Callable[..., object] | None

    @classmethod
    def of(cls, listener: Any) -> Listening:
        """Return a listener with its hooks, and whether it wants timing events."""
        names = ("on_submit", "on_resolve", "on_batch", "on_follow", "on_outcome")
        hooks = [getattr(listener, name, None) for name in names]
        return cls(listener, bool(getattr(listener, "timing", False)), *hooks)


class Listeners:
    """The listeners of one device. It does not change: a thread can call the hooks while another one adds a listener.

    Attributes
    ----------
    all : tuple
        In the order in which they began to listen.
    timing : bool
        True if a listener wants timing events.
    submit, resolve : tuple
        The hooks ``on_submit`` and ``on_resolve``, each with its listener.
    batch : tuple
        The hooks ``on_batch``.
    follow : tuple
        The hooks ``on_follow(queue, operation)``: the next operation of this queue waits for ``operation`` of another
        stream. The library's own listeners use it.
    outcome : tuple
        The hooks ``on_outcome(request)`` for requests of batchers. The library's own listeners use it.
    """

    __slots__ = ("all", "batch", "follow", "outcome", "resolve", "submit", "timing")

    def __init__(self, listening: Iterable[Listening] = ()) -> None:
        self.all = tuple(listening)
        self.timing = any(each.timing for each in self.all)
        self.submit: Hooks = tuple((each.listener, each.submit) for each in self.all if each.submit is not None)
        self.resolve: Hooks = tuple((each.listener, each.resolve) for each in self.all if each.resolve is not None)
        self.batch: Hooks = tuple((each.listener, each.batch) for each in self.all if each.batch is not None)
        self.outcome: Hooks = tuple((each.listener, each.outcome) for each in self.all if each.outcome is not None)
        self.follow: Hooks = tuple((each.listener, each.follow) for each in self.all if each.follow is not None)

    def __contains__(self, listener: object) -> bool:
        return any(each.listener is listener for each in self.all)

    def with_one(self, listening: Listening) -> Listeners:
        """Return these listeners and one more."""
        return Listeners((*self.all, listening))

    def without(self, listener: object) -> Listeners | None:
        """Return these listeners without one of them; None if no other is left."""
        others = [each for each in self.all if each.listener is not listener]
        return Listeners(others) if others else None


def call_hooks(hooks: Iterable[Hook], *arguments: object) -> list[tuple[object, BaseException]]:
    """Call each hook with these arguments. Return the listeners whose hook has raised, with the exception."""
    failed = []
    for listener, hook in hooks:
        try:
            hook(*arguments)
        except BaseException as error:  # noqa: BLE001 - the caller reports it
            failed.append((listener, error))
    return failed


def call_resolve_hooks(
    hooks: Iterable[Hook], operation: object, start: int, end: int
) -> list[tuple[object, BaseException]]:
    """Do the same as `call_hooks` for the hooks ``on_resolve`` (see `ResolveListener`), 0.1 µs faster."""
    failed = []
    for listener, hook in hooks:
        try:
            hook(operation, start, end)
        except BaseException as error:  # noqa: BLE001 - the caller reports it
            failed.append((listener, error))
    return failed


class Reports:
    """Notifies the listeners of the operations of one stream: once that each is submitted, and once that it ends.

    An await that begins resolves operations before it suspends, so they are awaited without a waiter: `awaits`.
    """

    __slots__ = ("_gathered", "_queue", "_reported")

    def __init__(self, queue: Ring) -> None:
        self._queue: Callable[[], Ring] = weakref.ref(queue)  # type: ignore[assignment]  # which owns it
        self._reported = 0  # the id of the last operation whose end the listeners have been notified of
        self._gathered: frozenset[StreamOperation[Any]] = frozenset()

    def awaits(self, operation: StreamOperation[Any]) -> bool:
        """Return whether an await that begins now waits for the operation."""
        return operation is self._queue().awaiting or operation in self._gathered

    def linger(self, last: StreamOperation[Any], gathered: Sequence[StreamOperation[Any]]) -> None:
        """Call `Ring.linger` for the last operation that `gather` awaits on this stream.

        Meanwhile `awaits` is true for all gathered ones, so the hooks see that they are awaited.
        """
        self._gathered = frozenset(gathered)
        try:
            self._queue().linger(last)
        finally:
            self._gathered = frozenset()

    def was_reported(self, operation: StreamOperation[Any]) -> bool:
        """Return whether this operation is the last one whose end the listeners have been notified of."""
        return operation.id == self._reported

    def followed(self, operation: StreamOperation[Any]) -> None:
        """Notify the listeners that the next operation waits for this one of another stream, without a "wait"."""
        listeners = self._queue().device_hot.listeners
        if listeners is not None and listeners.follow:
            self._remove_failed(call_hooks(listeners.follow, self._queue(), operation))

    def submitted(self, hooks: Hooks, operation: StreamOperation[Any]) -> None:
        """Notify the listeners that the stream has accepted the operation."""
        try:
            failed = operation.context.run(call_hooks, hooks, operation)
        except RuntimeError:  # the context is in use: a hook that runs in it has led to this call
            failed = operation.context.copy().run(call_hooks, hooks, operation)
        if failed:
            self._remove_failed(failed)

    def resolved(self, operation: StreamOperation[Any]) -> bool:
        """Notify the listeners, once, that the operation is about to finish. Its events are still valid.

        Return whether the operation has an `Extra` afterwards: a hook may abandon it. Give back its start event.
        """
        device_state = self._queue().device_state
        listeners = device_state.hot.listeners if operation.id != self._reported else None
        if device_state.hot.starts:
            start, end = device_state.hot.starts.pop(operation.id, None), operation.lease
            if start is not None:
                try:
                    if listeners is not None and end is not None and end.timing:
                        self._call_resolve(listeners.resolve, operation, start.handle, end.handle)
                        listeners = None  # notified
                finally:
                    device_state.leases.give(start)
        if listeners is not None and listeners.resolve:
            self._call_resolve(listeners.resolve, operation, 0, 0)
        return operation.extra is not None

    def faulted(self, operation: StreamOperation[Any], awaited: bool) -> None:
        """Notify the listeners of an operation that a fault has ended. Its events are not given back.

        ``awaited``: it had waiters, which have been woken.
        """
        self._queue().device_hot.starts.pop(operation.id, None)
        self.gone(operation, awaited)

    def gone(self, operation: StreamOperation[Any], awaited: bool) -> None:
        """Notify the listeners of the end of an operation that is never resolved: it is faulted, or its queue is gone.

        ``awaited``: it had waiters.
        """
        queue = self._queue()
        listeners = queue.device_hot.listeners
        if listeners is not None and listeners.resolve:
            before, queue.awaiting = queue.awaiting, operation if awaited else None  # for `Operation.is_awaited`
            try:
                self._call_resolve(listeners.resolve, operation, 0, 0)  # no events, so no times
            finally:
                queue.awaiting = before

    def _call_resolve(self, hooks: Hooks, operation: StreamOperation[Any], start: int, end: int) -> None:
        """Call hooks ``on_resolve`` in the operation's context. After Ctrl-C, call the rest of them, and raise it."""
        left = iter(hooks)  # a second run goes on where the first one has stopped
        self._reported = operation.id
        # No call between these lines: Ctrl-C comes before the operation counts as reported, or in the `try`.
        try:
            failed = operation.context.run(call_resolve_hooks, left, operation, start, end)
        except RuntimeError:  # as in `submitted`
            failed = operation.context.copy().run(call_resolve_hooks, left, operation, start, end)
        except BaseException:  # Ctrl-C between two hooks
            operation.context.copy().run(call_resolve_hooks, left, operation, start, end)
            raise
        if failed:
            self._remove_failed(failed)

    def _remove_failed(self, failed: Sequence[tuple[object, BaseException]]) -> None:
        """Remove listeners with a hook that has raised, and report their errors. No operation fails."""
        interrupt: BaseException | None = None
        for listener, error in failed:
            self._queue().device_state.remove_listener(listener)
            try:
                self._queue().reactor.report(
                    f"a hook of the listener {type(listener).__qualname__} failed, and the listener was removed", error
                )
            except BaseException as left:  # noqa: BLE001 - Ctrl-C is raised after all have been removed and reported
                interrupt = left
        if interrupt is not None:
            raise interrupt
