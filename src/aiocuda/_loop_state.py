"""Site: what one event loop has on a device, and what becomes of it when the loop or the device goes first."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from .completion._device_state import DeviceState
from .completion._operation import Operation
from .completion._reactor import Reactor
from .completion._stream_queue import StreamQueue
from .errors import ClosedError
from .memory._allocator import DeviceMemory
from .memory._pinned import PinnedBuffer, PinnedPool, Region
from .memory._staging import StagingBuffers

__all__ = ["TICK", "Feeder", "LoopState", "LoopStates"]

#: Seconds between two looks at what other loops do, running or closed.
TICK = 0.001

#: What a device was left at work with: nobody will tell when it has passed, so it stays as long as the process.
_parked: list[object] = []


class Feeder(Protocol):
    """A coordinator, as its device's end sees it: it has accepted work that no stream has yet."""

    def refuse(self) -> None:
        """Accept no more. Any thread."""

    def moving(self) -> bool:
        """Will it give work to a stream, without a task that has to do something first? Any thread."""

    def leave(self) -> None:
        """Withdraw what no stream has. On its own loop."""


class LoopState:
    """One loop's reactor, staging buffers and open queues: all that anybody on that loop can wait for."""

    __slots__ = ("_feeders", "queues", "reactor", "staging")

    def __init__(self, reactor: Reactor, staging: StagingBuffers) -> None:
        self.reactor = reactor
        self.staging = staging
        self.queues: dict[
            StreamQueue, None
        ] = {}  # and no set: a simulation goes through them in the same order every time
        self._feeders: dict[weakref.ref[Feeder], None] = {}  # each leaves it when it is collected

    def fed_by(self, feeder: Feeder) -> None:
        """One more, which is closed with the device at the latest."""
        self._feeders[weakref.ref(feeder, lambda gone: self._feeders.pop(gone, None))] = None

    def feeders(self) -> list[Feeder]:
        """Those that are still in use, in the order in which they were first used."""
        return [feeder for known in list(self._feeders) if (feeder := known()) is not None]

    def refuse(self) -> None:
        """Accept no more from the verbs of streams and coordinators. Any thread. Accepted work goes on."""
        for feeder in self.feeders():
            feeder.refuse()
        for queue in tuple(self.queues):
            if not queue.closed:
                queue.refuse(draining=True)

    @property
    def feeding(self) -> bool:
        """Will accepted work come to its streams, although they have nothing unfinished now?"""
        loop = self.reactor.loop
        return loop.is_running() and any(feeder.moving() for feeder in self.feeders())

    def blocking(self) -> bool:
        """Does a thread still do something for it, or is its loop still to be told of something?"""
        jobs = self.reactor.jobs
        return bool(len(jobs) if self.reactor.loop.is_running() else jobs.running)

    def close(self) -> None:
        """Tell whoever waits for anything in here, if his loop is there to tell him, and stop watching.

        On the site's own loop, unless that does not run. What the device may still touch stays where it is.
        """
        fault = self.reactor.device_state.driver.fault
        if fault is not None and not self.reactor.loop.is_closed():
            self.reactor.fault(fault)
        for queue in self.queues:
            queue.orphan()
        self.reactor.close()


