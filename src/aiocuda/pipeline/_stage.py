"""Stage: one step of a pipeline, as a function of a slot."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from .._checks import is_coroutine_function, is_function, several
from .._event import Event
from ..completion._operation import Operation
from ..errors import InvalidArgumentError, InvalidTypeError
from ._slot import Slot

__all__ = ["Stage", "operations_of", "results_of"]


class Stage:
    """A named step that every item goes through.

    Parameters
    ----------
    name
        How it shows in statistics, errors and timelines; its stream bears it too.
    function
        Called with the `Slot`. A plain function *enqueues*: it gives work to ``slot.stream`` and returns its operation,
        several of them, or None; the pipeline calls it ahead of time and orders it behind the stage before, on the
        device. Operations of another event loop or another driver are refused. A coroutine function *awaits*: files,
        sockets, host work; it starts when all that the slot was given before is done, one item after the other. A
        `Launch` enqueues a kernel.
    after
        Names of earlier stages that this one comes behind; several are a join. None is the stage before it in the
        list, and ``()`` is no stage: it begins with the item. Two stages behind the same one are a fork: on the device,
        and on the host, they go on side by side.
    prepare
        Called with the slot for every item, right before ``function``, on the host: puts into the slot's pinned memory
        what the stage's work reads there. In a pipeline that replays, ``function`` is called once for each slot, and
        this is where the next item comes in.

    Attributes
    ----------
    name : str
    function : callable
    after : tuple of str or None
    awaits : bool
        Is it a coroutine function?
    prepare : callable or None

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        No name, nothing to call, or something in ``after`` that is no name; ``prepare`` is a coroutine function, or the
        stage itself is one, which prepares for itself.

    Examples
    --------
    >>> Stage("compute", lambda slot: slot.stream.launch(kernel, 8, 256, slot.buffer("x", 2048)))
    <Stage compute, enqueues>
    """

    __slots__ = ("after", "awaits", "function", "name", "prepare")

    def __init__(
        self,
        name: str,
        function: Callable[[Slot], Any],
        *,
        after: str | Iterable[str] | None = None,
        prepare: Callable[[Slot], object] | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise InvalidTypeError(f"a stage has a string as its name, not {name!r}")
        if not name:
            raise InvalidArgumentError("a stage's name must not be empty: it is what errors and statistics show")
        if not is_function(function):
            raise InvalidTypeError(f"stage {name!r} needs a function of a slot, not {type(function).__name__}")
        self.name = name
        self.function = function
        self.after = None if after is None else _names(name, after)
        self.awaits = is_coroutine_function(function)
        self.prepare = _checked(self, prepare)

    def __repr__(self) -> str:
        return f"<Stage {self.name}, {'awaits' if self.awaits else 'enqueues'}>"


def _checked(stage: Stage, prepare: Callable[[Slot], object] | None) -> Callable[[Slot], object] | None:
    if prepare is None:
        return None
    if not is_function(prepare):
        raise InvalidTypeError(f"{stage!r}: prepare is a function of a slot, not {type(prepare).__name__}")
    if stage.awaits:
        raise InvalidArgumentError(f"{stage!r} needs no prepare=: what that would do, its own function can")
    if is_coroutine_function(prepare):
        raise InvalidArgumentError(
            f"{stage!r}: prepare is called while the stage is enqueued, and can await nothing: make it a stage"
        )
    return prepare


def _names(stage: str, after: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(after, str):
        return (after,)
    names = tuple(several(after, f"stage {stage!r}: after is a sequence of stages' names"))
    if not all(isinstance(name, str) for name in names):
        raise InvalidTypeError(f"stage {stage!r}: after is a sequence of stages' names, not {after!r}")
    return names


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


def results_of(stage: Stage, returned: Any) -> Any:
    """What a stage returned, operations replaced by their results.

    Raises
    ------
    BusyError
        One of them has not finished.
    """
    if isinstance(returned, (Operation, Event)):
        return returned.result()
    if isinstance(returned, (list, tuple)) and operations_of(stage, returned):
        return [one.result() for one in returned]
    return returned
