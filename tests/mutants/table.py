"""The table of mutants in the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutants.mutant import Mutant
from tests.project.tree import ROOT

__all__ = ["HEAD", "PAGE", "table"]

PAGE = ROOT / "docs" / "explanation" / "testing.md"

HEAD = "| mutant | what is wrong | found by | first seed |\n|---|---|---|---|\n"


def table(mutants: Sequence[Mutant]) -> str:
    """Return the table."""
    return HEAD + "".join(
        f"| `{mutant.name}` | {mutant.bug} | {', '.join(mutant.expected)} | {mutant.seed} |\n" for mutant in mutants
    )
