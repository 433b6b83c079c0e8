"""Listeners: the listeners of one device, and the hooks that each of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

__all__ = ["Hooks", "Listeners", "call_hooks", "call_resolve_hooks"]

#: A listener and one of its hooks.
Hooks: TypeAlias = tuple[tuple[object, Callable[..., object]], ...]


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
    """

    __slots__ = ("all", "batch", "follow", "resolve", "submit", "timing")

    def __init__(self, listeners: Iterable[object]) -> None:
        self.all = tuple(listeners)
        self.timing = any(getattr(each, "timing", False) for each in self.all)
        self.submit = self._hooks("on_submit")
        self.resolve = self._hooks("on_resolve")
        self.batch = self._hooks("on_batch")
        self.follow = self._hooks("on_follow")

    def _hooks(self, name: str) -> Hooks:
        hooks: list[Any] = [(each, getattr(each, name, None)) for each in self.all]
        return tuple(pair for pair in hooks if pair[1] is not None)

    def __contains__(self, listener: object) -> bool:
        return any(each is listener for each in self.all)


def call_hooks(hooks: Hooks, *arguments: object) -> list[tuple[object, BaseException]]:
    """Call hooks. Return the listeners whose hook has raised, with the exception."""
    failed = []
    for listener, hook in hooks:
        try:
            hook(*arguments)
        except BaseException as error:  # noqa: BLE001 - the caller reports it
            failed.append((listener, error))
    return failed


def call_resolve_hooks(hooks: Hooks, operation: object, start: int, end: int) -> list[tuple[object, BaseException]]:
    """Do the same as `call_hooks`, 0.1 µs faster for these arguments."""
    failed = []
    for listener, hook in hooks:
        try:
            hook(operation, start, end)
        except BaseException as error:  # noqa: BLE001 - the caller reports it
            failed.append((listener, error))
    return failed
