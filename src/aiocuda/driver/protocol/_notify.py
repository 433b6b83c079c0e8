"""Time and notification: the three seams, and the notifiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Port(Protocol):
    """Where one event loop hears of things. Immortal: a port whose loop has gone serves the next one."""

    def fileno(self) -> int | None:
        """Readable whenever there is a tag. None where a loop cannot watch descriptors: see `Notify.open_port`."""

    def drain(self) -> list[int]:
        """The tags that have come, in order. Never blocks."""

    def close(self) -> None:
        """The loop has gone: keep quiet, swallow what still comes, and be ready for the next one."""


class Notifier(Protocol):
    """Tells one port, at most once at a time, that an event is done. Immortal.

    A notifier is {side stream, port, tag}. It is armed from `ring` until *its own* tag has been drained; ringing it in
    between is the caller's mistake.
    """

    def ring(self, event: int, tag: int) -> None:
        """Put ``tag`` (63 bits) into the port when ``event``'s last record is done.

        ``cuStreamWaitEvent`` and ``cuLaunchHostFunc`` on a side stream. No Python runs on a driver's thread. After
        a fault the tag may never come.
        """


class Notify(Protocol):
    """Verbs about clocks, threads and descriptors."""

    @property
    def polls_freely(self) -> bool:
        """Does asking for events cost the device nothing?

        Not where the device is threads of this process: a loop that polls takes the GIL from them.
        """

    def now(self) -> float:
        """Seconds, monotonic."""

    def open_port(self, wake: Callable[[], None]) -> Port:
        """A port for one event loop. ``wake`` is called, from any thread, where ``fileno()`` is None."""

    def offload(self, work: Callable[[], object], port: Port, tag: int) -> None:
        """Run ``work`` where it may block; then put ``tag`` into the port. ``work`` must not raise.

        Daemon threads of our own, never the loop's executor. Starts in order; several run at once.
        """

    def notifier_limit(self, device: int) -> int:
        """How many notifiers may be armed at once on a device; 0 where there are none."""

    def notifier(self, device: int, port: Port) -> Notifier:
        """A new notifier."""
