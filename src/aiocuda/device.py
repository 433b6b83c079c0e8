"""Device: where streams and memory come from, and where everything ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import warnings
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .completion.hub import Hub
from .completion.lane import Lane
from .completion.operation import STEP, Operation
from .completion.policy import CompletionPolicy
from .completion.reactor import Reactor
from .driver.protocol import Driver
from .errors import (
    AiocudaError,
    BusyError,
    ClosedError,
    DrainTimeoutWarning,
    InvalidArgumentError,
    InvalidTypeError,
)
from .finish import at_exit, to_the_end
from .memory.allocator import DeviceMemory
from .memory.arrays import as_dtype, as_shape, as_source, as_target
from .memory.buffer import UnifiedBuffer
from .memory.pinned import PinnedBuffer, PinnedPool, Region
from .reports import DeviceStatistics
from .site import Site, Sites
from .stream import Stream
from .types import DeviceProperties, Priority, caller

__all__ = ["Device"]

#: Seconds that leaving a device by an exception gives the work that it has already accepted.
DRAIN_TIMEOUT = 5.0

#: Seconds between two looks at what other loops do, running or closed.
TICK = 0.001

_PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")


class Device:
    """One GPU, or the host in its place.

    Made by `open_device`. Several loops in several threads may share it; each makes streams of its own.

    Attributes
    ----------
    driver : Driver
    index : int
    properties : DeviceProperties
    memory : DeviceMemory
    drain_timeout : float
        Seconds that leaving by an exception, or the interpreter's exit, gives what the device has accepted.
    """

    def __init__(
        self, driver: Driver, index: int, properties: DeviceProperties, policy: CompletionPolicy, max_in_flight: int,
        owns_driver: bool, opened_at: str,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.index = index
        self.properties = properties
        self.drain_timeout = DRAIN_TIMEOUT
        self._hub = Hub(driver, index, properties, policy, max_in_flight)
        self.memory = DeviceMemory(self._hub, self)
        self._pinned = PinnedPool(self._hub)
        self._sites = Sites(self._hub, self.memory, self._pinned)
        #: Who writes which array of the user's. A lane holds what has not passed; nobody else need hold the array.
        self._targets: weakref.WeakValueDictionary[int, Operation[Any]] = weakref.WeakValueDictionary()
        self._loading: dict[Any, Any] = {}
        self._names = itertools.count()
        self._owns_driver = owns_driver
        self._opened_at = opened_at
        self._streams_before = driver.statistics()["streams_created"]
        self.closed = False
        self._closing = False
        at_exit(self)

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The device's own name."""
        return self.properties.name

    @property
    def hardware_queues(self) -> int:
        """How many streams can be served without sharing a queue (``CUDA_DEVICE_MAX_CONNECTIONS``)."""
        return self.properties.hardware_queues

    @property
    def policy(self) -> CompletionPolicy:
        """When waits poll, sleep or park."""
        return self._hub.policy

    # -- streams -------------------------------------------------------------------------------------------------

    def stream(self, priority: Priority = "normal", name: str | None = None) -> Stream:
        """A new stream, for the running loop. ``cuStreamCreateWithPriority``.

        Parameters
        ----------
        priority
            ``"high"``, ``"normal"`` or ``"low"``, mapped on the device's own range. The device starts work of a higher
            priority first once an engine is free; it does not interrupt what runs.
        name
            How it shows in reports and errors.
        """
        if priority not in _PRIORITIES:
            raise InvalidArgumentError(f"priority must be 'high', 'normal' or 'low', not {priority!r}")
        site = self._site()
        least, greatest = self.driver.priority_range(self.index)
        level = {"high": greatest, "low": least, "normal": int((least + greatest) / 2)}[priority]
        lane = Lane(
            site.reactor,
            self.driver.stream_create(self.index, level),
            name or f"stream-{next(self._names)}",
        )
        site.lanes.add(lane)
        self._hub.stream_opened(1)
        return Stream(self, lane, priority, caller(2))

    def _import_stream(self, handle: int) -> Stream:
        if isinstance(handle, bool) or not isinstance(handle, int):
            raise InvalidTypeError(f"a stream's handle is an integer, not {handle!r}")
        site = self._site()
        self.driver.stream_import(self.index, handle)
        lane = Lane(site.reactor, handle, f"imported-{handle:#x}", imported=True)
        site.lanes.add(lane)
        return Stream(self, lane, "normal", caller(3))

    def _site(self) -> Site:
        """This loop's share of the device."""
        if self.closed or self._closing:
            raise ClosedError(f"{self.name} has been closed: open it again with aiocuda.open_device()")
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        return self._sites.here()

    async def _close_stream(self, stream: Stream) -> None:
        lane = stream._lane
        if lane.closed:
            return
        lane.check_loop()
        if lane.lent:
            raise BusyError(f"{lane.name} is lent: leave the `async with stream.lend()` block first")
        while not lane.closed and not lane.idle:
            await lane.settle()  # and again, if somebody has enqueued meanwhile
        if lane.closed:
            return  # somebody else was quicker
        site = self._sites.get(lane.loop)
        if site is not None:
            site.lanes.discard(lane)
        lane.closed = True
        lane.reactor.retire(lane)
        self._destroy(lane)

    def _destroy(self, lane: Lane) -> None:
        if not lane.imported and self.driver.fault is None:
            self._hub.stream_opened(-1)
            self.driver.stream_destroy(lane.handle)

    # -- host memory ---------------------------------------------------------------------------------------------

    def pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> PinnedBuffer:
        """Page-locked host memory as a NumPy array. It may be awaited until it is locked; copies wait by themselves."""
        kind = as_dtype(dtype)
        return self._pinned.buffer(self._site().reactor, as_shape(shape, kind.itemsize), kind)

    @contextlib.asynccontextmanager
    async def pin(self, array: npt.NDArray[Any]) -> AsyncIterator[PinnedBuffer]:
        """Page-lock an array of your own for direct DMA, as long as the block lasts. ``cuMemHostRegister``.

        The block's end waits until no device uses the array any more, whatever is cancelled meanwhile.
        """
        if not isinstance(array, np.ndarray):
            raise InvalidTypeError(f"only a NumPy array can be pinned, not {type(array).__name__}")
        checked = as_target(array) if array.flags.writeable else as_source(array)
        reactor = self._site().reactor
        buffer, region = self._pinned.borrow(checked)
        try:
            await to_the_end(reactor.jobs.run(lambda: region.lock(self.driver)))
            yield buffer
        finally:
            if region.locked:
                await to_the_end(self._unpin(buffer, region, reactor))

    async def _unpin(self, buffer: PinnedBuffer, region: Region, reactor: Reactor) -> None:
        block = buffer._block
        assert block is not None
        block.freed = True
        for lane, operation in list(block.uses.items()):
            if not operation._passed and lane.loop is reactor.loop:
                await lane.settle()
        while self.driver.fault is None:
            if not block.unfinished():
                await reactor.jobs.run(lambda: self.driver.unpin(region.address))
                return
            await asyncio.sleep(TICK)  # another loop's streams use it too

    def unified(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> UnifiedBuffer:
        """Managed memory: one address for the host and the device.

        Raises
        ------
        UnsupportedError
            The device has none.
        """
        self._site()
        kind = as_dtype(dtype)
        return self.memory.managed(as_shape(shape, kind.itemsize), kind)

    # -- what is known -------------------------------------------------------------------------------------------

    def statistics(self) -> DeviceStatistics:
        """A snapshot of all that was counted since it was opened."""
        counts = self._sites.counts()
        driver = self.driver.statistics()
        ended = counts["resolved"] + counts["failed"] + counts["abandoned"]
        return DeviceStatistics(
            in_flight=counts["submitted"] - ended,
            streams=self._hub.streams,
            streams_created=driver["streams_created"] - self._streams_before,
            events=driver["events"],
            threads=driver["threads"],
            **counts,
        )

    # -- the end -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until all that this loop's streams were given is done, failed or not."""
        site = self._sites.get(asyncio.get_running_loop())
        if site is not None:
            for lane in tuple(site.lanes):
                await lane.settle()
        self._sites.forget_closed_loops()
        while not self._sites.reclaim() and self.driver.fault is None:  # noqa: ASYNC110 - nobody is left to tell
            await asyncio.sleep(TICK)

    async def aclose(self) -> None:
        """Wait for the work, then give everything back. A second call does nothing.

        What other tasks and other loops enqueue until this loop's work is done is waited for; what comes later raises
        `ClosedError`.
        """
        if self.closed:
            return
        try:
            await self.drain()
            await self._drain_for_good()
        except BaseException:
            await self._leave()
            raise
        await self._release()

    async def _drain_for_good(self) -> None:
        """Take no new work, and wait for what there is, in other loops too."""
        self._closing = True
        for site in self._sites:
            for lane in tuple(site.lanes):
                lane.closed = True
        await self.drain()
        while self.driver.fault is None and self._sites.busy_elsewhere():
            await asyncio.sleep(TICK)
            await self.drain()

    async def _leave(self) -> None:
        """By an exception or a cancellation: abandon what is on the host, and wait for the device, within a limit."""
        loop = asyncio.get_running_loop()
        site = self._sites.get(loop)
        for lane in () if site is None else site.lanes:
            lane.withdraw_all()
        drain = asyncio.ensure_future(self._drain_for_good())
        deadline = loop.time() + self.drain_timeout
        while not drain.done() and loop.time() < deadline:
            # Shielded: the exception on its way out is told, not a second cancellation.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({drain}, timeout=deadline - loop.time())
        if drain.done():
            drain.result()
            await self._release()
            return
        drain.cancel()
        lanes = () if site is None else site.lanes
        unfinished = sum(operation.kind is not STEP for lane in lanes for operation in lane.pending)
        warnings.warn(
            f"{self.name}: {unfinished} operations did not finish within {self.drain_timeout} s; the memory that they "
            "may still touch stays allocated",
            DrainTimeoutWarning,
            stacklevel=4,
        )
        self._abandon()

    async def _release(self) -> None:
        """Everything has passed: streams, memory, events, bells go back."""
        if not self.closed:
            self.closed = True
            await to_the_end(self._give_back())

    async def _give_back(self) -> None:
        here = self._sites.here()  # made anew in a loop that has not used the device
        sites = self._sites.take_all()
        for site in sites:
            for lane in tuple(site.lanes):
                self._destroy(lane)
        if self.driver.fault is None:
            while any(site.blocking() for site in sites):  # noqa: ASYNC110 - memory that is being locked
                await asyncio.sleep(TICK)
            for free in (self.memory.close(), self._pinned.close()):
                await here.reactor.jobs.run(free)
            self._hub.leases.close()
        else:
            self._park()
        for site in sites:
            self._sites.retire(site)
        self._close_driver()

    def _abandon(self) -> None:
        """The device is not done with it: nothing that it may touch is given back."""
        self.closed = True
        self._park()
        for site in self._sites.take_all():
            self._sites.orphan(site)
        self._close_driver()

    def _park(self) -> None:
        self.memory.abandon()
        self._pinned.closed = True

    def _close_driver(self) -> None:
        if self._owns_driver:
            self._hub.dismiss()
            self.driver.close()

    def _unfinished(self) -> bool:
        """Is the device still at work? For the interpreter's exit."""
        try:
            return self.driver.fault is None and self._sites.unfinished()
        except AiocudaError:
            return False  # its driver has been closed, or has faulted just now: there is nothing to wait for

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            warnings.warn(
                f"unclosed {self!r}, opened at {self._opened_at}: use `async with aiocuda.open_device()`, or await "
                "device.aclose()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            await self.aclose()
        elif not self.closed:
            await self._leave()

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} belongs to this process: open the device there")

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Device {self.driver.name}:{self.index} {self.name}{state}>"
