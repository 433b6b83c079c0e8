"""A mutant: a copy of the package with one planted bug, and a run of the simulator on that copy."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import aiocuda
from tests.planting import compile_core
from tests.project.tree import ROOT

__all__ = ["MUTANTS", "Mutant", "StalePatchError", "Verdict", "simulate"]

HERE = Path(__file__).parent
PACKAGE = Path(aiocuda.__file__).parent

#: A mutant is run from this many seeds before the first seed that is known to find it.
SEEDS_BEFORE = 2

#: Number of seeds from there on, and the most that are added if the known seed is large. A change of the library
#: changes which seeds find a mutant.
SEEDS = 20
MOST_ADDED = 200

#: The first two lines of a patch: what is wrong; and the invariants that may find it, and the first seed that does.
HEADER = re.compile(r"\A# (?P<bug>.+)\n# (?P<expected>(?:[VP]\d+ )+)by seed (?P<seed>\d+)\n")

HUNK = re.compile(r"^@@ .*\n((?:[ +-].*\n|\n)+)", re.MULTILINE)


class StalePatchError(Exception):
    """The lines that a patch changes are not in the source, or not exactly once."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The exit code and the output of the simulator."""

    code: int
    output: str

    @property
    def seed(self) -> int | None:
        """The seed that violated an invariant; None if all passed."""
        found = re.search(r"^seed (\d+): ", self.output, re.MULTILINE)
        return None if found is None else int(found[1])

    @property
    def violated(self) -> str | None:
        """The id of the first violated invariant."""
        found = re.search(r"^seed \d+: (\w+)", self.output, re.MULTILINE)
        return None if found is None else found[1]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One patch.

    Attributes
    ----------
    path : Path
        The file.
    bug : str
        What is wrong, in one sentence.
    expected : tuple of str
        The ids of the invariants that the bug violates.
    seed : int
        The first seed that finds it.
    """

    path: Path
    bug: str
    expected: tuple[str, ...]
    seed: int

    @classmethod
    def read(cls, path: Path) -> Mutant:
        header = HEADER.match(path.read_text(encoding="utf-8"))
        assert header is not None, f"{path.name} must begin with `# what is wrong` and `# V1 V2 by seed 0`"
        return cls(path, header["bug"], tuple(header["expected"].split()), int(header["seed"]))

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def first(self) -> int:
        """The first seed that the test runs."""
        return max(0, self.seed - SEEDS_BEFORE)

    @property
    def seeds(self) -> int:
        """The number of seeds that the test runs."""
        return SEEDS + min(self.seed, MOST_ADDED)

    def plant(self, tree: Path) -> None:
        """Copy the package into a directory and apply the patch there. Its lines are found by their text.

        Raises
        ------
        StalePatchError
            A hunk does not match exactly one place.
        """
        package = tree / PACKAGE.name
        shutil.copytree(PACKAGE, package)
        for part in re.split(r"^(?=--- a/)", self.path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            file = package / part.split("\n", 1)[0].removeprefix("--- a/src/aiocuda/")
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            for hunk in HUNK.findall(part):
                lines = hunk.splitlines(keepends=True)
                before = "".join(line[1:] or "\n" for line in lines if line[0] in " -\n")
                after = "".join(line[1:] or "\n" for line in lines if line[0] in " +\n")
                if text.count(before) != 1:
                    raise StalePatchError(
                        f"{self.path.name} no longer applies: {file.relative_to(tree)} has {text.count(before)} times:"
                        f"\n\n{before}\nPlant the same bug in src by hand, write the output of `git diff src` below "
                        f"the two comment lines of {self.path}, and revert src; then `python -m tests.mutants "
                        f"{self.name}` finds the first seed"
                    )
                text = text.replace(before, after)
            file.write_text(text, encoding="utf-8")
            # A compiled file of the same size and second would be used in place of the new text.
            for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
                compiled.unlink()
        compile_core(tree)


def simulate(tree: Path, first: int, seeds: int, *, seconds: float = 60.0) -> Verdict:
    """Run ``python -m tests.simulation`` with the package that is in a directory.

    The directory comes first on the path, so that `tests.simulation` imports the mutated copy.
    """
    command = [sys.executable, "-m", "tests.simulation", "--first", str(first), "--seeds", str(seeds)]
    path = os.pathsep.join(filter(None, [str(tree), str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Verdict(-1, f"the simulator did not end within {seconds:g} s, from seed {first} on")
    return Verdict(done.returncode, done.stdout + done.stderr)


MUTANTS = [Mutant.read(path) for path in sorted(HERE.glob("*.patch"))]
