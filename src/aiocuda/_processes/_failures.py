"""Failure: an exception of another process, in a form that can be sent."""

from __future__ import annotations

import contextlib
import traceback
from typing import NamedTuple

from ._messages import pickled, unpickled

__all__ = ["Failure", "failure_from", "text_of"]


class Failure(NamedTuple):
    """An exception of another process."""

    pickled: bytes | None  #: the exception itself; None if it cannot be pickled
    text: str
    trace: str

    def load(self) -> BaseException | None:
        """Return the exception; None if it cannot be pickled, or not be loaded in this process."""
        if self.pickled is None:
            return None
        with contextlib.suppress(Exception):
            loaded = unpickled(self.pickled)
            if isinstance(loaded, BaseException):
                return loaded
        return None


def failure_from(error: BaseException) -> Failure:
    """Return an exception in a form that another process can read."""
    data: bytes | None = None
    text = trace = text_of(error)
    # Methods of the exception's class may raise anything, and the other process waits for the failure.
    with contextlib.suppress(BaseException):
        candidate = pickled(error, None).data
        if type(unpickled(candidate)) is type(error):
            data = candidate
    with contextlib.suppress(BaseException):
        trace = "".join(traceback.format_exception(error)).rstrip()
    return Failure(data, text, trace)


def text_of(error: BaseException) -> str:
    """Return the type and the message of an exception."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - code of the exception's class
        return type(error).__name__
