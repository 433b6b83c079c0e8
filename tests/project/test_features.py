"""Features name public names that exist, and guarantees promises. `test_collected` checks the tests that they name."""

from __future__ import annotations

import re

import pytest

from tests.project.features import Row, read, resolve
from tests.project.tree import ROOT

PAGE = ROOT / "docs" / "reference" / "features.md"

GUARANTEES = ROOT / "docs" / "explanation" / "guarantees.md"
PROMISES = ROOT / "docs" / "reference" / "promises.md"


def missing(rows: list[Row]) -> list[str]:
    """Return the names in the rows that do not exist."""
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
    pytest.importorskip("nvtx")  # has no wheel for the newest Python at first
    assert missing(read(PAGE.read_text(encoding="utf-8"))) == []


def test_each_of_the_twenty_guarantees_is_a_promise() -> None:
    text = GUARANTEES.read_text(encoding="utf-8")
    sentences = re.findall(r"^(\d+)\. (.*(?:\n +.*)*)", text, re.MULTILINE)
    assert [int(number) for number, _ in sentences] == [*range(1, 21)]
    promises = {row.id for row in read(PROMISES.read_text(encoding="utf-8"))}
    named = {number: {*re.findall(r"\[(P\d+)\]", sentence)} for number, sentence in sentences}
    assert {number: found for number, found in named.items() if not found or found - promises} == {}


def test_missing_name_is_found() -> None:
    table = "| row | what | names | tests |\n|---|---|---|---|\n| A1 | order | `errors.Unknown`, `AiocudaError` | `t` |"
    (row,) = read(table)
    assert row == Row("A1", "`errors.Unknown`, `AiocudaError`", ("errors.Unknown", "AiocudaError"), ("t",))
    (found,) = missing([row])
    assert found.startswith("A1: errors.Unknown: ")


def test_row_with_too_many_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="row A1 has 5 cells"):
        read("| A1 | a | b | c | d |")
