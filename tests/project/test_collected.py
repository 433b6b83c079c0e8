"""The tests that docs/reference and the table of bad input name exist; those of a promise run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.bad_input.elsewhere import ELSEWHERE
from tests.project.collecting import collect
from tests.project.features import read
from tests.project.tree import ROOT

REFERENCE = ROOT / "docs" / "reference"


def named(page: str) -> set[str]:
    """Return the tests in the table of a page."""
    return {test for row in read((REFERENCE / page).read_text(encoding="utf-8")) for test in row.tests}


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
def test_named_tests_exist_and_those_of_a_promise_run(tmp_path: Path) -> None:
    proofs = named("promises.md") | {test for tests in ELSEWHERE.values() for test in tests}
    tests = proofs | named("features.md")
    files = sorted({test.partition("::")[0] for test in tests})
    assert [file for file in files if not (ROOT / file).is_file()] == []
    samples = tmp_path / "test_samples.py"
    samples.write_text(SAMPLES, encoding="utf-8")
    found = collect([*files, str(samples)])
    assert sorted(tests - found.keys()) == []
    assert sorted(test for test in proofs if not found[test]) == []
    samples_of = set(re.findall(r"def (\w+)", SAMPLES))
    judged = {name.rpartition("::")[2]: runs for name, runs in found.items() if name.rpartition("::")[2] in samples_of}
    assert [name for name, runs in judged.items() if runs] == ["test_sample_left_out_in_part"]
    assert len(judged) == 5


def test_every_promise_has_a_test_and_a_figure() -> None:
    rows = read((REFERENCE / "promises.md").read_text(encoding="utf-8"))
    assert [row.id for row in rows] == [f"P{number}" for number in range(1, 41) if number != 29]
    assert [row.id for row in rows if not row.tests] == []
    assert [row.id for row in rows if not re.search(r"\d|counted", row.figure)] == []
    for file, _, name in (published.partition("#") for row in rows for published in row.names):
        assert name in {each["name"] for each in json.loads((ROOT / file).read_text(encoding="utf-8"))["rows"]}
