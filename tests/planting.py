"""Planted bugs: copies of the package with a change that makes it wrong, and the tests that must find each of them."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

import aiocuda
from tests.budget import part_of
from tests.project.tree import ROOT

__all__ = ["PACKAGE", "Bug", "Change", "StaleBugError", "plant", "planted_tests", "run_python"]

PACKAGE = Path(aiocuda.__file__).parent

Test: TypeAlias = Callable[..., None]


class StaleBugError(Exception):
    """The lines that a bug changes are not in the source, or not exactly once."""


class Change(NamedTuple):
    """A change of one file of the package."""

    file: str  #: its path in the package
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Bug:
    """A change of one module that makes its package wrong.

    Attributes
    ----------
    name
    what
        What is wrong, in one sentence.
    module
        In the package.
    before, after
        The lines, and their replacement.
    test
        The test that finds it; None for the random programs of the package.
    first
        The first of the random programs that its test runs: a bit before the one that finds it.
    """

    name: str
    what: str
    module: str
    before: str
    after: str
    test: str | None = None
    first: int = 0


#: The number of random programs, from the first one on, of which one must find a bug. The others do not run.
SEEDS = 1000


def plant(tree: Path, changes: Iterable[Change]) -> None:
    """Copy the package into a directory, with changes.

    A core that was changed is compiled again if ``AIOCUDA_CORE`` asks for that form. Otherwise it runs in Python: its
    extension is older than its source.
    """
    package = tree / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.pyc.*"))  # which an import is writing
    for change in changes:
        file = package / change.file
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        count = text.count(change.before)
        if count != 1:
            raise StaleBugError(f"{PACKAGE.name}/{change.file} has {count} times:\n\n{change.before}")
        file.write_text(text.replace(change.before, change.after), encoding="utf-8")
        # A compiled file of the same size and second would be used in place of the new text.
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()
    if os.environ.get("AIOCUDA_CORE") == "compiled":
        run_python(tree, "-m", "aiocuda._core.build").check_returncode()


def run_python(tree: Path, *arguments: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the project, with the package that is in a directory."""
    path = os.pathsep.join(filter(None, (str(tree), str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def planted_tests(
    bugs: Sequence[Bug], *, package: str, simulation: str, seeds: int, programs: int, soak: int
) -> tuple[Test, Test]:
    """Return the two tests of a package: each bug is found, and random programs break no rule of the unchanged package.

    What finds a bug passes with the unchanged package. The programs run in a process of their own: they collect
    garbage, and the objects of other tests would make that slow.

    Parameters
    ----------
    bugs
    package
        In which their modules are.
    simulation
        The module that runs the random programs.
    programs, seeds, soak
        The number of programs without a bug: `make test` runs a part of the first number, the heavy tests the second,
        and the soak the third. A program after ``seeds`` that finds a bug runs with the unchanged package, too.
    """

    @pytest.mark.heavy
    @pytest.mark.slow
    @pytest.mark.parametrize("bug", bugs, ids=lambda bug: bug.name)
    def test_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
        plant(tmp_path, [Change(f"{package}/{bug.module}", bug.before, bug.after)])
        if bug.test is None:
            command, report = ["-m", simulation, "--first", str(bug.first), "--seeds", str(SEEDS)], "seed "
        else:
            command, report = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", bug.test], "1 failed"
        ended = run_python(tmp_path, *command, seconds=300)
        assert ended.returncode == 1, ended.stdout[-3000:] + ended.stderr[-3000:]
        assert report in ended.stdout, ended.stdout[-3000:]
        found = re.search(r"^seed (\d+): ", ended.stdout, re.MULTILINE)
        if found is not None and int(found[1]) >= seeds:
            ended = run_python(PACKAGE.parent, "-m", simulation, "--first", found[1], "--seeds", "1")
            assert ended.stdout == "1 programs, no violation\n", ended.stdout[-3000:] + ended.stderr[-3000:]

    numbers = [
        part_of(programs),
        pytest.param(seeds, marks=pytest.mark.heavy),
        pytest.param(soak, marks=pytest.mark.soak),
    ]

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("programs", numbers)
    def test_random_programs_break_no_rule(programs: int) -> None:
        ended = run_python(PACKAGE.parent, "-m", simulation, "--seeds", str(programs))
        assert ended.stdout == f"{programs} programs, no violation\n", ended.stdout[-3000:] + ended.stderr[-3000:]

    return test_planted_bug_is_found, test_random_programs_break_no_rule
