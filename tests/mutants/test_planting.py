"""The command of random programs, and the tests of planted bugs that `planted_tests` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

import aiocuda
from tests.planting import Bug, Change, StaleBugError, plant, planted_tests, run_python
from tests.random_programs import Violation, check, command

#: A module of random programs: seed 3 breaks a rule if the package has a wrong version, seed 2000 always.
PROGRAMS = """
import sys
import aiocuda
from tests.random_programs import check, command

def run(seed):
    check("R1", seed != 3 or aiocuda.__version__ != "planted", "the version is wrong")
    check("R3", seed != 2000, "always wrong")

sys.exit(command(run, "programs", ""))
"""


def run(seed: int) -> None:
    check("R2", seed != 12, "twelve")


def test_command_stops_at_the_first_violation(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, "programs", "", ["--first", "10", "--seeds", "5"]) == 1
    assert capsys.readouterr().out == "seed 12: R2 twelve\n"
    assert command(run, "programs", "", ["--seeds", "12"]) == 0
    assert capsys.readouterr().out == "12 programs, no violation\n"
    with pytest.raises(Violation, match="R2 twelve"):
        command(run, "programs", "", ["--first", "12", "--raise"])


def test_bug_whose_lines_have_changed_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StaleBugError, match=r"aiocuda/errors\.py has 0 times:\n\nthese lines never were"):
        plant(tmp_path, [Change("errors.py", "these lines never were", "")])


@pytest.mark.slow
def test_only_a_bug_that_the_programs_find_counts_as_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "programs.py").write_text(PROGRAMS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    version = run_python(tmp_path, "-c", "import aiocuda; print(end=aiocuda.__version__)").stdout
    bugs = [
        Bug("found", "The version is another one.", "__init__.py", f'__version__ = "{version}"', after)
        for after in ('__version__ = "planted"', '__version__ = "harmless"')
    ]
    found, healthy = planted_tests(bugs, package=".", simulation="programs", seeds=5, programs=4, soak=9)
    healthy(4)
    found(bugs[0], tmp_path / "found")
    with pytest.raises(AssertionError, match="1000 programs, no violation"):
        found(bugs[1], tmp_path / "harmless")


@pytest.mark.slow
def test_program_that_finds_a_bug_must_pass_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "programs.py").write_text(PROGRAMS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    version = f'__version__ = "{aiocuda.__version__}"'
    bugs = [
        Bug("wrong", "The version is another one.", "__init__.py", version, '__version__ = "planted"', first=first)
        for first in (2, 1990)
    ]
    found, _ = planted_tests(bugs, package=".", simulation="programs", seeds=3, programs=4, soak=9)
    found(bugs[0], tmp_path / "seed 3")
    with pytest.raises(AssertionError, match="seed 2000: R3 always wrong"):
        found(bugs[1], tmp_path / "seed 2000")
