"""The transitions between the states of an operation."""

from __future__ import annotations

from .._core import State

__all__ = ["TRANSITIONS"]

#: All transitions.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STAGING, State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.STAGING: frozenset({State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.SUBMITTED: frozenset({State.LANDING, State.DONE, State.FAILED, State.ABANDONED}),
    State.LANDING: frozenset({State.DONE, State.FAILED, State.ABANDONED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: frozenset(),
}
