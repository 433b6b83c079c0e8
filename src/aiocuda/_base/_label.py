"""label: a context manager that names the operations which a task enqueues."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Final, ParamSpec, TypeVar

from ..errors import InvalidArgumentError, InvalidTypeError

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["LABEL", "MOST_SHOWN", "check_label", "label", "labelled", "printable", "shown"]

#: The label of the operations that a task enqueues, or None.
LABEL: Final[ContextVar[str | None]] = ContextVar("aiocuda_label", default=None)

#: Characters of a label that errors and log events show.
MOST_SHOWN: Final = 80


class _Label(contextlib.ContextDecorator):
    """What `label` returns."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_used = False
        self._tokens: list[Token[str | None]] = []

    def __enter__(self) -> None:
        self._is_used = True
        self._tokens.append(LABEL.set(self._text))

    def __exit__(self, *exc: object) -> None:
        LABEL.reset(self._tokens.pop())

    def _recreate_cm(self) -> _Label:  # a decorator enters another one for each call
        self._is_used = True
        return _Label(self._text)

    def __del__(self) -> None:
        if not self._is_used:
            text = shown(self._text)
            warnings.warn(f"label({text}) labels nothing: use `with aiocuda.label({text}):`", RuntimeWarning, 2)


def label(text: str) -> _Label:
    """Give a label to every operation that this task enqueues inside the block.

    Errors, log events, timelines, profiles, spans and listeners show it: see `Operation.label`. Tasks that are created
    in the block inherit the label, as they inherit all context variables. Blocks nest: the innermost label counts.

    ::

        with aiocuda.label("request-17"):
            result = await model(stream, image)

    Parameters
    ----------
    text
        Any text that is not empty. Outputs show at most its first part.
    """
    return _Label(check_label(text))


def labelled(text: str, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a method that enqueues, with a label for its operations."""
    token = LABEL.set(check_label(text))
    try:
        return method(*args, **kwargs)
    finally:
        LABEL.reset(token)


def check_label(text: Any) -> str:
    """Return the label. Raise an error if it is not a str, or empty."""
    if not isinstance(text, str):
        raise InvalidTypeError(f"a label is a str, not {type(text).__name__}: use label=str(…)")
    plain = str.__str__(text)  # a subclass, such as an enumeration, may have a `__repr__` that raises
    if not plain:
        raise InvalidArgumentError("a label must not be empty: leave label= out, or name the request or the job")
    return plain


def shown(text: str) -> str:
    """Return a label as messages show it: quoted, with escapes for control characters, at most 80 characters of it."""
    return repr(text) if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]!r}…"


def printable(text: str, most: int = MOST_SHOWN) -> str:
    """Return at most ``most`` characters of a text, with escapes for those that cannot be printed, and "…" for more."""
    return repr(text[:most])[1:-1] + ("…" if len(text) > most else "")
