"""The output of the commands in a terminal: progress bar, tables and findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from .. import __version__
from ._bench import ROWS, BenchReport, BenchRow
from ._doctor._finding import Finding
from ._report import PICTURE_BATCHES, DemoReport, FileEntropy, printable

__all__ = ["BenchTable", "OutputConsole", "ProgressBar", "show_findings", "show_info", "show_report"]

#: Skipped files that are listed; the JSON has all of them.
MOST_SKIPPED = 10


class OutputConsole(Console):
    """A console that neither wraps lines nor highlights words.

    With ``only_terminal`` it prints nothing into a file or a pipe.
    """

    def __init__(self, *, stderr: bool = False, only_terminal: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True)
        self.quiet = only_terminal and not self.is_terminal

    def on_broken_pipe(self) -> None:
        """Raise the error that `aiocuda.cli.main` handles. Rich would exit here."""
        raise BrokenPipeError


class ProgressBar:
    """A progress bar on standard error for the duration of a ``with`` block. Without a terminal, it shows nothing."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description:>10}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        # Ten updates a second: one takes a core some milliseconds, which the job could use.
        console = Console(stderr=True)
        console.quiet = not console.is_terminal  # a disabled bar of Rich before 14.3 ends with an empty line
        self._progress = Progress(
            *columns, console=console, transient=True, refresh_per_second=10, disable=console.quiet
        )
        self._task: TaskID | None = None

    def begin(self, what: str, total: int) -> None:
        """Start a new bar for a number of bytes."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total or None)

    def advance(self, nbytes: int) -> None:
        """Add bytes that have been read."""
        if self._task is not None:
            self._progress.advance(self._task, nbytes)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()


def show_report(report: DemoReport, console: Console) -> None:
    _show(console, f"aiocuda {report.version}: {report.driver} driver, {report.device}", "bold")
    for line in _circumstances(report):
        _show(console, line)
    _show(console, "")
    if report.mismatched:
        wrong = len(report.mismatched)
        _show(console, f"{wrong} HISTOGRAM{'S ARE' if wrong > 1 else ' IS'} WRONG:", "bold red")
        for path in report.mismatched[:MOST_SKIPPED]:
            _show(console, f"  {printable(path)}")
    elif report.files:
        read = f"{_count(report.files, 'file')}, {_size(report.bytes)}"
        _show(console, f"{read}: every histogram agrees with an independent count")
    else:
        _show(console, "no file was read, so nothing was checked")
    for line in _times(report):
        _show(console, line)
    _show_overlap(console, report)
    for title, found in (("most random", report.most_random), ("least random", report.least_random)):
        _show_extremes(console, title, found)
    _show_skipped(console, report)


def _circumstances(report: DemoReport) -> Iterator[str]:
    yield f"the device counts the bytes of each file in {printable(report.root)}"
    if report.fallback_reason is not None:
        yield f"no GPU is used: {report.fallback_reason}"
    if report.host_bandwidth is not None:
        rate = report.host_bandwidth / 1e9
        yield f"the host driver models a device: copies run at {rate:g} GB/s each way, the kernel is a NumPy function"
    if report.streamed < report.bytes:
        yield f"{_size(report.bytes - report.streamed)} of holes in sparse files were not sent through the device"


def _times(report: DemoReport) -> Iterator[str]:
    if report.speedup is None or report.speedup_bound is None:
        return
    together, alone = (_stages(seconds) for seconds in (report.overlapped_stage_seconds, report.stage_seconds))
    yield ""
    yield f"one stage after the other  {report.sequential_seconds:7.3f} s  {alone}"
    yield f"the stages overlap         {report.seconds:7.3f} s  {together}"
    yield f"throughput                 {report.streamed / report.seconds / 1e9:7.3g} GB/s"
    slowest = max(report.stage_seconds, key=report.stage_seconds.__getitem__)
    bound = f"about {report.speedup_bound:.2f} is possible: the sum of the stages ÷ the slowest, {slowest}"
    yield f"speed-up                   {report.speedup:7.2f} ×  {bound}"
    yield f"busiest stage              {report.overlap_efficiency:7.0%}    of the overlapped time at work"
    yield "medians of three runs of each kind, in turn"
    if report.changed:
        yield f"{_count(report.changed, 'time')} a file had changed or vanished when a later run came to it"
    for line in _obstacles(report, report.speedup, report.speedup_bound):
        yield f"note: {line}"


def _obstacles(report: DemoReport, speedup: float, bound: float) -> Iterator[str]:
    """Yield the reasons why the stages overlap little, if they do."""
    few = report.batches < FEW_BATCHES
    if few:
        yield (
            f"{_count(report.batches, 'batch', 'batches')} of at most {_size(report.batch_bytes)} cannot keep all "
            "stages at work; a folder with more data overlaps better"
        )
    slowest = max(report.stage_seconds, key=report.stage_seconds.__getitem__)
    share = 1 / bound
    small = report.bytes < SMALL * report.files
    if share > DOMINANT:
        yield (
            f"the stage {slowest} takes {share:.0%} of the time of all stages; overlap can only hide the others"
            + (", because many small files are slow to read" if slowest == "read" and small else "")
        )
    if speedup < GOOD * bound and not few:
        grown = {name: report.overlapped_stage_seconds[name] - alone for name, alone in report.stage_seconds.items()}
        name = max(grown, key=grown.__getitem__)
        yield (
            f"beside the others, the stage {name} took {report.overlapped_stage_seconds[name]:.3f} s instead of "
            f"{report.stage_seconds[name]:.3f} s, because {_SHARED[report.driver == 'cuda']}"
        )


#: Fewer batches than this do not fill the pipeline for long enough.
FEW_BATCHES = 8

#: A stage with a larger share of the time of all stages leaves little for overlap to hide.
DOMINANT = 0.7

#: Files of fewer bytes on average are read more slowly than they are copied.
SMALL = 100_000

#: The speed-up is close to its bound from this share on.
GOOD = 0.8

#: The reason why a stage takes longer beside the others: on the host driver, and on a GPU.
_SHARED = ("all of them share the processors and the GIL", "copies share the bus")


def _show_overlap(console: Console, report: DemoReport) -> None:
    """Print both timelines of the first batches."""
    marks = "█▓"
    try:
        marks.encode(console.encoding)
    except (LookupError, UnicodeEncodeError):
        marks = "#="
    width = min(MOST_COLUMNS, console.width - len("  download  ") - 1)
    if max(panel.length_us for panel in report.overlap.panels()) < SHORTEST_US:
        return
    lines = list(report.overlap.text(max(width, LEAST_COLUMNS), marks))
    _show(console, "")
    batches = min(report.batches, PICTURE_BATCHES)
    _show(console, f"when each stage works on the first {_count(batches, 'batch', 'batches')}", "bold")
    scale = "time runs from left to right, with one scale for both runs"
    _show(console, f"{marks[0]} and {marks[1]} are batches in turn; {scale}")
    for stage, line in lines:
        if stage:
            console.print(Text.assemble(f"  {stage:8}  ", (line, _COLOURS[stage])))
        else:
            _show(console, line)
    _show(console, "--timeline FILE.svg writes this as a picture")


#: Shorter timelines are not shown: the host's and the device's clocks differ by a fraction of a millisecond.
SHORTEST_US = 5000.0

#: Characters of the longer timeline.
MOST_COLUMNS = 100
LEAST_COLUMNS = 40

_COLOURS = {"read": "red", "upload": "blue", "compute": "yellow", "download": "green"}


def _stages(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {each:.3f}" for name, each in seconds.items())


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def _show_extremes(console: Console, title: str, found: Sequence[FileEntropy]) -> None:
    if not found:
        return
    _show(console, "")
    _show(console, f"{title}, entropy in bits per byte (0: one value only, 8: all values equally often)", "bold")
    for each in found:
        _show(console, f"  {each.entropy:.4f}  {_size(each.bytes):>9}  {printable(each.path)}")


def _show_skipped(console: Console, report: DemoReport) -> None:
    if not report.skipped:
        return
    _show(console, "")
    _show(console, f"{len(report.skipped):,} not read", "bold")
    for each in report.skipped[:MOST_SKIPPED]:
        _show(console, f"  {printable(each.path)}: {each.reason}")
    if len(report.skipped) > MOST_SKIPPED:
        _show(console, f"  … and {len(report.skipped) - MOST_SKIPPED:,} more; --json has them all")


def show_info(info: Mapping[str, Any], console: Console) -> None:
    """Print the result of `aiocuda.cli._app`'s `_collect`."""
    _show(console, f"aiocuda {info['versions']['aiocuda']}: {info['driver']} driver", "bold")
    if info["fallback_reason"] is not None:
        _show(console, f"no GPU is used: {info['fallback_reason']}")
    lines: dict[str, object] = {}
    for device in info["devices"]:
        major, minor = device["compute_capability"]
        capability = f", compute capability {major}.{minor}" if major else ""
        lines[f"device {device['index']}"] = f"{device['name']}, {_size(device['total_memory'])}{capability}"
    lines["hardware queues"] = info["hardware_queues"]
    lines["core"] = info["core"]
    lines |= {name.replace("_", " "): value for name, value in {**info["features"], **info["versions"]}.items()}
    width = max(map(len, lines))
    for name, value in lines.items():
        shown = ("yes" if value else "no") if isinstance(value, bool) else value
        _show(console, f"{name:{width}}  {shown}")


