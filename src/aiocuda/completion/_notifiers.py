"""The CUDA events of a device on loan, and the notifiers of one event loop: free, armed, or quarantined.

`Budget` limits the notifiers of all loops of a device.

A notifier is a host function that the driver runs once after an event. It puts a *tag*, an integer, into the *port* of
the loop, which wakes the loop. The notifier is armed from `NotifierPool.arm` until *its own* tag has been read from the
port. If the operation is resolved earlier, for example by polling, the notifier stays armed, because the host function
is still in its side stream. Unknown tags are ignored.

To arm a notifier takes a *token* from the device's `Budget`, and the token goes back when the tag comes. A notifier
whose tag has not come in two passes of the watchdog after its event was seen done counts as a lost wake-up: its token
goes back, and it is *quarantined*, which means that it is not used until its tag comes. A host function of another
library may hold it up.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from .._core import Lease
from ..driver.protocol import Driver, Notifier
from ..errors import ClosedError
from ._waiting_calls import WaitingCalls

if TYPE_CHECKING:
    from .._core import Ring, StreamOperation
    from ._device_state import DeviceState
    from ._event_watch import EventWatch

__all__ = ["INDEX_SHIFT", "WATCHES", "ArmedNotifier", "Budget", "EventLeases", "NotifierPool"]

#: A tag is the index of the notifier, and below it a number that is unique in the process.
INDEX_SHIFT = 44
_sequence = itertools.count(1)

#: The `EventWatch` of each loop, driver and device that has one, by the ids of the first two and the index.
WATCHES: weakref.WeakValueDictionary[tuple[int, int, int], EventWatch] = weakref.WeakValueDictionary()


class EventLeases:
    """The events of one device, shared by all its loops.

    Taking and returning an event are single list operations, so threads need no lock. The number of events grows with
    the number of operations in flight, which is limited, and never shrinks while the device is open: an event takes
    0.4 µs to create and some hundred bytes.

    Attributes
    ----------
    plain : list of Lease
        The idle events without timing. `Ring.submit` takes from it directly.
    created : int
        The number of events created so far.
    """

    __slots__ = ("_closed", "_device", "_driver", "_timed", "created", "plain")

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self.plain: list[Lease] = []
        self._timed: list[Lease] = []
        self.created = 0
        self._closed = False

    def take(self, timing: bool = False) -> Lease:
        """Return an idle event; a new one if none is idle."""
        idle = self._timed if timing else self.plain
        try:
            return idle.pop()
        except IndexError:
            pass  # leave the handler: an error of the driver would get this one, with all its frames, as its context
        self.created += 1
        return Lease(self._driver.event_create(self._device, timing), timing, idle)

    def give(self, lease: Lease) -> None:
        """Give back an event. Device-side waits that are enqueued on it stay valid."""
        lease.generation += 1  # whoever still refers to the lease finds out that it was given back
        lease.home.append(lease)

    def give_late(self, lease: Lease) -> None:
        """Give back an event, and destroy it if the device has been closed: the program may have held it so long."""
        self.give(lease)
        if self._closed:
            with contextlib.suppress(ClosedError):  # the driver is closed, and has destroyed its events
                self.close()

    @property
    def idle(self) -> int:
        """The number of idle events."""
        return len(self.plain) + len(self._timed)

    def close(self) -> None:
        """Destroy the idle events. Those on loan stay, until `give_late` destroys them."""
        self._closed = True
        for idle in (self.plain, self._timed):
            while idle:
                lease = idle.pop()
                lease.word = 0  # its native handle: a wait of another device for the event finds that it is gone
                self._driver.event_destroy(lease.handle)


class ArmedNotifier:
    """A notifier from the moment it is armed until its tag has come.

    A query may find the end of its operation earlier. The reference to the operation is weak: a result must not live
    until a late tag comes. In a notifier of `EventWatch`, the operation is a wait, and the queue has no reactor.

    Attributes
    ----------
    id, context, label
        Of the operation.
    found_at : float
        The time at which a query has found the end of the operation, before the tag; infinite if none has.
    """

    __slots__ = ("_operation", "context", "found_at", "id", "index", "label", "queue", "silent_ticks", "token")

    def __init__(self, index: int, token: int, queue: Ring, operation: StreamOperation[Any]) -> None:
        self.index = index
        self.token: int | None = token
        self.queue = queue
        self._operation = weakref.ref(operation)
        self.id = operation.id
        self.context = operation.context
        self.label = operation.label
        self.silent_ticks = 0
        self.found_at = math.inf

    @property
    def operation(self) -> Any:
        """The operation; None if nothing holds it any more."""
        return self._operation()

    @property
    def is_settled(self) -> bool:
        """True if the device is known to have finished with the operation."""
        if self.queue.reactor is None:  # the wait may have been given up: only a query tells
            return self.found_at < math.inf
        operation = self._operation()
        return operation is None or operation.is_settled  # its queue holds it until it is settled


def _idle_pools(driver: Driver) -> dict[int, list[NotifierPool]]:
    """Return the pools of closed loops, by device. Notifiers are never destroyed, so the next loop takes them over.

    They are in the driver's own registry: a global table would keep the driver alive, because notifiers hold it.
    """
    pools: dict[int, list[NotifierPool]] = driver.registry.setdefault("idle notifier pools", {})
    return pools


class NotifierPool:
    """The notifiers of one port.

    Attributes
    ----------
    port : Port
    armed : dict of int to ArmedNotifier
        The armed notifiers, by tag.
    quarantined : dict of int to int
        The notifiers that are not used again until their tags come, by tag.
    """

    __slots__ = ("__weakref__", "_close", "_device", "_free", "_notifiers", "_wake", "armed", "port", "quarantined")

    def __init__(self, driver: Driver, device: int) -> None:
        self._device = device
        self._notifiers: list[Notifier] = []
        self._free: list[int] = []
        self.armed: dict[int, ArmedNotifier] = {}
        self.quarantined: dict[int, int] = {}
        self._wake: Callable[[], None] | None = None
        weak_self = weakref.ref(self)  # ports are never destroyed, and hold this function

        def wake() -> None:
            pool = weak_self()
            if pool is not None and pool._wake is not None:
                pool._wake()

        self.port = driver.open_port(wake)
        # The port closes with its driver, once: a second close would take the port away from its next user.
        self._close = weakref.finalize(self, self.port.close)
        self._close.atexit = False

    @classmethod
    def take(cls, driver: Driver, device: int, wake: Callable[[], None]) -> NotifierPool:
        """Return a pool for a new loop: one that a closed loop has given back, since ports stay, or a new one.

        ``wake`` is called by any thread when a tag comes, if the port has no descriptor.
        """
        idle = _idle_pools(driver).get(device)
        notifier_pool = idle.pop() if idle else cls(driver, device)
        notifier_pool._wake = wake
        return notifier_pool

    def give(self, driver: Driver, tokens: list[int]) -> None:
        """Make the pool available to the next loop. Armed notifiers stay armed, but their tokens go back now."""
        self._wake = None
        for armed in self.armed.values():
            if armed.token is not None:
                tokens.append(armed.token)
                armed.token = None
        _idle_pools(driver).setdefault(self._device, []).append(self)

    def forget_armed(self, tokens: list[int]) -> None:
        """Give back the tokens of armed notifiers, and forget these: after a device fault no tag comes.

        They are not free again, since no notifier is armed after a fault.
        """
        tokens += [armed.token for armed in self.armed.values() if armed.token is not None]
        self.armed.clear()

    @staticmethod
    def dismiss(driver: Driver) -> None:
        """Close the pools that no loop uses, before their driver is closed. The next loop gets their ports."""
        for pools in _idle_pools(driver).values():
            for pool in pools:
                pool._close()
        _idle_pools(driver).clear()

    def arm(
        self, driver: Driver, queue: Ring, operation: StreamOperation[Any], tokens: list[int]
    ) -> ArmedNotifier | None:
        """Arm a notifier for the operation's event. Return None if no token is left, or if there is no event."""
        lease = operation.lease
        if lease is None:
            return None
        try:
            token = tokens.pop()
        except IndexError:
            return None
        try:
            if not self._free:  # a new notifier, with its side stream: the creation may wait for running kernels
                run = WaitingCalls.of(driver).run
                self._notifiers.append(run("cuStreamCreateWithPriority", driver.notifier, self._device, self.port))
                self._free.append(len(self._notifiers) - 1)
            index = self._free.pop()
            tag = (index << INDEX_SHIFT) | next(_sequence)
            armed = self.armed[tag] = ArmedNotifier(index, token, queue, operation)
            try:
                self._notifiers[index].ring(lease.handle, tag)
            except BaseException:
                del self.armed[tag]
                self._free.append(index)
                raise
        except BaseException:
            tokens.append(token)
            raise
        return armed

    def disarm(self, tag: int, tokens: list[int]) -> ArmedNotifier | None:
        """Free the notifier whose tag has come, and give back its token. Return it.

        Return None for a quarantined notifier, which only becomes free, and for an unknown tag.
        """
        armed = self.armed.pop(tag, None)
        if armed is None:
            if tag in self.quarantined:
                self._free.append(self.quarantined.pop(tag))
        else:
            self._free.append(armed.index)
            if armed.token is not None:
                tokens.append(armed.token)
        return armed

    def tick(self, tokens: list[int]) -> list[ArmedNotifier]:
        """Quarantine and return the notifiers whose tags have not come in two passes of the watchdog after the event.

        Their tokens go back. Called in each pass of the watchdog.
        """
        lost: list[ArmedNotifier] = []
        for tag, armed in list(self.armed.items()):
            if not armed.is_settled:
                continue
            armed.silent_ticks += 1
            if armed.silent_ticks > 2:  # the first pass may be right after the event
                del self.armed[tag]
                self.quarantined[tag] = armed.index
                if armed.token is not None:
                    tokens.append(armed.token)
                lost.append(armed)
        return lost


class Budget:
    """The limits of a device that all its openings share.

    Attributes
    ----------
    tokens : list of int
        One for each notifier that may still be armed. With more in all, streams would share hardware queues with
        notifiers (measured: 24 armed of 32 queues keep 128 streams at 32 ms, 32 armed cost 41 ms).
    streams : int
        The number of streams of all openings.
    default_streams : int
        The number of `Stream` objects that represent the device's default stream, which is one.
    device_states : dict of weak references
        The openings. Each reference removes itself when its opening is collected.
    """

    __slots__ = ("default_streams", "device_states", "streams", "tokens")

    def __init__(self, notifiers: int) -> None:
        self.tokens = list(range(notifiers))
        self.streams = 0
        self.default_streams = 0
        self.device_states: dict[weakref.ref[DeviceState], None] = {}

    @classmethod
    def of(cls, driver: Driver, device: int) -> Budget:
        """Return the budget of a device. The first call makes it."""
        key = ("budget", device)
        known = driver.registry.get(key)
        if known is None:
            known = driver.registry.setdefault(key, cls(driver.notifier_limit(device)))
        return cast("Budget", known)
