"""Each planted bug of the data loader is found by its test, and the unchanged loader passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.planted import BUGS, PACKAGE, SEEDS, Bug, StaleBugError
from tests.project.tree import ROOT


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    bug.plant(tmp_path)
    ended = bug.found(tmp_path)
    assert ended.returncode == 1, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "seed " in ended.stdout if bug.test is None else "1 failed" in ended.stdout, ended.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "programs",
    [
        20,
        pytest.param(SEEDS, marks=pytest.mark.heavy),  # those that find the planted bugs
        pytest.param(10_000, marks=pytest.mark.soak),
    ],
)
def test_random_programs_break_no_rule(programs: int) -> None:
    """In a process of their own: they collect garbage, and the objects of other tests would make that slow."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.data.simulation", "--seeds", str(programs)], cwd=ROOT, capture_output=True,
        text=True, check=False, env=os.environ | {"PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert ended.stdout == f"{programs} programs, no violation\n", ended.stdout[-3000:] + ended.stderr[-3000:]


def test_a_bug_whose_lines_have_changed_is_reported(tmp_path: Path) -> None:
    stale = Bug("old", "Nothing.", "_epoch.py", "these lines never were", "")
    with pytest.raises(StaleBugError, match=r"old: _epoch\.py has 0 times:\nthese lines never were"):
        stale.plant(tmp_path)
