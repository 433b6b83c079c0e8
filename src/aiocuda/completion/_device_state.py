"""DeviceState: what the event loops of one opened device share, and the budget that all who have opened it share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, cast

from .._instrument import Instrument
from .._types import DeviceProperties, Priority
from ..driver.protocol import Driver
from ..errors import AiocudaError, ClosedError, DeviceFault, ForkedProcessError, NoEventLoopError, WrongLoopError
from ._event_leases import EventLeases, Lease
from ._notifiers import NotifierPool
from ._policy import CompletionPolicy
from ._prediction import Predictor

if TYPE_CHECKING:
    from ._operation import Operation
    from ._reactor import Reactor
    from ._stream_queue import StreamQueue

__all__ = ["DeviceState"]

#: Packages that can capture a stream into a graph in GLOBAL or THREAD_LOCAL mode.
CAPTURERS = ("torch", "cupy", "numba", "jax", "tensorflow", "cuda.core", "cuda.bindings")

#: Entries of one hardware queue that we allow ourselves. The 1 021st blocks its caller (measured).
QUEUE_ENTRIES = 900


#: Guests before those that are closed are forgotten: streams come and go.
MANY_GUESTS = 8


class Budget:
    """Limits of a device that all its openings share: notifiers that may be armed, and places in hardware queues."""

    __slots__ = ("faces", "hubs", "streams", "tokens")

    def __init__(self, notifiers: int) -> None:
        #: One token per notifier that may be armed. More would make streams alias on the hardware queues (measured:
        #: 24 armed of 32 queues keep 128 streams at 32 ms, 32 armed cost 41).
        self.tokens = list(range(notifiers))
        self.streams = 0
        self.faces = 0  # of its default stream, which is one, however many stand for it
        self.hubs: dict[weakref.ref[DeviceState], None] = {}  # each takes itself out when its hub is gone

    @classmethod
    def of(cls, driver: Driver, device: int) -> Budget:
        """The device's one."""
        key = ("budget", device)
        known = driver.registry.get(key)
        if known is None:
            known = driver.registry.setdefault(key, cls(driver.notifier_limit(device)))
        return cast("Budget", known)