#: The first column: the word and the colour for a finding that is ok, and for one that is not.
_MARKS = {True: ("ok", "green"), False: ("PROBLEM", "bold red")}


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding, and a line for each cure."""
    problems = sum(not finding.ok for finding in findings)
    count = _count(problems, "problem") if problems else "no problem"
    _show(console, f"aiocuda {__version__}: {count} in {len(findings)} checks", "bold")
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        word, style = _MARKS[finding.ok]
        name = finding.name.replace("_", " ")
        console.print(Text.assemble((f"{word:7}", style), f"  {name:{width}}  {printable(finding.detail)}"))
        if finding.cure:
            _show(console, f"{'':7}  {'':{width}}  cure: {printable(finding.cure)}", "bold")


#: A row is marked if it is worse than the published figure by more than this factor.
MUCH_WORSE = 1.5


class BenchTable:
    """Prints each row when it has been measured.

    Parameters
    ----------
    console
        Where the table is printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._comparable = False
        self._titles = max(len(row.title) for row in ROWS)

    def begin(self, report: BenchReport) -> None:
        """Print the header."""
        where, self._comparable = report.published, report.comparable
        code = _code(report.versions["aiocuda"], report.commit, report.dirty)
        self._line(f"{code}: {report.driver} driver, {_machine(report)}", "bold")
        self._line(
            f"published: {where['gpu']}, CUDA {where['cuda']}, driver {where['driver']}, {where['cpus']} CPUs, "
            f"Python {where['python']}, {_code(where['aiocuda'], where['commit'], where['dirty'])}"
        )
        if not report.comparable:
            if report.machine["reason"]:
                self._line(f"no GPU is used: {report.machine['reason']}")
            self._line(f"NOT COMPARABLE: the published figures are a GPU's, and this is the {report.driver} driver")
        self._line("")
        self._line(self._cells("", "p50", "p99", "", "n", "published", "ratio"), "bold")

    def show(self, row: BenchRow) -> None:
        """Print a row."""
        if row.p50 is None or row.p99 is None:
            self._line(self._cells(row.title, "–", "–", row.unit, "0", _number(row.published), f"error: {row.error}"))
            return
        ratio, style = "–", ""
        if not self._comparable and row.published is not None:
            ratio = "not comparable"
        elif row.ratio is not None:
            worse = row.ratio if row.unit == "µs" else 1 / row.ratio
            ratio = f"{row.ratio:.2f}"
            if worse > MUCH_WORSE:
                ratio, style = f"{ratio}  slower", "yellow"
        figures = (_number(row.p50), _number(row.p99), row.unit, f"{row.n:,}", _number(row.published), ratio)
        self._line(self._cells(row.title, *figures), style)

    def end(self) -> None:
        """Print the explanation."""
        self._line("")
        self._line(
            "ratio: p50 ÷ published. Of µs, less is better; of rates, more. p99: 99 % of the samples are better."
        )

    def _cells(self, title: str, p50: str, p99: str, unit: str, n: str, published: str, ratio: str) -> str:
        return f"{title:{self._titles}}  {p50:>8}  {p99:>8}  {unit:12}  {n:>6}  {published:>9}  {ratio}".rstrip()

    def _line(self, text: str, style: str = "") -> None:
        _show(self._console, printable(text), style)


def _code(version: str, commit: str | None, dirty: bool | None) -> str:
    """Return the version and, if they are known, the commit and whether the code differed from it."""
    if commit is None:
        return f"aiocuda {version}"
    return f"aiocuda {version} ({commit[:12]}{' with uncommitted changes' if dirty else ''})"


def _machine(report: BenchReport) -> str:
    machine = report.machine
    gpu = f"{machine['gpu']}, CUDA {machine['cuda']}" if machine["gpu"] else "no GPU"
    return f"{gpu}, {machine['cpus']} CPUs, Python {report.versions['python']}"


def _number(value: float | None) -> str:
    """Return three digits of a figure."""
    if value is None:
        return "–"
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _show(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style=style))  # a Text, because a str could contain markup


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
