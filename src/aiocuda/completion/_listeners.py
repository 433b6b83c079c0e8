"""Listeners: the listeners of one device, and the hooks that each of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Hooks", "Listeners", "Listening", "call_hooks", "call_resolve_hooks"]

#: A listener and one of its hooks.
Hook: TypeAlias = tuple[object, Callable[..., object]]
Hooks: TypeAlias = tuple[Hook, ...]


class Listening(NamedTuple):
    """A listener with its attributes, which are read once: when it begins to listen."""

    listener: object
    timing: bool
    submit: Callable[..., object] | None
    resolve: Callable[..., object] | None
    batch: Callable[..., object] | None
    follow: Callable[..., object] | None
    outcome: Callable[..., object] | None

    @classmethod
    def of(cls, listener: Any) -> Listening:
        """Read the attributes of a listener."""
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
    """Call hooks. Return the listeners whose hook has raised, with the exception."""
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
    """Do the same as `call_hooks`, 0.1 µs faster for these arguments."""
    failed = []
    for listener, hook in hooks:
        try:
            hook(operation, start, end)
        except BaseException as error:  # noqa: BLE001 - the caller reports it
            failed.append((listener, error))
    return failed
