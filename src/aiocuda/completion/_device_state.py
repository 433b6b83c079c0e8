"""DeviceState: the state that the event loops of one opened device share, with its predictions and unseen failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from .._base._shared import COUNTING
from .._base._types import DeviceProperties, Priority
from .._base._wrong_loop import wrong_loop
from .._core import DeviceHot, Estimate, StreamOperation
from ..driver.protocol import Driver
from ..errors import AiocudaError, BusyError, ClosedError, ForkedProcessError
from ._listeners import Listeners, Listening
from ._notifiers import Budget, EventLeases, NotifierPool
from ._submission import submitting
from ._wait_rule import CompletionPolicy
from ._waiting_calls import WaitingCalls

if TYPE_CHECKING:
    from .._base._failure import Poison
    from .._core import Ring

__all__ = ["DeviceState", "Predictor", "UnseenFailure"]

#: Held while the listeners of a device are replaced. One lock for all devices: that is rare, and takes no time. A
#: finaliser may remove a listener in the thread that holds it.
_LISTENING = threading.RLock()

#: Packages that can capture a stream into a graph in GLOBAL or THREAD_LOCAL mode.
CAPTURERS = ("torch", "cupy", "numba", "jax", "tensorflow", "cuda.core", "cuda.bindings")

#: Entries of one hardware queue that operations may use. The 1 021st blocks its caller (measured).
QUEUE_ENTRIES = 900

#: The number of cross-device uses from which closed ones are removed.
MANY_CROSS_DEVICE_USES = 8

#: The most estimates of one device that are kept; the oldest is removed first.
MOST_KEYS = 1024


class UnseenFailure:
    """The failure of a stream, or of the streams of a device that have ended, until code of the program has seen it.

    Parameters
    ----------
    of_device
        The `UnseenFailure` of the stream's device, which gets the failure when the stream ends. None in the object of a
        device itself.
    """

    __slots__ = ("_of_device", "_poison")

    def __init__(self, of_device: UnseenFailure | None = None) -> None:
        self._of_device = of_device
        self._poison: Poison | None = None

    def note(self, poison: Poison) -> None:
        """Keep a failure for the end of a block, unless an earlier one is unseen."""
        if self._poison is None or not self._poison.is_unseen:
            self._poison = poison

    def forget_seen(self) -> None:
        """Drop a failure that code of the program has seen: its traceback holds the objects that this code has used."""
        if self._poison is not None and not self._poison.is_unseen:
            self._poison = None
        if self._of_device is not None:
            self._of_device.forget_seen()

    def pass_on(self) -> None:
        """Let the end of the device's block raise an unseen failure, too: the stream has ended."""
        if self._of_device is not None and self._poison is not None and self._poison.is_unseen:
            self._of_device.note(self._poison)

    def take(self) -> Poison | None:
        """Return the failure if no code of the program has seen it, and forget it."""
        poison, self._poison = self._poison, None
        return poison if poison is not None and poison.is_unseen else None

    def raise_it(self) -> None:
        """Raise the failure that no code of the program has seen, if there is one: at the normal end of a block."""
        poison = self.take()
        if poison is not None:
            if self._of_device is not None and self._of_device._poison is poison:
                self._of_device.take()
            poison.deliver()


class Predictor:
    """The estimates of how long operations take, by kind, kernel or size class, and grid."""

    __slots__ = ("_estimates",)

    def __init__(self) -> None:
        self._estimates: OrderedDict[Hashable, Estimate] = OrderedDict()

    def estimate(self, key: Hashable, kernel: str | None = None) -> Estimate:
        """Return the estimate for a key; if there is none, a new one. ``kernel``: the kernel's name, for a launch."""
        found = self._estimates.get(key)
        if found is None:
            found = self._estimates[key] = Estimate(kernel)
            if len(self._estimates) > MOST_KEYS:
                self._estimates.popitem(last=False)
        return found


