"""Planted bugs: changes of one module that a test of the project must find."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import aiocuda
from tests.project.tree import ROOT

__all__ = ["PACKAGE", "PlantedBug", "StaleBugError", "compile_core"]

PACKAGE = Path(aiocuda.__file__).parent


def compile_core(tree: Path) -> None:
    """Compile the core of a copy of the package again, if it was changed and ``AIOCUDA_CORE`` asks for that form.

    Otherwise a changed core runs in Python: its extension is older than its source.
    """
    if os.environ.get("AIOCUDA_CORE") == "compiled":
        environment = os.environ | {"PYTHONPATH": str(tree)}
        subprocess.run([sys.executable, "-m", "aiocuda._core.build"], env=environment, check=True, capture_output=True)


class StaleBugError(Exception):
    """The lines that a bug changes are not in the source, or not exactly once."""


@dataclasses.dataclass(frozen=True)
class PlantedBug:
    """A change of one module that makes a package wrong. A subclass names the package and its random programs.

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
        The test that finds it; None for the random programs.
    """

    package: ClassVar[str]
    simulation: ClassVar[str]  #: the module that runs the random programs
    seeds: ClassVar[int]  #: how many of them must contain one that finds the bug

    name: str
    what: str
    module: str
    before: str
    after: str
    test: str | None = None

    def plant(self, tree: Path) -> None:
        """Copy the library into a directory, with the bug."""
        copy = tree / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / self.package / self.module
        text = file.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise StaleBugError(f"{self.name}: {self.module} has {text.count(self.before)} times:\n{self.before}")
        file.write_text(text.replace(self.before, self.after), encoding="utf-8")
        compile_core(tree)

    def found(self, tree: Path) -> subprocess.CompletedProcess[str]:
        """Run the test on the library in that directory."""
        if self.test is None:
            command = ["-m", self.simulation, "--seeds", str(self.seeds)]
        else:
            command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", self.test]
        return subprocess.run(
            [sys.executable, *command],
            env=os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def check_found(self, tree: Path) -> None:
        """Plant the bug, run its test, and fail unless the test finds it."""
        self.plant(tree)
        ended = self.found(tree)
        assert ended.returncode == 1, ended.stdout[-3000:] + ended.stderr[-3000:]
        assert "seed " in ended.stdout if self.test is None else "1 failed" in ended.stdout, ended.stdout[-3000:]
