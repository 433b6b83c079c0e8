"""The errors of `aiocuda.serving`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .._base._mistakes import lacks
from ..errors import AiocudaError, QueueFullError

__all__ = ["BatchError", "OverloadedError", "copy_of"]


@lacks
class OverloadedError(QueueFullError):
    """The queue of a `MicroBatcher` is full. The request was not accepted: try again after ``retry_after_s``."""

    __module__ = "aiocuda.serving"  # the public name, for tracebacks and logs

    retry_after_s: float  #: predicted seconds until the present queue is served, in full batches
    queued: int  #: requests that wait


class BatchError(AiocudaError, RuntimeError):
    """The function of a `MicroBatcher` returned the wrong number of results, or its exception cannot be copied.

    It is also raised if a result holds memory that a graph of the program uses, inside of an object that is not copied.
    All requests of the batch get this error. ``__cause__`` is the function's exception, if there is one. A request
    gets it alone if its result has a part in the slot's memory that cannot be copied.
    """

    __module__ = "aiocuda.serving"


def copy_of(error: BaseException) -> BaseException:
    """Return an equal exception of the same type with the original as its cause; a `BatchError` if that fails.

    Each request of a batch gets an object of its own: to raise one object several times would mix the tracebacks.
    """
    try:
        twin = error.again() if isinstance(error, AiocudaError) else _made_again(error)
        if type(twin) is not type(error) or twin is error:
            raise TypeError("not a copy")
        twin.__dict__ = dict(error.__dict__)
        twin.args = error.args  # an `__init__` that formats its argument has formatted the text of the original
        for name in _slots(error):
            setattr(twin, name, getattr(error, name))
        if hasattr(twin, "__notes__"):
            twin.__notes__ = list(twin.__notes__)
        twin.__cause__ = error  # an exception that is a frozen dataclass refuses it
        return twin
    except BaseException:  # noqa: BLE001 - code of the program's class; the request must get an outcome
        twin = BatchError(f"the function of the batch raised {_text(error)}, which cannot be copied")
    twin.__cause__ = error
    return twin


def _made_again(error: BaseException) -> BaseException:
    """Return a copy that the class of the exception makes, as `copy.copy` does.

    `copy.copy` looks into the registry of `copyreg` first. There tblib, which Dask imports, registers a function that
    skips ``__init__``: whether an exception can be copied must not depend on the import of Dask.
    """
    own: Callable[[BaseException], BaseException] | None = getattr(type(error), "__copy__", None)
    if own is not None:
        return own(error)
    reduced: Any = error.__reduce_ex__(4)
    make, arguments, *state = reduced
    twin: BaseException = make(*arguments)
    if state and state[0]:
        twin.__setstate__(state[0])
    return twin


def _slots(error: BaseException) -> Iterator[str]:
    """Yield the slots of an exception that are set. A copy of an exception has its ``__dict__`` only."""
    for each in type(error).__mro__:
        slots = each.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{each.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            if mangled not in ("__dict__", "__weakref__") and hasattr(error, mangled):
                yield mangled


def _text(error: BaseException) -> str:
    try:
        return repr(error)
    except BaseException:  # noqa: BLE001 - code of the program's class
        return type(error).__name__
