"""One entry of a stream.

::

             it is the head of its stream      the engine takes it      its time is over, or finish()
    QUEUED ─────────────────────────────► READY ──────────────► RUNNING ────────────────────────────► DONE
    QUEUED ── head, takes no time, and what it waits for is done ───────────────────────────────────► DONE

A command with an engine takes time. One without (record, wait, call, allocate, free) takes none: it ends in the step in
which it reaches the head of its stream and what it waits for is done.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from ._engine import Engine
    from ._stream import Stream

__all__ = ["Command", "Kind", "State"]

Kind: TypeAlias = Literal[
    "upload", "download", "peer", "prefetch", "kernel", "copy", "fill", "record", "wait", "call", "allocate", "free"
]


class State(enum.Enum):
    """Where a command is on its way."""

    QUEUED = "queued"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"


class Command:
    """What a stream does at one place of its order.

    Attributes
    ----------
    seconds
        How long the engine needs; None is ended from outside, by `Machine.finish`.
    action
        Whatever the driver wants done. The machine carries it and never looks at it.
    after
        What a wait waits for: a record, as it was when the wait was enqueued, or a node of a graph.
    started, ended
        When it became RUNNING and DONE: seconds, by the clock of whoever drives the machine.
    """

    __slots__ = (
        "action",
        "after",
        "done",
        "ended",
        "engine",
        "kind",
        "order",
        "seconds",
        "started",
        "state",
        "stream",
        "waiters",
    )

    def __init__(self, kind: Kind, stream: Stream, action: Any, engine: Engine | None, seconds: float | None) -> None:
        self.kind: Kind = kind
        self.stream = stream
        self.action = action
        self.engine = engine
        self.seconds = seconds
        self.after: Command | None = None
        self.waiters: list[Stream] | None = None  # streams whose head waits for this command
        self.state = State.QUEUED
        self.done = False  # ``state is DONE``, kept apart: an event query reads this and nothing else
        self.order = 0  # of arrival at the engine
        self.started = 0.0
        self.ended = 0.0

    def __repr__(self) -> str:
        return f"<{self.kind} {self.state.value} in stream {self.stream.handle}>"