class LoopStates:
    """The sites of one device, by loop.

    A loop may be closed with work in flight. Its queues then are orphans: nobody is told any more, and what the device
    may still touch stays until it has passed.
    """

    def __init__(
        self,
        device_state: DeviceState,
        memory: DeviceMemory,
        pinned: PinnedPool,
        loading: dict[tuple[Any, asyncio.AbstractEventLoop], Any],
    ) -> None:
        self._device_state = device_state
        self._memory = memory
        self._pinned = pinned
        self._loading = loading
        self._loop_states: dict[asyncio.AbstractEventLoop, LoopState] = {}
        #: Of closed loops: their queues are orphans. Chunks go back once these have passed.
        self._dead: dict[LoopState, None] = {}
        self._ending = threading.RLock()  # a site is among the dead once it has been closed, and not before
        self._reclaiming = threading.Lock()
        self._past = [0] * len(Reactor.COUNTS)

    def here(self) -> LoopState:
        """The running loop's site, made when it first asks."""
        loop = asyncio._get_running_loop()
        if loop is None:
            raise self._device_state.no_loop(None, "the device", "use it in one")
        loop_state = self._loop_states.get(loop)
        if loop_state is None:
            self.reclaim()
            reactor = Reactor(self._device_state, loop)
            loop_state = self._loop_states[loop] = LoopState(reactor, StagingBuffers(reactor, self._pinned))
            reactor.sweeps = (self.reclaim, functools.partial(self._memory.sweep, reactor), self._pinned.sweep)
        return loop_state

    def get(self, loop: asyncio.AbstractEventLoop) -> LoopState | None:
        """A loop's site, if it has one."""
        return self._loop_states.get(loop)

    def __iter__(self) -> Iterator[LoopState]:
        return iter(list(self._loop_states.values()))

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self, loop_state: LoopState) -> None:
        """Close a site: by its own loop if that runs, by this one otherwise."""
        loop = loop_state.reactor.loop
        if loop.is_running() and loop is not asyncio._get_running_loop():
            try:
                loop.call_soon_threadsafe(self._end, loop_state)
            except RuntimeError:
                if not loop.is_closed():
                    raise
            else:
                return
        self._end(loop_state)

    def _end(self, loop_state: LoopState) -> None:
        loop = loop_state.reactor.loop
        if self._loop_states.pop(loop, None) is None:
            return  # it has ended
        loop_state.close()
        for key in list(self._loading):
            if key[1] is loop:
                self._loading.pop(key, None)
        for position, value in enumerate(loop_state.reactor.counts()):
            self._past[position] += value

    def abandon(self) -> None:
        """The device is left at work: everybody is told, and what it may touch stays for good."""
        for loop_state in self:
            self.park(loop_state)
            self.end(loop_state)
        _parked.extend(self._dead)

    def park(self, thing: object) -> None:
        """The device may touch it, and nobody will know when it has done: keep it for good."""
        _parked.append(thing)

    async def unpin(self, buffer: PinnedBuffer, region: Region, reactor: Reactor) -> None:
        """A loop's own array is to be unlocked once no device uses it any more."""
        block, driver = buffer._block, self._device_state.driver
        assert block is not None
        block.retire()
        try:
            for queue, operation in list(block.uses.items()):
                if not operation._passed and queue.loop is reactor.loop:
                    await queue.settle()
            while block.unfinished() and not (reactor.closed or driver.fault):  # noqa: ASYNC110 - other loops use it too
                await asyncio.sleep(TICK)
        except asyncio.CancelledError:
            self.park(region)
            raise
        if driver.fault is not None:
            return
        if block.unfinished():
            self.park(region)
            raise ClosedError("the device was left while it used a pinned array: that stays locked, and in use")
        try:
            own = Reactor(self._device_state, reactor.loop) if reactor.closed else reactor
        except ClosedError:
            return  # the driver has been closed with its device, and has let go of everything
        try:
            await own.jobs.run(lambda: driver.unpin(region.address))
        finally:
            if own is not reactor:
                own.close()

    # -- orphans -------------------------------------------------------------------------------------------------

    def reclaim(self) -> bool:
        """Give back what closed loops no longer need; True when they need nothing any more."""
        for loop in list(
            self._loop_states
        ):  # not its items: their tuples may have the collector run, and that other threads
            if loop.is_closed():
                self._bury(loop)  # its port is the next loop's
        if not self._reclaiming.acquire(blocking=False):
            return False  # another loop is just looking what they still need
        try:
            for loop_state in list(self._dead):
                loop_state.reactor.guard(self._reclaim, loop_state)
        finally:
            self._reclaiming.release()
        with self._ending:  # somebody may be just closing one
            return not self._dead

    def _bury(self, loop: asyncio.AbstractEventLoop) -> None:
        """End a closed loop's site: whoever comes first, and nobody else goes on before that."""
        with self._ending:
            loop_state = self._loop_states.get(loop)
            if loop_state is not None:
                try:
                    self._end(loop_state)
                finally:
                    self._dead[loop_state] = None

    def _reclaim(self, loop_state: LoopState) -> None:
        for queue in list(loop_state.queues):
            if queue.passed():
                del loop_state.queues[queue]  # first: what the driver refuses to take is not offered to it again
                self._memory.release(queue)
                queue.reclaim()
        if not loop_state.queues and not loop_state.blocking():
            self._dead.pop(loop_state, None)
            loop_state.staging.close()

    def busy_here(self) -> bool:
        """Is anything of the running loop's streams unfinished?"""
        loop_state = self._loop_states.get(asyncio.get_running_loop())
        return loop_state is not None and any(not queue.idle for queue in loop_state.queues)

    def feeding(self) -> bool:
        """Will accepted work come to the streams of any loop, although they have nothing unfinished now?"""
        return any(loop_state.feeding for loop_state in self)

    def busy_elsewhere(self) -> bool:
        """Is anything of another loop unfinished? Of one that has stopped, whatever the device still does."""
        here = asyncio._get_running_loop()
        return any(
            not queue.idle if loop_state.reactor.loop.is_running() else not queue.passed()
            for loop_state in self
            if loop_state.reactor.loop is not here
            for queue in tuple(loop_state.queues)
        )

    def working(self) -> Operation[Any] | None:
        """The newest operation of some stream that the device is not known to be done with."""
        return next(
            (tail for loop_state in self for queue in tuple(loop_state.queues) if (tail := queue.tail()) is not None),
            None,
        )

    def blocking(self) -> bool:
        """Do threads still do something for any loop?"""
        return any(loop_state.blocking() for loop_state in self)

    def unfinished(self) -> bool:
        """Is the device still at work on any of it? Asks the driver, tells nobody."""
        return any(not queue.passed() for loop_state in [*self, *self._dead] for queue in tuple(loop_state.queues))

    # -- counts --------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """What all reactors counted, past ones too."""
        totals = list(self._past)
        for loop_state in self:
            for position, value in enumerate(loop_state.reactor.counts()):
                totals[position] += value
        armed = sum(len(loop_state.reactor.notifier_pool.armed) for loop_state in self)
        return dict(zip(Reactor.COUNTS, totals, strict=True)) | {"armed": armed}
