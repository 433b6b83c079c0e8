"""Verbs about clocks, threads and descriptors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from ...errors import InvalidTypeError
from ..protocol._notify import Port
from ..software._model import NOTIFIERS, PRIORITIES
from ._core import Job, SimulatedCore, local

__all__ = ["Notify", "SimulatedNotifier", "SimulatedPort"]


class SimulatedPort:
    """A mailbox without a descriptor: it wakes its loop, which then drains.

    On a loop that is not simulated, each drain lets one thing happen, and asks for the next one.
    """

    def __init__(self, core: Notify, wake: Callable[[], None]) -> None:
        self._core = weakref.ref(core)  # ports outlive their drivers
        self._wake: Callable[[], None] | None = wake
        self._tags: list[int] = []
        self._nudged = False  # the loop has been told, and has not looked yet

    def fileno(self) -> None:
        """None: nothing is there to be watched."""

    def put(self, tag: int) -> None:
        """Leave a tag for the loop. A closed port swallows it."""
        if self._wake is not None:
            self._tags.append(tag)
            self.nudge()

    def nudge(self) -> None:
        """Have the loop look."""
        if self._wake is not None and not self._nudged:
            self._nudged = True
            self._wake()

    def drain(self) -> list[int]:
        """The tags that have come."""
        self._nudged = False
        core = self._core()
        if core is not None and not core.attached and core.happen():
            self.nudge()
        tags = []
        while self._tags:
            tags.append(self._tags.pop(0))
        return tags

    def close(self) -> None:
        """The loop has gone: swallow what still comes."""
        self._wake = None
        self._tags.clear()
        core = self._core()
        if core is not None:
            core.forget_port(self)


class SimulatedNotifier:
    """A side stream whose host function puts a tag into a port, some time later."""

    def __init__(self, core: Notify, device: int, port: SimulatedPort) -> None:
        self._core = core
        self._port = port
        self._side = core._machine.side_stream(device, PRIORITIES[1])

    def ring(self, event: int, tag: int) -> None:
        """Put ``tag`` into the port when ``event``'s last record is done."""
        core = self._core
        core._enter()
        with core._lock:
            core._machine.wait(self._side, core._machine.event(event))
            core._submit(self._side, "call", lambda: core._notify(self._port, tag))


class Notify(SimulatedCore):
    """`aiocuda.driver.protocol._notify.Notify` on the virtual time."""

    #: Queries move time, and nobody else needs the interpreter.
    polls_freely = True

    def now(self) -> float:
        """Seconds of virtual time."""
        return self.now_ns / 1e9

    def open_port(self, wake: Callable[[], None]) -> Port:
        """A port for one event loop. If that is a simulated one, the driver goes by its clock from now on."""
        if self._farewell is not None:
            raise self._farewell.again()
        self.adopt()
        port = SimulatedPort(self, wake)
        self._ports.append(port)
        return port

    def forget_port(self, port: SimulatedPort) -> None:
        """It has been closed."""
        if port in self._ports:
            self._ports.remove(port)

    def _progress(self) -> None:
        if not self.attached:
            for port in self._ports:
                port.nudge()

    def _notify(self, port: SimulatedPort, tag: int) -> None:
        """A notifier's host function."""
        times = 1
        delay = self.chance.wake()
        if self.upsets.due("lose") is not None:
            self._note("lose a notification")
            return
        late = self.upsets.due("delay")
        if late is not None:
            delay += round(late.seconds * 1e9)
        if self.upsets.due("repeat") is not None:
            times = 2
        for _ in range(times):
            self._at(delay, lambda: self._put(port, tag))

    def _put(self, port: SimulatedPort, tag: int) -> None:
        self._note("notify")
        self._in_callback = threading.get_ident()
        try:
            port.put(tag)
        finally:
            self._in_callback = 0

    def offload(self, work: Callable[[], object], port: Port, tag: int) -> None:
        """Run ``work`` later, then put ``tag`` into the port. Where no simulated loop runs, on a thread."""
        if self._farewell is not None:
            raise self._farewell.again()
        if not isinstance(port, SimulatedPort):
            raise InvalidTypeError(f"{port!r} is no port of this driver; take one from its open_port()")
        mailbox = port
        self.adopt()
        if self.attached:
            self._at(self.chance.job(), lambda: self._do(work, mailbox, tag))
        else:
            self._workers.submit(lambda: self._do_on_thread(work), mailbox, tag)

    def _do(self, work: Callable[[], object], port: SimulatedPort, tag: int) -> None:
        self._note("job")
        job = self._job = Job(lambda: self._at(self.chance.verb(), lambda: self._put(port, tag)))
        try:
            work()
        finally:
            self._job = None
            job.part_done()

    def _do_on_thread(self, work: Callable[[], object]) -> None:
        local.serves = self
        try:
            work()
        finally:
            del local.serves  # an idle thread keeps nothing alive

    def notifier_limit(self, device: int) -> int:
        """24, as on a GPU with 32 hardware queues."""
        self._device(device)
        return NOTIFIERS

    def notifier(self, device: int, port: Port) -> SimulatedNotifier:
        """A new notifier."""
        self._enter()
        self._device(device)
        if not isinstance(port, SimulatedPort):
            raise InvalidTypeError(f"{port!r} is no port of this driver; take one from its open_port()")
        return SimulatedNotifier(self, device, port)
