"""`BenchTable`: the figures in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from .._report import printable
from ._report import BenchReport, BenchRow
from ._rows import ROWS

__all__ = ["BenchTable"]

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
        self._console.print(Text(printable(text), style=style))


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