class DeviceState:
    """One opened device's event leases, predictions and submission limit.

    All that is shared between threads is changed by single list or integer operations.
    """

    __slots__ = (
        "__weakref__",
        "asynchronous",
        "budget",
        "closing",
        "cross_device_uses",
        "device",
        "device_count",
        "driver",
        "guarded",
        "instrument",
        "leases",
        "limit",
        "max_in_flight",
        "policy",
        "predictor",
        "process",
        "properties",
        "starts",
        "streams",
        "tokens",
    )

    def __init__(
        self,
        driver: Driver,
        device: int,
        properties: DeviceProperties,
        policy: CompletionPolicy,
        max_in_flight: int,
        asynchronous: bool = True,
    ) -> None:
        self.driver = driver
        #: Else all streams are the device's default stream, and no notifier is rung.
        self.asynchronous = asynchronous
        self.device = device
        self.device_count = driver.device_count()  # which does not change, and need not be asked for again
        self.properties = properties
        self.policy = policy if driver.polls_freely else policy.parking()
        self.max_in_flight = max_in_flight
        self.leases = EventLeases(driver, device)
        self.predictor = Predictor()
        self.instrument: Instrument | None = None
        #: While somebody listens: the timing event in front of each operation, by its id.
        self.starts: dict[int, Lease] = {}
        #: May somebody else in this process be capturing a stream? Then queries take care, for 0.8 µs a pass.
        self.guarded = False
        #: Streams of other opened devices that may use memory of this one, and what is waited for in each.
        self.cross_device_uses: dict[StreamQueue, Operation[Any] | None] = {}
        self.closing = False
        self.process = os.getpid()
        self.budget = Budget.of(driver, device)
        self.budget.hubs[weakref.ref(self, self.budget.hubs.pop)] = None
        self.tokens = self.budget.tokens if asynchronous else []  # without a notifier, a timer asks
        self.streams = 0  # of this opening's own
        self.limit = max_in_flight
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

    def no_loop(self, loop: asyncio.AbstractEventLoop | None, what: str, cure: str) -> AiocudaError:
        """Why something of a loop is refused where another one runs, or none. A forked child has none of its parent's.

        Parameters
        ----------
        loop
            Whose it is; None if it is nobody's yet.
        """
        if os.getpid() != self.process:
            return self._forked()
        if loop is not None and loop.is_closed():
            return ClosedError(f"the event loop of {what} has been closed: {cure}")
        if asyncio._get_running_loop() is None:
            return NoEventLoopError(
                f"{what} needs its running event loop: call from a coroutine, under asyncio.run(main()); "
                "from another thread, hand that coroutine over by asyncio.run_coroutine_threadsafe(work(), loop)"
            )
        return WrongLoopError(f"{what} belongs to another event loop: {cure}")

    def look_for_others(self) -> None:
        """Find out whether anything is loaded that captures streams: a query of ours would spoil its capture."""
        self.guarded = self.guarded or any(name in sys.modules for name in CAPTURERS)

    def lend(self, queue: StreamQueue) -> None:
        """A stream of another opened device is about to use memory of this one."""
        if len(self.cross_device_uses) >= MANY_GUESTS:
            for cross_device_use in list(self.cross_device_uses):
                if cross_device_use.closed and cross_device_use.idle:
                    self.cross_device_uses.pop(cross_device_use, None)
        self.cross_device_uses[queue] = None

    def recall(self) -> None:
        """Lend nothing more: the device is being closed, and waits for what its guests have been given by now."""
        if not self.closing:
            self.closing = True
            self.cross_device_uses = {
                cross_device_use: cross_device_use.tail() for cross_device_use in list(self.cross_device_uses)
            }

    async def settle(self) -> None:
        """Wait for what guests in the running loop have been given."""
        here = asyncio.get_running_loop()
        for cross_device_use, newest in list(self.cross_device_uses.items()):
            if newest is not None and cross_device_use.loop is here:
                with contextlib.suppress(ClosedError):  # its device has been left: the driver is asked, below
                    await newest.settle()

    def is_lent(self) -> bool:
        """May a guest still use any of it? Where nobody watches it any more, the driver is asked."""
        for cross_device_use, newest in list(self.cross_device_uses.items()):
            if newest is not None and not newest._passed:
                watched = cross_device_use.loop.is_running() and not cross_device_use.reactor.closed
                if watched or not cross_device_use.passed():
                    return True
        return False

    def watched_by(self, reactor: Reactor) -> None:
        """One more, for `spread` to find."""
        reactors = self._reactors()
        reactors[weakref.ref(reactor, reactors.pop)] = None

    def spread(self, fault: DeviceFault, first: Reactor) -> None:
        """A fault ends all devices of a driver: what one reactor of a loop knows, the others are told at once.

        Other loops are not called from here. They learn of it by their own watchdogs, or from the driver. In one that
        has been closed nobody is left to be told: what it has left becomes orphans as each device finds that out.
        """
        first.lose(fault)
        if first.loop.is_closed():
            return
        for reactor in [known() for known in list(self._reactors())]:
            if reactor is not None and reactor.loop is first.loop and not (reactor.faulted or reactor.closed):
                reactor.lose(fault)

    def _reactors(self) -> dict[weakref.ref[Reactor], None]:
        """Those of the driver, of all devices and loops, in the order in which they were made."""
        reactors: dict[weakref.ref[Reactor], None] = self.driver.registry.setdefault("reactors", {})
        return reactors

    def dismiss(self) -> None:
        """The driver is about to be closed: its ports serve others."""
        NotifierPool.dismiss(self.driver)

    def make_stream(self, priority: Priority | None = None) -> int:
        """A stream of the driver's, by its range of priorities; or the default one, which has none but its own."""
        if not self.asynchronous:
            return self.driver.stream_default(self.device)
        if priority is None:  # one that only gives memory back
            return self.driver.stream_create(self.device, 0)
        least, greatest = self.driver.priority_range(self.device)
        level = {"high": greatest, "low": least, "normal": int((least + greatest) / 2)}[priority]
        return self.driver.stream_create(self.device, level)

    def stream_opened(self, count: int) -> None:
        """``count`` streams more, or fewer: they share the hardware queues, so the limit of each one changes."""
        self.streams += count
        if self.asynchronous:
            self.budget.streams += count
        else:
            self.budget.faces += count
        for known in list(self.budget.hubs):
            device_state = known()
            if device_state is not None:
                device_state._share()

    def _share(self) -> None:
        budget = self.budget
        streams = budget.streams + (budget.faces > 0)
        room = min(self.max_in_flight, QUEUE_ENTRIES * self.properties.hardware_queues // max(1, streams))
        self.limit = max(1, room if self.asynchronous else room // max(1, budget.faces))
