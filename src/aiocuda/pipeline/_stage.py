"""Stage: one step of a pipeline, as a function of a slot."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, TypeAlias

from .._base._checks import check_integer, check_timeout, is_coroutine_function, is_function, several
from .._base._mistakes import keywords, refuses
from ..completion import Operation
from ..device import Event
from ..errors import InvalidArgumentError, InvalidTypeError
from ..lowlevel import State, StreamOperation
from ..memory import DeviceBuffer
from ._slot import Slot

__all__ = ["OnError", "Stage", "operations_of", "results_of"]

#: What a run does with an item for which a stage raises: see `Stage`.
OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Exception, Any], object]


@refuses(__call__="is not called: a pipeline calls its function, Pipeline(device, [stage, …])")
class Stage:
    """A named step that every item goes through.

    Parameters
    ----------
    name
        The name in statistics, errors and timelines, and of the stage's stream.
    function
        A function of the `Slot`. A plain function *enqueues*: it enqueues work on ``slot.stream`` and returns its
        operation, several operations, or None. The pipeline calls it ahead of time, and the device orders its work
        after that of the prerequisites. Operations of another event loop or another driver are refused. A coroutine
        function *awaits*: files, sockets, host work. It starts when the stages before it are done, for ``concurrency``
        items at a time. A `Launch` enqueues a kernel.
    after
        Names of the stages, earlier in the list, that are the prerequisites; several are a join. None means the stage
        before it in the list. ``()`` means no prerequisite: the stage begins with the item. Two stages with the same
        prerequisite are a fork: they run side by side, on the device and on the host.
    prepare
        A function of the slot, called on the host for every item, directly before ``function``. It writes into the
        slot's pinned memory the data that the stage's work reads there. In a pipeline that replays, ``function`` is
        called once for each slot only, and ``prepare`` provides the data of each item.
    concurrency
        The number of items that a stage that awaits works on at the same time. They begin in order, and go on to the
        next stage in order. More than the pipeline's ``depth`` has no effect.
    timeout
        Seconds for one item in a stage that awaits; then its coroutine is cancelled, and the item fails with a
        `TimeoutError`. None is no limit.
    on_error
        What a run does if a stage that awaits raises an `Exception`. ``"raise"`` ends the run with it. ``"skip"`` goes
        on without the item: no later stage gets it, and the run yields nothing for it. A function is called with the
        exception and the slot's item, and then the item is skipped; if the function raises, the run ends with that. Its
        result is ignored. `PipelineStats.skipped` counts these items. A `DeviceFault` always ends the run.
        `Pipeline.execute_iteration` raises the exception in all cases.

    Attributes
    ----------
    name : str
    function : callable
    after : tuple of str or None
    awaits : bool
        True if ``function`` is a coroutine function.
    prepare : callable or None
    concurrency : int
    timeout : float or None
    on_error : str or callable

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        An empty name; a function that is not callable; an object in ``after`` that is no name; ``prepare`` is a
        coroutine function, or is given for a stage that awaits, which needs none; ``concurrency``, ``timeout`` or
        ``on_error`` out of range, or given for a stage that enqueues.

    Examples
    --------
    >>> Stage("compute", lambda slot: slot.stream.launch(kernel, 8, 256, slot.buffer("x", 2048)))
    <Stage compute, enqueues>
    """

    __slots__ = ("after", "awaits", "concurrency", "function", "name", "on_error", "prepare", "timeout")

    @keywords(
        "Stage takes a name, a function, after=, prepare=, concurrency=, timeout= and on_error=",
        "a stage has two positional arguments: Stage('up', up)",
        **dict.fromkeys(("workers", "num_workers", "max_concurrency"), "use concurrency="),
        depth="Pipeline(device, stages, depth=3) takes it",
        stream="slot.stream is the stage's stream",
    )
    def __init__(
        self,
        name: str,
        function: Callable[[Slot], Any],
        *,
        after: str | Iterable[str] | None = None,
        prepare: Callable[[Slot], object] | None = None,
        concurrency: int = 1,
        timeout: float | None = None,
        on_error: OnError = "raise",
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
        check_integer(concurrency, "concurrency")
        if concurrency < 1:
            raise InvalidArgumentError(f"concurrency is at least 1, not {concurrency}", concurrency=concurrency)
        self.concurrency = int(concurrency)
        self.timeout = check_timeout(timeout)
        self.on_error = check_on_error(on_error)
        if not self.awaits and (self.concurrency > 1 or timeout is not None or on_error != "raise"):
            raise InvalidArgumentError(
                f"{self!r} enqueues, and the device works on its items: concurrency=, timeout= and on_error= belong to "
                "stages that await; declare the function `async def`, or give these to the stage before it"
            )

    def __repr__(self) -> str:
        return f"<Stage {self.name}, {'awaits' if self.awaits else 'enqueues'}>"


def check_on_error(on_error: OnError) -> OnError:
    """Return the argument, or raise unless it is "raise", "skip" or a plain function of two arguments."""
    kinds = "on_error is 'raise', 'skip' or a function"
    if isinstance(on_error, str):
        if on_error not in ("raise", "skip"):
            raise InvalidArgumentError(f"{kinds}, not {on_error!r}")
        return on_error
    function: Any = on_error
    if not is_function(function) or (isinstance(function, type) and issubclass(function, BaseException)):
        cure = ": a function of the exception and the item, which raises what it does not skip"
        raise InvalidTypeError(f"{kinds}, not {on_error!r}{cure if isinstance(function, (type, tuple)) else ''}")
    if is_coroutine_function(function):
        raise InvalidTypeError("on_error is called where nothing can be awaited: pass a plain function")
    with contextlib.suppress(ValueError):  # a function in C without a signature
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise InvalidTypeError(f"on_error is called with the exception and the item: {error}") from None
    return on_error


def _checked(stage: Stage, prepare: Callable[[Slot], object] | None) -> Callable[[Slot], object] | None:
    if prepare is None:
        return None
    if not is_function(prepare):
        raise InvalidTypeError(f"{stage!r}: prepare is a function of a slot, not {type(prepare).__name__}")
    if stage.awaits:
        raise InvalidArgumentError(f"{stage!r} needs no prepare=: its own function can do that work")
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


def _recorded(event: Event) -> StreamOperation[Any]:
    """Return the operation that has recorded an event."""
    operation = event.operation
    assert isinstance(operation, StreamOperation)  # all operations of streams are
    return operation


def operations_of(stage: Stage, returned: Any) -> tuple[StreamOperation[Any], ...] | None:
    """Return the operations that a stage's function returned; None if it returned something else.

    Raises
    ------
    InvalidTypeError
        The stage enqueues, and the returned object cannot be waited for.
    """
    if returned is None:
        return ()
    if isinstance(returned, StreamOperation):
        return (returned,)
    if isinstance(returned, Event):
        return (_recorded(returned),)
    if isinstance(returned, (list, tuple)) and all(isinstance(one, (StreamOperation, Event)) for one in returned):
        if returned or not stage.awaits:
            return tuple(_recorded(one) if isinstance(one, Event) else one for one in returned)
    if stage.awaits:
        return None
    if inspect.iscoroutine(returned):
        returned.close()  # so that Python does not warn of a coroutine that was never awaited
    cure = "declare it `async def`" if isinstance(returned, Awaitable) else "return what the stream's method returned"
    raise InvalidTypeError(
        f"stage {stage.name!r} is a plain function and must return an operation, several of them, or None, "
        f"not {type(returned).__name__}: {cure}"
    )


def results_of(stage: Stage, returned: Any) -> Any:
    """Return what a stage returned, with results for operations.

    Raises
    ------
    BusyError
        An operation that is no upload has not finished.
    """
    if isinstance(returned, (Operation, Event)):
        return _result_of(returned)
    if isinstance(returned, (list, tuple)) and operations_of(stage, returned):
        return [_result_of(one) for one in returned]
    return returned


def _result_of(one: Operation[Any] | Event) -> Any:
    """Return the result of an operation. The buffer of an upload exists from the enqueueing on."""
    if isinstance(one, StreamOperation) and one.kind == "upload" and one.status < State.DONE:
        if isinstance(one.value, DeviceBuffer):
            return one.value
    return one.result()
