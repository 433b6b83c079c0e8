"""StreamProfiler: how often the operations of each stream and each label ran, and how long they took."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterable
from typing import Any, Final, Self

from .._base._checks import check_duration
from .._base._label import printable
from .._base._mistakes import lacks, refuses
from .._base._statistics import DeviceStatistics
from ..completion import KINDS, Operation
from ..device import Device
from ..errors import InvalidArgumentError, InvalidTypeError, WrongDeviceError
from ..lowlevel import resources_of
from ..stream import Stream
from ._drawing import COLOURS
from ._listener import DeviceListener, elapsed_ms

__all__ = ["LabelProfile", "OperationProfile", "ProfileReport", "StreamProfile", "StreamProfiler"]

#: Pairs of a stream and an operation name with figures of their own; all further ones are added up as ``"…"``.
MOST_ROWS: Final = 4096
OTHERS: Final = "…"

#: Labels with figures of their own; all further ones are added up as ``"…"``. Only so many characters of a label count.
MOST_LABELS: Final = 1024
MOST_CHARACTERS: Final = 200

#: Labels that the text of a report shows: those that were busy longest.
MOST_SHOWN: Final = 20

#: The counts of the device's statistics that a report has.
WAITS: Final = ("polls", "sleeps", "parks", "notifications", "failed", "abandoned")

#: Kinds that move bytes: to, from, within and between devices.
TRANSFERS: Final = frozenset(name for name, kind in KINDS.items() if kind.size == "moved")

#: Kinds that do work. All other kinds, for example waits, only order other operations.
WORK: Final = frozenset(COLOURS)


@dataclasses.dataclass(frozen=True, slots=True)
class OperationProfile:
    """Operations of one name: the launches of one kernel, or all operations of one kind. Times are device times."""

    name: str  #: name of the kernel, or the kind; of an entry by hand, the name that the program has given
    kind: str  #: ``"upload"``, ``"launch"``, ``"download"``, ``"wait"`` …; ``"entry"``: by `StreamProfiler.record`
    count: int
    total_ms: float
    mean_ms: float
    min_ms: float
    max_ms: float
    p50_ms: float  #: percentiles, with a relative error of at most 1 %
    p99_ms: float
    nbytes: int  #: bytes moved or filled; 0 for other kinds

    @property
    def bandwidth(self) -> float:
        """Bytes per second; 0 if no bytes were moved, or if the measured time is 0."""
        return self.nbytes / (self.total_ms * 1e-3) if self.total_ms else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class StreamProfile:
    """The operations of one stream, or of all streams together.

    Attributes
    ----------
    name
        Name of the stream. Streams with the same name are counted together.
    operations
        One item for each name, the longest total time first.
    count
        Number of operations of all kinds.
    busy_ms
        Time of operations that do work, and do not only order others. For several streams, which work at the same time,
        it is the sum.
    kernels, kernel_ms
        Number of launches, and their time.
    transfers, transfer_ms, transfer_bytes
        Copies to, from, within and between devices, and prefetches: number, time and bytes.
    """

    name: str
    operations: tuple[OperationProfile, ...]

    @property
    def count(self) -> int:
        return sum(each.count for each in self.operations)

    @property
    def busy_ms(self) -> float:
        return sum(each.total_ms for each in self.operations if each.kind in WORK)

    @property
    def kernels(self) -> int:
        return sum(each.count for each in self.operations if each.kind == "launch")

    @property
    def kernel_ms(self) -> float:
        return sum(each.total_ms for each in self.operations if each.kind == "launch")

    @property
    def transfers(self) -> int:
        return sum(each.count for each in self.operations if each.kind in TRANSFERS)

    @property
    def transfer_ms(self) -> float:
        return sum(each.total_ms for each in self.operations if each.kind in TRANSFERS)

    @property
    def transfer_bytes(self) -> int:
        return sum(each.nbytes for each in self.operations if each.kind in TRANSFERS)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as a dict for `json.dumps`."""
        figures = ("name", "count", "busy_ms", "kernels", "kernel_ms", "transfers", "transfer_ms", "transfer_bytes")
        operations = [dataclasses.asdict(each) | {"bandwidth": each.bandwidth} for each in self.operations]
        return {figure: getattr(self, figure) for figure in figures} | {"operations": operations}


