"""Each planted bug of `Scope` is found by its test, and random programs that end objects break no rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lives.planted import BUGS, Bug
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
        30,
        pytest.param(Bug.seeds, marks=pytest.mark.heavy),
        pytest.param(10_000, marks=pytest.mark.soak),
    ],
)
def test_random_programs_break_no_rule(programs: int) -> None:
    run_programs(Bug.simulation, programs)
