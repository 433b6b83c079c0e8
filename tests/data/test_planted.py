"""Each planted bug of the data loader is found by its test, and the unchanged loader passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.planted import BUGS, Bug
from tests.planting import StaleBugError
from tests.random_programs import run_programs


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    bug.check_found(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "programs",
    [
        20,
        pytest.param(Bug.seeds, marks=pytest.mark.heavy),  # those that find the planted bugs
        pytest.param(10_000, marks=pytest.mark.soak),
    ],
)
def test_random_programs_break_no_rule(programs: int) -> None:
    run_programs(Bug.simulation, programs)


def test_a_bug_whose_lines_have_changed_is_reported(tmp_path: Path) -> None:
    stale = Bug("old", "Nothing.", "_epoch.py", "these lines never were", "")
    with pytest.raises(StaleBugError, match=r"old: _epoch\.py has 0 times:\nthese lines never were"):
        stale.plant(tmp_path)