@dataclasses.dataclass(frozen=True, slots=True)
class LabelProfile:
    """The operations of one label, of all streams."""

    label: str  #: at most 200 characters of it; ``"…"`` for all labels after the first 1 024
    count: int  #: number of operations of all kinds
    busy_ms: float  #: device time of its launches, graphs, transfers and fills


@lacks
@refuses(__getitem__="has no items: report.total has all streams, and report.stream(stream) one")
@dataclasses.dataclass(frozen=True, slots=True)
class ProfileReport:
    """The figures of a `StreamProfiler`. ``print(report)`` shows them as tables.

    Attributes
    ----------
    device, driver
        Names of the device and the driver.
    seconds
        Time in the profiler's blocks, by the clock of the host.
    streams
        One item for each name, the busiest first.
    total
        All streams together.
    untimed
        Operations without times: they failed, or were enqueued before the profiler started.
    waits
        Changes in that time of the counts ``polls``, ``sleeps``, ``parks``, ``notifications``, ``failed`` and
        ``abandoned`` of `aiocuda._base._statistics.DeviceStatistics`.
    labels
        One item for each label of `aiocuda.label`, the busiest first. Operations without a label are not among them.
    """

    device: str
    driver: str
    seconds: float
    streams: tuple[StreamProfile, ...]
    total: StreamProfile
    untimed: int
    waits: dict[str, int]
    labels: tuple[LabelProfile, ...] = ()

    def stream(self, stream: Stream | str) -> StreamProfile:
        """Return the figures of one stream, or of all streams of one name.

        Raises
        ------
        InvalidArgumentError
            No operation of such a stream is in the report.
        InvalidTypeError
            No stream and no string.
        """
        name = _name_of(stream)
        for each in self.streams:
            if each.name == name:
                return each
        known = ", ".join(repr(each.name) for each in self.streams) or "none"
        raise InvalidArgumentError(f"the report has no stream {name!r}, only {known}", name=name)

    def utilisation(self, stream: StreamProfile) -> float:
        """Return the share of the time in which a stream was busy, 0-1; for `total`, how many were busy on average."""
        return stream.busy_ms * 1e-3 / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as a dict for `json.dumps`."""
        figures = {figure: getattr(self, figure) for figure in ("device", "driver", "seconds", "untimed")}
        streams = [each.to_dict() | {"utilisation": self.utilisation(each)} for each in self.streams]
        labels = [dataclasses.asdict(each) for each in self.labels]
        total = self.total.to_dict()
        return {**figures, "waits": dict(self.waits), "total": total, "streams": streams, "labels": labels}

    def __str__(self) -> str:
        lines = [
            f"{self.device} ({self.driver} driver): {self.seconds:.3f} s, {_some(self.total.count, 'operation')} on "
            f"{_some(len(self.streams), 'stream')}" + (f", {self.untimed} more untimed" if self.untimed else "")
        ]
        for stream in self.streams:
            lines += ["", f"stream {stream.name}: {self.utilisation(stream):.1%} at work, {_contents(stream)}"]
            lines += _table(stream.operations)
        if len(self.streams) > 1:
            lines += ["", f"all streams: {self.utilisation(self.total):.2f} at work at once, {_contents(self.total)}"]
            lines += _table(self.total.operations)
        if self.labels:
            lines += ["", f"{_some(len(self.labels), 'label')}:", *_label_table(self.labels)]
        return "\n".join(lines)


def _contents(stream: StreamProfile) -> str:
    kernels = f"{_some(stream.kernels, 'kernel')} {stream.kernel_ms:.3f} ms"
    moved = f"{stream.transfer_bytes / 1e6:.3f} MB"
    return f"{kernels}, {_some(stream.transfers, 'transfer')} {stream.transfer_ms:.3f} ms, {moved}"


def _table(operations: Iterable[OperationProfile]) -> list[str]:
    times_us = ("mean us", "min us", "p50 us", "p99 us", "max us")
    rows: list[tuple[str, ...]] = [("operation", "kind", "count", "total ms", *times_us, "GB/s")]
    for each in operations:
        times = (f"{time * 1e3:.1f}" for time in (each.mean_ms, each.min_ms, each.p50_ms, each.p99_ms, each.max_ms))
        speed = f"{each.bandwidth / 1e9:.2f}" if each.nbytes else "-"
        rows.append((_short(each.name), each.kind, str(each.count), f"{each.total_ms:.3f}", *times, speed))
    return _laid_out(rows, names=2)


def _label_table(labels: tuple[LabelProfile, ...]) -> list[str]:
    rows: list[tuple[str, ...]] = [("label", "count", "busy ms")]
    rows += [(printable(each.label, 40), str(each.count), f"{each.busy_ms:.3f}") for each in labels[:MOST_SHOWN]]
    left = len(labels) - MOST_SHOWN
    return _laid_out(rows, names=1) + ([f"  and {left} more"] if left > 0 else [])


def _laid_out(rows: list[tuple[str, ...]], names: int) -> list[str]:
    """Return the lines of a table: so many columns of names, then columns of figures."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    layout = "  ".join(f"{{:{'<' if column < names else '>'}{width}}}" for column, width in enumerate(widths))
    return [f"  {layout.format(*row)}" for row in rows]


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"


