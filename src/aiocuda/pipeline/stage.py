"""Stage: one step of a pipeline, as a function of a slot."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..completion.operation import Operation
from ..errors import InvalidArgumentError, InvalidTypeError
from ..event import Event
from .slot import Slot, SlotState

__all__ = ["Stage", "operations_of", "states_of"]


class Stage:
    """A named step that every item goes through.

    Parameters
    ----------
    name
        How it shows in statistics, errors and timelines; its stream bears it too.
    function
        Called with the `Slot`. A plain function *enqueues*: it gives work to ``slot.stream`` and returns its operation,
        several of them, or None; the pipeline calls it ahead of time and orders it behind the stage before, on the
        device. A coroutine function *awaits*: files, sockets, host work; it starts when all that the slot was given
        before is done, one item after the other.

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        No name, or nothing to call.

    Examples
    --------
    >>> Stage("compute", lambda slot: slot.stream.launch(kernel, 8, 256, slot.buffer("x", 2048)))
    <Stage compute, enqueues>
    """

    __slots__ = ("awaits", "function", "name")

    #: Is it a coroutine function?
    awaits: bool

    def __init__(self, name: str, function: Callable[[Slot], Any]) -> None:
        if not isinstance(name, str):
            raise InvalidTypeError(f"a stage has a string as its name, not {name!r}")
        if not name:
            raise InvalidArgumentError("a stage's name must not be empty: it is what errors and statistics show")
        if not callable(function):
            raise InvalidTypeError(f"stage {name!r} needs a function of a slot, not {type(function).__name__}")
        self.name = name
        self.function = function
        self.awaits = _is_coroutine_function(function)

    def __repr__(self) -> str:
        return f"<Stage {self.name}, {'awaits' if self.awaits else 'enqueues'}>"


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def states_of(stages: Sequence[Stage]) -> list[SlotState]:
    """What a slot is while each stage has it.

    Up to the first stage that enqueues it is uploading, from the last one on downloading, between them processing. If
    only one enqueues, it is processing there. If none does, all of them count as if they did.
    """
    marks = [index for index, stage in enumerate(stages) if not stage.awaits] or list(range(len(stages)))
    first, last = marks[0], marks[-1]
    states: list[SlotState] = []
    for index in range(len(stages)):
        if index < first or (index == first != last):
            states.append("uploading")
        elif index > last or (index == last != first):
            states.append("downloading")
        else:
            states.append("processing")
    return states


def operations_of(stage: Stage, returned: Any) -> tuple[Operation[Any], ...] | None:
    """What a stage's function returned, as operations; None if it is something else.

    Raises
    ------
    InvalidTypeError
        The stage enqueues, and this is nothing that can be waited for.
    """
    if returned is None:
        return ()
    if isinstance(returned, Operation):
        return (returned,)
    if isinstance(returned, Event):
        return (returned.operation,)
    if isinstance(returned, (list, tuple)) and all(isinstance(one, (Operation, Event)) for one in returned):
        if returned or not stage.awaits:
            return tuple(one.operation if isinstance(one, Event) else one for one in returned)
    if stage.awaits:
        return None
    if inspect.iscoroutine(returned):
        returned.close()  # or Python would warn that nobody awaited it
    cure = "declare it `async def`" if isinstance(returned, Awaitable) else "return what the stream's verb returned"
    raise InvalidTypeError(
        f"stage {stage.name!r} is a plain function and must return an operation, several of them, or None, "
        f"not {type(returned).__name__}: {cure}"
    )
