"""Screen: what people see of a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .report import EXTREMES, Extreme, Report, printable

__all__ = ["Screen", "show_info", "show_report"]

#: Skipped files that are told one by one; the JSON has them all.
MOST_SKIPPED = 10


class Screen:
    """A progress bar on standard error, while the block lasts. Elsewhere than on a terminal it shows nothing."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:>10}"), BarColumn(), DownloadColumn(binary_units=False), TimeRemainingColumn()
        )  # fmt: skip
        # Ten times a second: drawing takes a core some milliseconds, and the job wants both.
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=10)
        self._task: TaskID | None = None

    def begin(self, what: str, total: int) -> None:
        """So many bytes are to be read."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total or None)

    def advance(self, nbytes: int) -> None:
        """So many have been."""
        if self._task is not None:
            self._progress.advance(self._task, nbytes)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()


def show_report(report: Report, console: Console) -> None:
    """Tell people what the demo found."""
    console.print(Text(f"aiocuda {report.version}: {report.driver} driver, {report.device}", style="bold"))
    if report.fallback_reason is not None:
        console.print(Text(report.fallback_reason))
    if report.host_bandwidth is not None:
        console.print(
            Text(f"modelled copy engines: {report.host_bandwidth / 1e9:g} GB/s each way; kernels are not modelled")
        )
    console.print()
    told = f"{report.files:,} files, {_size(report.bytes)}"
    if report.streamed < report.bytes:
        told += f", of which {_size(report.bytes - report.streamed)} are holes and were not read"
    console.print(Text(told))
    if report.mismatched:
        console.print(Text(f"{len(report.mismatched)} HISTOGRAMS ARE WRONG:", style="bold red"))
        for path in report.mismatched[:MOST_SKIPPED]:
            console.print(Text(f"  {printable(path)}"))
    else:
        console.print(Text("every histogram agrees with an independent count"))
    _show_times(report, console)
    if report.most_random:
        console.print(_extremes("most random", report.most_random))
        console.print(_extremes("least random", report.least_random))
    _show_skipped(report, console)


def _show_times(report: Report, console: Console) -> None:
    if report.speedup is None or report.speedup_bound is None:
        return
    rate = report.streamed / report.seconds / 1e9
    table = _table()
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="left")
    table.add_row("overlapped", f"{report.seconds:.3f} s", f"{rate:.3g} GB/s")
    table.add_row("step after step", f"{report.sequential_seconds:.3f} s", _stages(report.stage_seconds))
    table.add_row(
        "speed-up", f"{report.speedup:.2f} ×", f"of at most {report.speedup_bound:.2f}: all stages ÷ the slowest"
    )
    table.add_row("overlap", f"{report.overlap_efficiency:.0%}", "of the time the busiest stage was at work")
    console.print()
    console.print(table)
    console.print(Text("medians of three runs, in turn", style="dim"))
    if report.changed:
        console.print(Text(f"{report.changed} times a file had changed or vanished when a later run came to it"))
    console.print()


def _stages(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {each:.3f}" for name, each in seconds.items())


def _extremes(title: str, found: Sequence[Extreme]) -> Table:
    table = Table(
        title=Text(title, style="bold"), title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False
    )
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for each in found[:EXTREMES]:
        table.add_row(f"{each.entropy:.4f} bits/byte", _size(each.bytes), Text(printable(each.path)))
    return table


def _show_skipped(report: Report, console: Console) -> None:
    if not report.skipped:
        return
    console.print()
    console.print(Text(f"{len(report.skipped):,} not read:", style="bold"))
    for each in report.skipped[:MOST_SKIPPED]:
        console.print(Text(f"  {printable(each.path)}: {each.reason}"))
    if len(report.skipped) > MOST_SKIPPED:
        console.print(Text(f"  … and {len(report.skipped) - MOST_SKIPPED:,} more; --json has them all"))


def show_info(info: Mapping[str, Any], console: Console) -> None:
    """Tell people what there is to run on."""
    console.print(Text(f"aiocuda {info['versions']['aiocuda']}: {info['driver']} driver", style="bold"))
    if info["fallback_reason"] is not None:
        console.print(Text(info["fallback_reason"]))
    table = _table()
    for device in info["devices"]:
        table.add_row(f"device {device['index']}", Text(device["name"]))
        if any(device["compute_capability"]):
            table.add_row("  compute capability", ".".join(map(str, device["compute_capability"])))
        table.add_row("  memory", _size(device["total_memory"]))
    table.add_row("hardware queues", str(info["hardware_queues"]))
    for name, value in {**info["features"], **info["versions"]}.items():
        shown = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        table.add_row(name.replace("_", " "), Text(shown))
    console.print(table)


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), show_header=False)


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
