"""docs/reference/features.md says what is true: its names resolve. That its tests are there: test_collected.py."""

from __future__ import annotations

import pytest

from tests.project.features import Row, read, resolve
from tests.project.tree import ROOT

PAGE = ROOT / "docs" / "reference" / "features.md"


def missing(rows: list[Row]) -> list[str]:
    """What the rows name and nobody has."""
    found = []
    for row in rows:
        for name in row.names:
            try:
                resolve(name)
            except (AttributeError, ModuleNotFoundError) as error:
                found.append(f"{row.id}: {name}: {error}")
    return found


def test_rows_are_in_order_and_complete() -> None:
    rows = read(PAGE.read_text(encoding="utf-8"))
    ids = [row.id for row in rows]
    assert ids == sorted(set(ids), key=lambda row_id: (row_id[0], int(row_id[1:])))
    assert [row.id for row in rows if not row.names or not row.tests] == []


def test_names_resolve() -> None:
    assert missing(read(PAGE.read_text(encoding="utf-8"))) == []


def test_a_row_is_read_and_a_name_that_is_not_there_is_found() -> None:
    table = "| row | what | names | tests |\n|---|---|---|---|\n| A1 | order | `errors.Nobody`, `AiocudaError` | `t` |"
    (row,) = read(table)
    assert row == Row("A1", "`errors.Nobody`, `AiocudaError`", ("errors.Nobody", "AiocudaError"), ("t",))
    (found,) = missing([row])
    assert found.startswith("A1: errors.Nobody: ")


def test_a_row_with_a_cell_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="row A1 has 5 cells"):
        read("| A1 | a | b | c | d |")
