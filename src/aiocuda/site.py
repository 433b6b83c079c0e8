"""Site: what one event loop has on a device, and what becomes of it when the loop goes first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from .completion.hub import Hub
from .completion.lane import Lane
from .completion.reactor import Reactor
from .errors import NoEventLoopError
from .memory.allocator import DeviceMemory
from .memory.pinned import PinnedPool
from .memory.ring import Ring

__all__ = ["Site", "Sites"]


class Site:
    """One loop's reactor, staging ring and open lanes."""

    __slots__ = ("lanes", "reactor", "ring")

    def __init__(self, reactor: Reactor, ring: Ring) -> None:
        self.reactor = reactor
        self.ring = ring
        self.lanes: set[Lane] = set()

    def blocking(self) -> bool:
        """Does a thread still do something for it, or is its loop still to be told of something?"""
        jobs = self.reactor.jobs
        return bool(len(jobs) if self.reactor.loop.is_running() else jobs.running)

    def close(self) -> None:
        """Stop watching."""
        for lane in tuple(self.lanes):
            lane.closed = True
            self.reactor.retire(lane)
        self.lanes.clear()
        self.reactor.close()


class Sites:
    """The sites of one device, by loop.

    A loop may be closed with work in flight. Its lanes then are orphans: nobody is told any more, and what the device
    may still touch stays until it has passed.
    """

    def __init__(self, hub: Hub, memory: DeviceMemory, pinned: PinnedPool) -> None:
        self._hub = hub
        self._memory = memory
        self._pinned = pinned
        self._sites: dict[asyncio.AbstractEventLoop, Site] = {}
        self._orphans: list[Lane] = []
        self._dead: list[Site] = []  # whose chunks go back once its lanes have passed
        self._past = [0] * len(Reactor.COUNTS)

    def here(self) -> Site:
        """The running loop's site, made when it first asks."""
        loop = asyncio._get_running_loop()
        if loop is None:
            raise NoEventLoopError("there is no running event loop: call from a coroutine, under asyncio.run(main())")
        site = self._sites.get(loop)
        if site is None:
            self.forget_closed_loops()
            self.reclaim()
            reactor = Reactor(self._hub, loop)
            site = self._sites[loop] = Site(reactor, Ring(reactor, self._pinned))

            def sweep() -> None:
                self.reclaim()
                self._memory.sweep(reactor)
                self._pinned.sweep()

            reactor.sweep = sweep
        return site

    def get(self, loop: asyncio.AbstractEventLoop) -> Site | None:
        """A loop's site, if it has one."""
        return self._sites.get(loop)

    def take_all(self) -> list[Site]:
        """All of them, out of the book: the device is being closed."""
        sites = list(self._sites.values())
        self._sites.clear()
        return sites

    def __iter__(self) -> Iterator[Site]:
        return iter(list(self._sites.values()))

    # -- orphans -------------------------------------------------------------------------------------------------

    def forget_closed_loops(self) -> None:
        """Turn what closed loops have left into orphans."""
        for loop, site in list(self._sites.items()):
            if loop.is_closed():
                del self._sites[loop]
                self.orphan(site)

    def orphan(self, site: Site) -> None:
        """Nobody is told any more; what the device may still touch stays until it has passed."""
        for lane in site.lanes:
            lane.orphan()
            self._orphans.append(lane)
        site.lanes.clear()
        self._dead.append(site)
        self.retire(site)

    def reclaim(self) -> bool:
        """Give back what orphans no longer need; True when there are none left."""
        if self._orphans:
            self._orphans = [lane for lane in self._orphans if not lane.reclaim()]
        if self._dead:
            left = {lane.reactor for lane in self._orphans}
            dead, self._dead = self._dead, []
            for site in dead:
                if site.reactor in left or site.blocking():
                    self._dead.append(site)
                else:
                    site.ring.close()
                    site.reactor.jobs.forget()
        return not self._orphans

    def busy_elsewhere(self) -> bool:
        """Is anything of another loop unfinished? Of one that has stopped, whatever the device still does."""
        here = asyncio._get_running_loop()
        return any(
            not lane.idle if loop.is_running() else not lane.passed()
            for loop, site in list(self._sites.items())
            if loop is not here
            for lane in tuple(site.lanes)
        )

    def unfinished(self) -> bool:
        """Is the device still at work on any of it? Asks the driver, tells nobody."""
        lanes = [lane for site in self for lane in site.lanes]
        return any(not lane.passed() for lane in [*lanes, *self._orphans])

    # -- counts --------------------------------------------------------------------------------------------------

    def retire(self, site: Site) -> None:
        """The site is done with: keep what it counted, and stop its reactor, on its own loop if that still runs."""
        for position, value in enumerate(site.reactor.counts()):
            self._past[position] += value
        loop = site.reactor.loop
        if loop.is_running() and loop is not asyncio._get_running_loop():
            with contextlib.suppress(RuntimeError):  # it is being closed, and then nothing is left to stop
                loop.call_soon_threadsafe(site.close)
        else:
            site.close()

    def counts(self) -> dict[str, int]:
        """What all reactors counted, past ones too."""
        totals = list(self._past)
        for site in self:
            for position, value in enumerate(site.reactor.counts()):
                totals[position] += value
        armed = sum(len(site.reactor.rack.armed) for site in self)
        return dict(zip(Reactor.COUNTS, totals, strict=True)) | {"armed": armed}