class _Sums:
    """Sums over the operations of one name in one stream. Times are milliseconds."""

    __slots__ = ("count", "longest", "nbytes", "shortest", "times", "total")

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        self.total = self.longest = 0.0
        self.shortest = math.inf
        self.times = LogHistogram()

    def add(self, time: float, nbytes: int) -> None:
        self.count += 1
        self.nbytes += nbytes
        self.total += time
        self.longest = max(self.longest, time)
        self.shortest = min(self.shortest, time)
        self.times.add(time)

    def merge(self, other: _Sums) -> None:
        self.count += other.count
        self.nbytes += other.nbytes
        self.total += other.total
        self.longest = max(self.longest, other.longest)
        self.shortest = min(self.shortest, other.shortest)
        self.times.merge(other.times)

    def profile(self, name: str, kind: str) -> OperationProfile:
        p50, p99 = (min(max(self.times.percentile(share), self.shortest), self.longest) for share in (0.5, 0.99))
        mean, shortest, longest = self.total / self.count, self.shortest, self.longest
        return OperationProfile(name, kind, self.count, self.total, mean, shortest, longest, p50, p99, self.nbytes)


@lacks
class StreamProfiler(DeviceListener):
    """Counts the operations of a device's streams and adds up their times, inside its ``async with`` block.

    The time of an operation is that between a timing event before and one after it (``cuEventElapsedTime``, resolution
    half a microsecond). It includes the wait for an engine that another stream uses. In the block, each operation costs
    the host a few microseconds more, and each *name* of an operation in a stream needs some memory, for any duration.
    Outside the block, the profiler costs nothing. ::

        async with StreamProfiler(device) as profiler:
            await work(device)
        print(profiler.report())

    At the end of the block, the profiler waits for the operations of this event loop. A profiler may be entered again;
    then it adds to its figures. `Timeline` keeps each operation, for a picture or a trace.

    Parameters
    ----------
    device
        The device of the streams, of all event loops. Several profilers and timelines may listen to it together.

    Raises
    ------
    InvalidTypeError
        The argument is no device.
    BusyError, ClosedError
        On entering: this profiler listens already; the device has been closed.
    """

    _noun = "profiler"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._lock = threading.Lock()  # loops of several threads may use the device
        self._chunks: dict[int, float] = {}  # milliseconds, by the id of an unfinished copy
        self._since: tuple[float, DeviceStatistics] | None = None
        self.reset()

    def reset(self) -> None:
        """Set all figures to 0. In a block, the profiler goes on."""
        with self._lock:
            self._sums: dict[tuple[str | None, str, str], _Sums] = {}  # by stream, kind, name
            self._labels: dict[str, tuple[int, float]] = {}  # count and milliseconds
            self._untimed = 0
            self._seconds = 0.0
            self._waits = dict.fromkeys(WAITS, 0)
            if self._since is not None:
                self._since = self._now()

    async def __aenter__(self) -> Self:
        resources_of(self.device).loop_state()  # raises if the device is closed, or of another process
        listening = contextlib.ExitStack()
        listening.enter_context(self.device.listen(self))
        self._listening = listening
        self._since = self._now()
        return self

    def _on_stopped(self) -> None:
        with self._lock:
            self._seconds, self._waits = self._so_far()
            self._since = None
            self._chunks.clear()

    def _on_finished(self, operation: Operation[Any], copy: int | None, start: int, end: int) -> None:
        time = elapsed_ms(self.device, start, end) if start else 0.0 if operation.kind == "record" else None
        with self._lock:
            if copy is not None:
                if time is not None:
                    self._chunks[copy] = self._chunks.get(copy, 0.0) + time
                return
            chunks = self._chunks.pop(operation.id, 0.0)
            if time is None:
                self._untimed += 1
                return
            sums = self._sums_of(operation.stream_name, operation.kind, operation.kernel or operation.kind)
            time += chunks
            sums.add(time, operation.nbytes)
            if operation.label is not None:
                self._add_to_label(operation.label, time if operation.kind in WORK else 0.0)

    def _sums_of(self, stream: str | None, kind: str, name: str) -> _Sums:
        found = self._sums.get((stream, kind, name))
        if found is None:
            if len(self._sums) >= MOST_ROWS:
                stream = name = OTHERS  # the kind stays: there are few
            found = self._sums.setdefault((stream, kind, name), _Sums())
        return found

    def _add_to_label(self, label: str, busy: float) -> None:
        key = label if len(label) <= MOST_CHARACTERS else f"{label[:MOST_CHARACTERS]}…"
        if key not in self._labels and len(self._labels) >= MOST_LABELS:
            key = OTHERS
        count, total = self._labels.get(key, (0, 0.0))
        self._labels[key] = (count + 1, total + busy)

    def record(self, name: str, seconds: float, *, stream: Stream | str | None = None) -> None:
        """Add an entry that the program has timed itself: work of another library, or of the host.

        It counts at any time, also outside of the block, as an operation of the kind ``"entry"``. It adds nothing to
        ``busy_ms``: the profiler does not know whether the device was at work.

        Parameters
        ----------
        name
            Entries of one name are added up.
        seconds
            The time that it took.
        stream
            The stream of the report that has the entry, or its name. None: only ``total`` has it.

        Raises
        ------
        InvalidArgumentError, InvalidTypeError
            An empty name, a negative or infinite time, or another type.
        WrongDeviceError
            The stream belongs to another device.
        """
        if not isinstance(name, str):
            raise InvalidTypeError(f"an entry has a string as its name, not {name!r}")
        if not name:
            raise InvalidArgumentError("an entry has a name that is not empty", name=name)
        time = check_duration(seconds, "seconds") * 1e3
        if isinstance(stream, Stream) and stream.device is not self.device:
            raise WrongDeviceError(f"{stream!r} is a stream of another device than {self!r}")
        with self._lock:
            self._sums_of(None if stream is None else _name_of(stream), "entry", name).add(time, 0)

    def report(self) -> ProfileReport:
        """Return the figures of all blocks since the last reset; in a block, up to now."""
        if not self._sums:  # `record` needs no block
            self._check_entered()
        with self._lock:
            seconds, waits = self._so_far()
            streams: dict[str, dict[tuple[str, str], _Sums]] = {}
            every: dict[tuple[str, str], _Sums] = {}
            for (stream, kind, name), sums in self._sums.items():
                for group in (every,) if stream is None else (streams.setdefault(stream, {}), every):
                    group.setdefault((kind, name), _Sums()).merge(sums)
            labels = [LabelProfile(label, *figures) for label, figures in self._labels.items()]
            untimed = self._untimed
        profiles = sorted((_profile(*each) for each in streams.items()), key=lambda each: each.busy_ms, reverse=True)
        name, driver, total = self.device.name, self.device.driver.name, _profile("all streams", every)
        labels.sort(key=lambda each: each.busy_ms, reverse=True)
        return ProfileReport(name, driver, seconds, tuple(profiles), total, untimed, waits, tuple(labels))

    def _now(self) -> tuple[float, DeviceStatistics]:
        return self.device.driver.now(), self.device.statistics()

    def _so_far(self) -> tuple[float, dict[str, int]]:
        if self._since is None:
            return self._seconds, dict(self._waits)
        (since, before), (now, after) = self._since, self._now()
        waits = {name: self._waits[name] + getattr(after, name) - getattr(before, name) for name in WAITS}
        return self._seconds + now - since, waits

    def __repr__(self) -> str:
        count = sum(each.count for each in list(self._sums.values()))
        state = "off" if self._since is None else "on"
        return f"<StreamProfiler of {self.device.name}, {state}: {count} operation{'s' * (count != 1)}>"


