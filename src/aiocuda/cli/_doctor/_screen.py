"""The findings in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ... import __version__
from .._report import printable
from ._finding import Finding

__all__ = ["show_findings"]

#: The first column: the word and the colour for a finding that is ok, and for one that is not.
_MARKS = {True: ("ok", "green"), False: ("PROBLEM", "bold red")}


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding, and a line for each cure."""
    problems = sum(not finding.ok for finding in findings)
    count = {0: "no problem", 1: "1 problem"}.get(problems, f"{problems} problems")
    console.print(Text(f"aiocuda {__version__}: {count} in {len(findings)} checks", style="bold"))
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        word, style = _MARKS[finding.ok]
        name = finding.name.replace("_", " ")
        console.print(Text.assemble((f"{word:7}", style), f"  {name:{width}}  {printable(finding.detail)}"))
        if finding.cure:
            console.print(Text(f"{'':7}  {'':{width}}  cure: {printable(finding.cure)}", style="bold"))
