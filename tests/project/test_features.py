"""docs/reference/features.md says what is true: its names resolve, its tests are collected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.features import Row, read, resolve
from tests.project.tree import ROOT

PAGE = ROOT / "docs" / "reference" / "features.md"


def collected(*files: str) -> set[str]:
    """The ids of all tests in these files, parameters left out."""
    if not files:
        return set()
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return {line.partition("[")[0] for line in finished.stdout.splitlines() if "::" in line}


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


@pytest.mark.slow
def test_tests_are_collected() -> None:
    tests = {test for row in read(PAGE.read_text(encoding="utf-8")) for test in row.tests}
    files = sorted({test.partition("::")[0] for test in tests})
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert tests - collected(*files) == set()


@pytest.mark.slow
def test_a_test_that_is_not_there_is_found() -> None:
    here = Path(__file__).relative_to(ROOT).as_posix()
    ids = collected(here)
    assert f"{here}::test_names_resolve" in ids
    assert f"{here}::test_that_nobody_wrote" not in ids


def test_a_row_is_read_and_a_name_that_is_not_there_is_found() -> None:
    table = "| row | what | names | tests |\n|---|---|---|---|\n| A1 | order | `errors.Nobody`, `AiocudaError` | `t` |"
    (row,) = read(table)
    assert row == Row("A1", ("errors.Nobody", "AiocudaError"), ("t",))
    (found,) = missing([row])
    assert found.startswith("A1: errors.Nobody: ")


def test_a_row_with_a_cell_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="row A1 has 5 cells"):
        read("| A1 | a | b | c | d |")
