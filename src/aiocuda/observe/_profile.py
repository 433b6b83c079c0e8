"""Profile: what a `StreamProfiler` has found, as figures and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from ._picture import COLOURS

__all__ = ["OperationProfile", "ProfileReport", "StreamProfile"]

#: Host to device, device to host, within the device or between two.
TRANSFERS: Final = frozenset({"upload", "download", "copy", "prefetch"})

#: What keeps a stream at work. Everything else, a wait say, only takes its place in the order.
WORK: Final = frozenset(COLOURS)


@dataclasses.dataclass(frozen=True, slots=True)
class OperationProfile:
    """Operations of one name: a kernel's launches, or all of a kind. Times are the device's, in milliseconds."""

    name: str  #: the kernel's, or the kind
    kind: str  #: ``"upload"``, ``"launch"``, ``"download"``, ``"wait"`` …
    count: int
    total_ms: float
    mean_ms: float
    min_ms: float
    max_ms: float
    nbytes: int  #: moved or filled; 0 for whatever does neither

    @property
    def bandwidth(self) -> float:
        """Bytes per second, 0 where no bytes were moved or no time was seen to pass."""
        return self.nbytes / (self.total_ms * 1e-3) if self.total_ms else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class StreamProfile:
    """One stream, or all of them together.

    Attributes
    ----------
    name
        The stream's. Streams of one name are one.
    operations
        By name, what took longest first.
    count
        Operations, all kinds.
    busy_ms
        At work: launches, graphs, transfers and fills. Of a stream that is the time in which it did one of them; of
        several streams, which work at the same time, it is the sum.
    kernels, kernel_ms
        Launches, and their time.
    transfers, transfer_ms, transfer_bytes
        Copies to, from, within and between devices, and prefetches.
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
        """All of it, as JSON takes it."""
        figures = ("name", "count", "busy_ms", "kernels", "kernel_ms", "transfers", "transfer_ms", "transfer_bytes")
        operations = [dataclasses.asdict(each) | {"bandwidth": each.bandwidth} for each in self.operations]
        return {figure: getattr(self, figure) for figure in figures} | {"operations": operations}


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileReport:
    """What a device did while it was profiled. ``print(report)`` shows it.

    Attributes
    ----------
    device, driver
        Their names.
    seconds
        For which the profiler listened, by the host's clock.
    streams
        One for each name, the busiest first.
    total
        All streams together.
    untimed
        Operations that ended without times: they failed, or were enqueued before the profiler listened.
    waits
        How the host came to know, in that time: ``polls``, ``sleeps``, ``parks`` and ``notifications`` of
        `aiocuda._statistics.DeviceStatistics`, and what ``failed`` or was ``abandoned``.
    """

    device: str
    driver: str
    seconds: float
    streams: tuple[StreamProfile, ...]
    total: StreamProfile
    untimed: int
    waits: dict[str, int]

    def utilisation(self, stream: StreamProfile) -> float:
        """The share of the time in which a stream was at work, 0-1; of all together, how many were, on average."""
        return stream.busy_ms * 1e-3 / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it, as `json.dumps` takes it."""
        return {
            "device": self.device,
            "driver": self.driver,
            "seconds": self.seconds,
            "untimed": self.untimed,
            "waits": dict(self.waits),
            "total": self.total.to_dict(),
            "streams": [each.to_dict() | {"utilisation": self.utilisation(each)} for each in self.streams],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.device} ({self.driver} driver): {self.seconds:.3f} s, {_some(self.total.count, 'operation')} on "
            f"{_some(len(self.streams), 'stream')}" + (f", {self.untimed} more untimed" if self.untimed else ""),
        ]
        for stream in self.streams:
            lines += ["", f"stream {stream.name}: {self.utilisation(stream):.1%} at work, {_contents(stream)}"]
            lines += _table(stream.operations)
        if len(self.streams) > 1:
            lines += ["", f"all streams: {self.utilisation(self.total):.2f} at work at once, {_contents(self.total)}"]
            lines += _table(self.total.operations)
        return "\n".join(lines)


def _contents(stream: StreamProfile) -> str:
    kernels = f"{_some(stream.kernels, 'kernel')} {stream.kernel_ms:.3f} ms"
    moved = f"{stream.transfer_bytes / 1e6:.3f} MB"
    return f"{kernels}, {_some(stream.transfers, 'transfer')} {stream.transfer_ms:.3f} ms, {moved}"


def _table(operations: Iterable[OperationProfile]) -> list[str]:
    rows: list[tuple[str, ...]] = [("operation", "kind", "count", "total ms", "mean us", "min us", "max us", "GB/s")]
    for each in operations:
        times = (f"{time * 1e3:.1f}" for time in (each.mean_ms, each.min_ms, each.max_ms))
        speed = f"{each.bandwidth / 1e9:.2f}" if each.nbytes else "-"
        rows.append((_short(each.name), each.kind, str(each.count), f"{each.total_ms:.3f}", *times, speed))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"