def _name_of(stream: Stream | str) -> str:
    if isinstance(stream, Stream):
        return stream.name
    if not isinstance(stream, str):
        raise InvalidTypeError(f"a stream of a report is an aiocuda.Stream or its name, not {stream!r}")
    return stream


def _profile(name: str, groups: dict[tuple[str, str], _Sums]) -> StreamProfile:
    operations = [sums.profile(name, kind) for (kind, name), sums in groups.items()]
    return StreamProfile(name, tuple(sorted(operations, key=lambda each: each.total_ms, reverse=True)))


#: The largest relative error of a percentile.
ACCURACY: Final = 0.01

_GROWTH: Final = math.log((1 + ACCURACY) / (1 - ACCURACY))

#: Times below this are counted as 0: they are shorter than the resolution of a timing event, half a microsecond.
_LEAST_MS: Final = 1e-4

#: Times above this are counted as this: 11 days.
_MOST_MS: Final = 1e9


class LogHistogram:
    """Percentiles of any number of times in milliseconds, with a relative error of at most 1 %.

    It counts the times in buckets whose bounds grow by 2 %: at most 1 500 buckets, whatever the times are. The
    percentiles of two merged histograms are those of all their times together.
    """

    __slots__ = ("_counts", "_zeros")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._zeros = 0

    def add(self, ms: float) -> None:
        """Count a time."""
        if ms < _LEAST_MS:
            self._zeros += 1
        else:
            bucket = math.ceil(math.log(min(ms, _MOST_MS)) / _GROWTH)
            self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def merge(self, other: LogHistogram) -> None:
        """Count all times of another histogram, too."""
        self._zeros += other._zeros
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count

    def percentile(self, share: float) -> float:
        """Return the smallest time that at least this share of the times, above 0 and at most 1, does not exceed."""
        count = self._zeros + sum(self._counts.values())
        left = math.ceil(share * count) - self._zeros
        if left <= 0:
            return 0.0
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return math.exp(bucket * _GROWTH) * (1 - ACCURACY)  # no time of the bucket differs by more than 1 %
        raise AssertionError("the buckets have all times")