class DeviceState:
    """The event leases, predictions and submission limit of one opened device.

    State that threads share is changed by single list or integer operations.

    Attributes
    ----------
    driver : Driver
    hot : DeviceHot
        What the core reads for each operation.
    device : int
        The index of the device.
    device_count : int
    properties : DeviceProperties
    advises : bool
        True if slow ways to use the device are reported by a `PerformanceWarning`.
    asynchronous : bool
        If False, all streams are the device's default stream, and no notifier is used.
    policy : CompletionPolicy
    max_in_flight : int
        The user's limit for each stream.
    leases : EventLeases
    predictor : Predictor
    cross_device_uses : dict
        The streams of other opened devices that may use memory of this one, each with None. Once `closing`, each with
        its last operation at that moment.
    tokens : list of int
        One entry for each notifier that may still be armed; empty if not ``asynchronous``.
    budget : Budget
        The limits that all openings of the device share.
    streams : int
        The streams of this opening.
    unseen : UnseenFailure
        A failure of a stream that has ended, until code of the program has seen it.
    process : int
        The process that has opened the device.
    closing : bool
    """

    __slots__ = ("__weakref__", "advises", "asynchronous", "budget", "closing", "cross_device_uses", "device",
                 "device_count", "driver", "hot", "leases", "max_in_flight", "policy", "predictor", "process",
                 "properties", "streams", "tokens", "unseen")  # fmt: skip

    def __init__(
        self,
        driver: Driver,
        device: int,
        properties: DeviceProperties,
        policy: CompletionPolicy,
        max_in_flight: int,
        asynchronous: bool = True,
    ) -> None:
        self.policy = policy if driver.polls_freely else policy.parking()  # without polls, which would slow it down
        self.driver = driver
        self.leases = EventLeases(driver, device)
        limit = min(max_in_flight, QUEUE_ENTRIES)  # until `_share` sets it
        self.hot = DeviceHot(limit, self.policy.linger, self.leases.plain)
        self.asynchronous = asynchronous
        self.advises = False
        self.device = device
        self.device_count = driver.device_count()  # it does not change
        self.properties = properties
        self.max_in_flight = max_in_flight
        self.predictor = Predictor()
        self.cross_device_uses: dict[Ring, StreamOperation[Any] | None] = {}
        self.closing = False
        self.process = os.getpid()
        self.budget = Budget.of(driver, device)
        self.budget.device_states[weakref.ref(self, self.budget.device_states.pop)] = None
        self.tokens = self.budget.tokens if asynchronous else []  # without a notifier, a timer queries
        self.streams = 0
        self.unseen = UnseenFailure()
        self._share()

    def check_process(self) -> None:
        """Raise in a forked child."""
        if os.getpid() != self.process:
            raise self._forked()

    def _forked(self) -> ForkedProcessError:
        return ForkedProcessError(
            f"{self.properties.name} was opened before fork(), and CUDA does not survive that: open it in the child, "
            "or start the child by spawn"
        )

    def wrong_loop(
        self, loop: asyncio.AbstractEventLoop | None, what: str, cure: str, process: int | None = None
    ) -> AiocudaError:
        """Return the error for the use of ``what`` outside of its loop. In a forked child, no loop of the parent runs.

        A function of `Stream.submit` runs without a running loop; there it is a `BusyError`.

        Parameters
        ----------
        loop
            The loop of ``what``; None if it has none yet.
        cure
            The end of the message: what the program should do instead.
        process
            Ignored: ``what`` belongs to the process of the device. `Scope` calls this like the function `wrong_loop`.
        """
        if os.getpid() != self.process:
            return self._forked()
        is_open = loop is None or not loop.is_closed()
        if is_open and asyncio._get_running_loop() is None and submitting.loop is not None:
            return BusyError(
                f"{what} was used inside a function of Stream.submit, which only enqueues work of another library: "
                "call aiocuda before or after stream.submit(function)"
            )
        return wrong_loop(loop, what, cure)

    def add_listener(self, listener: object) -> None:
        """Begin to call the listener's hooks. Raise `BusyError` if it listens already."""
        listening = Listening.of(listener)
        with _LISTENING:
            while True:
                present = self.hot.listeners
                if present is not None and listener in present:
                    raise BusyError(f"{listener!r} listens to {self.properties.name} already: leave its block first")
                changed = Listeners([listening]) if present is None else present.with_one(listening)
                if self.hot.listeners is present:  # else repeat: the collector has run, and closed a block of `listen`
                    self.hot.listeners = changed
                    return

    def remove_listener(self, listener: object) -> bool:
        """Stop calling the listener's hooks. Return False if it does not listen."""
        with _LISTENING:
            while True:
                present = self.hot.listeners
                if present is None or listener not in present:
                    return False
                changed = present.without(listener)
                if self.hot.listeners is present:  # else repeat, as in `add_listener`
                    self.hot.listeners = changed
                    return True

    def look_for_others(self) -> None:
        """Guard queries from now on if a package that captures streams is loaded: a query could make a capture fail."""
        self.hot.guarded = self.hot.guarded or not sys.modules.keys().isdisjoint(CAPTURERS)

    def note_cross_device_use(self, queue: Ring) -> None:
        """Keep this device open for a stream of another opened device, which is about to use memory of this one."""
        if len(self.cross_device_uses) >= MANY_CROSS_DEVICE_USES:
            for other in list(self.cross_device_uses):
                if other.closed and other.idle:
                    self.cross_device_uses.pop(other, None)
        self.cross_device_uses[queue] = None

    def end_cross_device_uses(self) -> None:
        """Begin to end the cross-device uses: the device is being closed, and waits for the last operation of each."""
        if not self.closing:
            self.closing = True
            self.cross_device_uses = {queue: queue.tail() for queue in list(self.cross_device_uses)}

    async def settle(self) -> None:
        """Wait until the cross-device uses by streams of the running loop have ended."""
        here = asyncio.get_running_loop()
        for queue, newest in list(self.cross_device_uses.items()):
            if newest is not None and queue.loop is here:
                with contextlib.suppress(ClosedError):  # its device was closed: `is_used_by_others` queries the driver
                    await newest.settle()

    def is_used_by_others(self) -> bool:
        """Return whether a stream of another opened device may still use memory of this one.

        The driver is queried for a stream that no reactor watches any more.
        """
        for queue, newest in list(self.cross_device_uses.items()):
            if newest is not None and not newest.is_settled:
                watched = queue.loop.is_running() and not queue.reactor.closed
                if watched or not queue.rare.has_device_finished():
                    return True
        return False

    def dismiss(self) -> None:
        """Close the idle notifiers of the driver, which is about to be closed."""
        NotifierPool.dismiss(self.driver)

    def make_stream(self, priority: Priority | None = None) -> int:
        """Return a new stream of the driver; the default stream, which has no priority, if not ``asynchronous``."""
        if not self.asynchronous:
            return self.driver.stream_default(self.device)
        level = 0  # for a stream that only frees memory
        if priority is not None:
            least, greatest = self.driver.priority_range(self.device)
            level = {"high": greatest, "low": least, "normal": int((least + greatest) / 2)}[priority]
        create = self.driver.stream_create
        return WaitingCalls.of(self.driver).run("cuStreamCreateWithPriority", create, self.device, level)

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream of the driver. One that another library has made is only forgotten."""
        WaitingCalls.of(self.driver).run("cuStreamDestroy", self.driver.stream_destroy, stream)

    def stream_opened(self, count: int) -> None:
        """Count new streams, or closed ones by a negative number. The limit of each stream of the device changes."""
        with COUNTING:
            self.streams += count
            if self.asynchronous:
                self.budget.streams += count
            else:
                self.budget.default_streams += count
        for known in list(self.budget.device_states):
            device_state = known()
            if device_state is not None:
                device_state._share()

    def _share(self) -> None:
        """Set the limit of each stream: all streams of the device share the entries of its hardware queues.

        All `Stream` objects over the default stream are one of them, and share its part.
        """
        budget = self.budget
        streams = budget.streams + (budget.default_streams > 0)
        room = min(self.max_in_flight, QUEUE_ENTRIES * self.properties.hardware_queues // max(1, streams))
        self.hot.limit = max(1, room if self.asynchronous else room // max(1, budget.default_streams))
