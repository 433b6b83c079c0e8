"""The mutants as the documentation lists them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutants.mutant import HERE, Mutant

__all__ = ["PAGE", "table"]

PAGE = HERE.parent.parent / "docs" / "explanation" / "testing.md"

HEAD = "| mutant | what is wrong | found by | first seed |\n|---|---|---|---|\n"


def table(mutants: Sequence[Mutant]) -> str:
    return HEAD + "".join(
        f"| `{mutant.name}` | {mutant.what} | {', '.join(mutant.expected)} | {mutant.seed} |\n" for mutant in mutants
    )
