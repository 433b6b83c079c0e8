"""Profiler: how often and how long a device did what, stream by stream."""

from __future__ import annotations

import math
import threading
from typing import Any, Final, Self

from .._device import Device
from .._statistics import DeviceStatistics
from ..completion._operation import Operation
from ..errors import AiocudaError
from ._listener import Listener
from ._profile import OperationProfile, ProfileReport, StreamProfile

__all__ = ["StreamProfiler"]

#: Names of operations and of streams that are told apart; what comes with others is summed up as ``"…"``.
MOST_ROWS: Final = 4096
OTHERS: Final = "…"

#: Of the device's statistics: how the host came to know, and what did not end well.
WAITS: Final = ("polls", "sleeps", "parks", "notifications", "failed", "abandoned")


class _Tally:
    """Operations of one name in one stream. Times are milliseconds."""

    __slots__ = ("count", "longest", "nbytes", "shortest", "total")

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        self.total = self.longest = 0.0
        self.shortest = math.inf

    def add(self, other: _Tally) -> None:
        self.count += other.count
        self.nbytes += other.nbytes
        self.total += other.total
        self.longest = max(self.longest, other.longest)
        self.shortest = min(self.shortest, other.shortest)

    def profile(self, name: str, kind: str) -> OperationProfile:
        mean = self.total / self.count
        return OperationProfile(name, kind, self.count, self.total, mean, self.shortest, self.longest, self.nbytes)


class StreamProfiler(Listener):
    """Listens to a device, and adds up how often and how long its streams did what: on in its block, off outside.

    A timing event before and one behind each operation say how long the device had it (``cuEventElapsedTime``, to half
    a microsecond), which includes the wait for an engine that others use. On, that costs the host a few microseconds
    per operation, and memory for each *name* of an operation in a stream, however long it listens. Off, it costs
    nothing: no operation has anything to do with it. ::

        async with StreamProfiler(device) as profiler:
            await work(device)
        print(profiler.report())

    The block's end waits for this loop's work, so that all of it is counted. A profiler may be entered again, and adds
    to what it has. `Timeline` keeps each single operation, for a picture or a trace.

    Parameters
    ----------
    device
        Whose streams, in whatever loop. One profiler or timeline at a time listens to it.

    Raises
    ------
    InvalidTypeError
        Something that is no device.
    BusyError, ClosedError
        On entering: another one listens to the device; it has been closed.
    """

    _noun = "profiler"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._lock = threading.Lock()  # loops of several threads may use the device
        self._chunks: dict[int, float] = {}  # milliseconds of copies that are not done
        self._since: tuple[float, DeviceStatistics] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what has been counted. If it listens, it goes on."""
        with self._lock:
            self._tallies: dict[tuple[str, str, str], _Tally] = {}  # stream, kind, name
            self._untimed = 0
            self._seconds = 0.0
            self._waits = dict.fromkeys(WAITS, 0)
            if self._since is not None:
                self._since = self._now()

    async def __aenter__(self) -> Self:
        self.device._loop_state()  # which must be open, and used in this process
        self._listening.enter_context(self.device.listen(self))
        self._since = self._now()
        return self

    def _ended(self) -> None:
        with self._lock:
            self._seconds, self._waits = self._so_far()
            self._since = None
            self._chunks.clear()

    # -- what it is told -----------------------------------------------------------------------------------------

    def _resolved(self, operation: Operation[Any], owner: int | None, start: int, end: int) -> None:
        time = self._elapsed(start, end) if start else 0.0 if operation.kind == "record" else None
        with self._lock:
            if owner is not None:
                if time is not None:
                    self._chunks[owner] = self._chunks.get(owner, 0.0) + time
                return
            chunks = self._chunks.pop(operation.id, 0.0)
            if time is None:
                self._untimed += 1
                return
            tally = self._tally(operation.stream_name, operation.kind, operation.kernel or operation.kind)
            time += chunks
            tally.count += 1
            tally.nbytes += operation.nbytes
            tally.total += time
            tally.longest = max(tally.longest, time)
            tally.shortest = min(tally.shortest, time)

    def _tally(self, stream: str, kind: str, name: str) -> _Tally:
        found = self._tallies.get((stream, kind, name))
        if found is None:
            if len(self._tallies) >= MOST_ROWS:
                stream = name = OTHERS  # there are few kinds
            found = self._tallies.setdefault((stream, kind, name), _Tally())
        return found

    def _elapsed(self, start: int, end: int) -> float | None:
        try:
            return self.device.driver.event_elapsed_ms(start, end)
        except AiocudaError:  # lost to a fault, which those who wait are told of
            return None

    # -- what it tells -------------------------------------------------------------------------------------------

    def report(self) -> ProfileReport:
        """What has been counted so far, in all of its blocks since the last reset."""
        with self._lock:
            seconds, waits = self._so_far()
            streams: dict[str, dict[tuple[str, str], _Tally]] = {}
            every: dict[tuple[str, str], _Tally] = {}
            for (stream, kind, name), tally in self._tallies.items():
                for place in (streams.setdefault(stream, {}), every):
                    place.setdefault((kind, name), _Tally()).add(tally)
            untimed = self._untimed
        profiles = sorted((_profile(*each) for each in streams.items()), key=lambda one: one.busy_ms, reverse=True)
        return ProfileReport(
            device=self.device.name,
            driver=self.device.driver.name,
            seconds=seconds,
            streams=tuple(profiles),
            total=_profile("all streams", every),
            untimed=untimed,
            waits=waits,
        )

    def _now(self) -> tuple[float, DeviceStatistics]:
        return self.device.driver.now(), self.device.statistics()

    def _so_far(self) -> tuple[float, dict[str, int]]:
        if self._since is None:
            return self._seconds, dict(self._waits)
        (since, before), (now, after) = self._since, self._now()
        waits = {name: self._waits[name] + getattr(after, name) - getattr(before, name) for name in WAITS}
        return self._seconds + now - since, waits

    def __repr__(self) -> str:
        count = sum(each.count for each in tuple(self._tallies.values()))
        state = "off" if self._since is None else "on"
        return f"<StreamProfiler of {self.device.name}, {state}: {count} operation{'s' * (count != 1)}>"


def _profile(name: str, tallies: dict[tuple[str, str], _Tally]) -> StreamProfile:
    operations = [tally.profile(name, kind) for (kind, name), tally in tallies.items()]
    return StreamProfile(name, tuple(sorted(operations, key=lambda one: one.total_ms, reverse=True)))
