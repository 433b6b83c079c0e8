"""`collect` finds the tests that run; each promise has a test and a figure.

`make check` compares the tests that the reference names with those that exist, see `collecting`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.project.collecting import collect, problems
from tests.project.features import read
from tests.project.tree import ROOT

REFERENCE = ROOT / "docs" / "reference"


#: Four tests that never run, and one that does.
SAMPLES = """
import pytest

@pytest.mark.skip(reason="a sample")
def test_sample_left_out(): ...

@pytest.mark.skipif(True, reason="a sample")
def test_sample_left_out_here(): ...

@pytest.mark.xfail(reason="a sample")
def test_sample_expected_to_fail(): ...

def test_sample_skips_itself():
    pytest.skip("a sample")

@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.skip(reason="a sample")), 2])
def test_sample_left_out_in_part(n): ...
"""


@pytest.mark.slow
def test_collected_tests_run_unless_a_mark_or_a_call_skips_them(tmp_path: Path) -> None:
    samples = tmp_path / "test_samples.py"
    samples.write_text(SAMPLES, encoding="utf-8")
    runs = {name.rpartition("::")[2]: runs for name, runs in collect([str(samples)]).items()}
    assert runs.keys() == set(re.findall(r"def (\w+)", SAMPLES))
    assert [name for name, does in runs.items() if does] == ["test_sample_left_out_in_part"]


@pytest.mark.slow
def test_missing_files_and_tests_are_found() -> None:
    here = "tests/project/test_collected.py::test_missing_files_and_tests_are_found"
    tests = {"tests/project/test_none.py::test_x", "tests/project/test_collected.py::test_none", here}
    assert problems(tests, {here}) == [
        "tests/project/test_none.py does not exist",
        "tests/project/test_collected.py::test_none does not exist",
        "tests/project/test_none.py::test_x does not exist",
    ]


def test_every_promise_has_a_test_and_a_figure() -> None:
    rows = read((REFERENCE / "promises.md").read_text(encoding="utf-8"))
    assert [row.id for row in rows] == [f"P{number}" for number in range(1, 42) if number != 29]
    assert [row.id for row in rows if not row.tests] == []
    assert [row.id for row in rows if not re.search(r"\d|counted", row.figure)] == []
    for file, _, name in (published.partition("#") for row in rows for published in row.names):
        assert name in {each["name"] for each in json.loads((ROOT / file).read_text(encoding="utf-8"))["rows"]}
