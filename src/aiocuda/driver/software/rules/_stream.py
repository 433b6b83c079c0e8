"""Streams, their commands, events and engines: the objects that `Machine` works on.

A command passes through these states::

             it is first in its stream         an engine takes it        its time is over, or Machine.finish
    QUEUED ─────────────────────────────► READY ──────────────► RUNNING ────────────────────────────► DONE
    QUEUED ── it is first, takes no time, and the command that it waits for is done ────────────────► DONE

A command with an engine takes time. A command without one (record, wait, call, allocate, free) takes none.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

__all__ = ["Command", "Engine", "EngineKind", "Event", "Kind", "State", "Stream"]

Kind: TypeAlias = Literal[
    "upload", "download", "peer", "prefetch", "kernel", "copy", "fill", "record", "wait", "call", "allocate", "free"
]

EngineKind: TypeAlias = Literal["upload", "download", "compute"]


class State(enum.Enum):
    """The state of a command."""

    QUEUED = "queued"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"


class Command:
    """One operation of a stream.

    Attributes
    ----------
    seconds
        The time that the engine needs. None: `Machine.finish` ends the command.
    action
        Data for the driver. The machine stores it and does not look at it.
    after
        For a wait: the command that it waits for. It is an event's last record at the time when the wait was
        enqueued, or a node of a graph.
    started, ended
        When the command became RUNNING and DONE: seconds, by the clock of the driver.
    """

    __slots__ = (
        "_waiters",
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
    )

    def __init__(
        self,
        kind: Kind,
        stream: Stream,
        action: Any = None,
        engine: Engine | None = None,
        seconds: float | None = None,
        after: Command | None = None,
    ) -> None:
        self.kind: Kind = kind
        self.stream = stream
        self.action = action
        self.engine = engine
        self.seconds = seconds
        self.after = after
        self._waiters: list[Stream] | None = None  # streams whose first command waits for this command
        self.state = State.QUEUED
        self.done = False  # True if ``state is DONE``; a field of its own, because event queries read it
        self.order = 0  # of arrival at the engine
        self.started = 0.0
        self.ended = 0.0

    def make_ready(self, order: int) -> None:
        """It is the first of its stream, and arrives at its engine."""
        self.state = State.READY
        self.order = order

    def start(self, when: float) -> None:
        """Its engine takes it."""
        self.state = State.RUNNING
        self.started = when

    def end(self, when: float) -> Sequence[Stream]:
        """It is done. Return the streams whose first command waits for it."""
        self.ended = when
        self.state = State.DONE
        self.done = True
        self.after = None
        waiters, self._waiters = self._waiters, None
        return waiters or ()

    def add_waiter(self, stream: Stream) -> None:
        """The first command of a stream waits for the end of this command."""
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(stream)

    def take_action(self) -> Any:
        """Return the action, to which the command refers no longer: events may keep the command for long."""
        action, self.action = self.action, None
        return action

    def __repr__(self) -> str:
        return f"<{self.kind} {self.state.value} in stream {self.stream.handle}>"


class Stream:
    """A first-in-first-out queue of the unfinished commands of one device.

    The first command in ``queue`` is running, ready or next. Done commands are removed.
    """

    __slots__ = ("device", "exported", "handle", "is_default", "name", "priority", "queue")

    def __init__(self, handle: int, device: int, priority: int, is_default: bool = False) -> None:
        self.handle = handle
        self.device = device
        self.priority = priority  # a smaller number has precedence
        self.queue: deque[Command] = deque()
        self.name: int | None = None  # the handle that its owner uses; None for the default stream, which has no owner
        self.exported = False  # True once its handle was given out: the stream is then never destroyed
        self.is_default = is_default  # the default stream of its device; it may have several handles

    @property
    def is_idle(self) -> bool:
        """True if all work that the stream has accepted is done."""
        return not self.queue

    def lend(self, name: int) -> None:
        """It has a new owner, who uses this handle."""
        self.name = name

    def give_back(self) -> None:
        """Its owner has destroyed it."""
        self.name = None

    def export(self) -> None:
        """Its first handle is given out: never destroy the stream."""
        self.exported = True

    def __repr__(self) -> str:
        return f"<stream {self.handle} of device {self.device}, {len(self.queue)} queued>"


class Event:
    """An event: a reference to its last record command.

    A wait uses the value of ``last`` at the time when it is enqueued. A later record does not change that wait.
    """

    __slots__ = ("device", "handle", "last", "timing")

    def __init__(self, handle: int, device: int, timing: bool) -> None:
        self.handle = handle
        self.device = device
        self.timing = timing
        self.last: Command | None = None

    def record(self, command: Command) -> None:
        """Refer to a new record command."""
        self.last = command

    @property
    def is_done(self) -> bool:
        """True if the last record is done, or if the event was never recorded."""
        return self.last is None or self.last.done

    def __repr__(self) -> str:
        return f"<event {self.handle} of device {self.device}, {'done' if self.is_done else 'pending'}>"


class Engine:
    """An engine of one device. It runs at most ``slots`` commands simultaneously.

    A device has one copy engine for each direction, with one slot: two uploads run one after the other, an upload and
    a download overlap. The compute engine runs kernels, and also fills and copies within the device: these use the
    device's memory and not the bus, and on a GPU they are kernels, too.

    ``ready`` is sorted by priority (smallest number first), then by order of arrival.
    """

    __slots__ = ("device", "kind", "ready", "running", "slots")

    def __init__(self, kind: EngineKind, device: int, slots: int) -> None:
        self.kind = kind
        self.device = device
        self.slots = slots
        self.running = 0
        self.ready: list[Command] = []

    def start(self, index: int, when: float) -> Command:
        """Take a ready command, and return it."""
        command = self.ready.pop(index)
        self.running += 1
        command.start(when)
        return command

    def release(self) -> bool:
        """A command that ran has ended. Return True if another one may start."""
        self.running -= 1
        return bool(self.ready)

    def __repr__(self) -> str:
        return f"<{self.kind} engine of device {self.device}: {self.running} running, {len(self.ready)} ready>"
