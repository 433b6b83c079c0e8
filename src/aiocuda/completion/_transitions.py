"""The transitions between the states of an operation, and a check of arguments."""

from __future__ import annotations

from .._core import Operation, State
from ..errors import InvalidTypeError

__all__ = ["TRANSITIONS", "check_awaited"]

#: The states that can follow each state.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STAGING, State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.STAGING: frozenset({State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.SUBMITTED: frozenset({State.LANDING, State.DONE, State.FAILED, State.ABANDONED}),
    State.LANDING: frozenset({State.DONE, State.FAILED, State.ABANDONED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: frozenset(),
}


def check_awaited(thing: object, role: str) -> None:
    """Raise `InvalidTypeError` if an operation was passed instead of its result."""
    if isinstance(thing, Operation):
        raise InvalidTypeError(
            f"{role} is an Operation: await it first, and pass its result. It is {thing!r}"
        ) from None
