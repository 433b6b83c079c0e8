"""A mutant: a copy of the package with one planted bug, and a run of the simulator on that copy."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.planting import Change, StaleBugError, plant, run_python

__all__ = ["MUTANTS", "Mutant", "Verdict", "simulate"]

HERE = Path(__file__).parent

#: A mutant is run from this many seeds before the first seed that is known to find it.
SEEDS_BEFORE = 2

#: Number of seeds from there on, and the most that are added if the known seed is large. A change of the library
#: changes which seeds find a mutant.
SEEDS = 20
MOST_ADDED = 200

#: The first two lines of a patch: what is wrong; and the invariants that may find it, and the first seed that does.
HEADER = re.compile(r"\A# (?P<bug>.+)\n# (?P<expected>(?:[VP]\d+ )+)by seed (?P<seed>\d+)\n")

HUNK = re.compile(r"^@@ .*\n((?:[ +-].*\n|\n)+)", re.MULTILINE)


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

    def changes(self) -> Iterator[Change]:
        """Yield the hunks. Their lines are found by their text, and not by their numbers."""
        for part in re.split(r"^(?=--- a/)", self.path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            file = part.split("\n", 1)[0].removeprefix("--- a/src/aiocuda/")
            for hunk in HUNK.findall(part):
                lines = hunk.splitlines(keepends=True)
                before = "".join(line[1:] or "\n" for line in lines if line[0] in " -\n")
                after = "".join(line[1:] or "\n" for line in lines if line[0] in " +\n")
                yield Change(file, before, after)

    def plant(self, tree: Path) -> None:
        """Copy the package into a directory and apply the patch there.

        Raises
        ------
        StaleBugError
            A hunk does not match exactly one place.
        """
        try:
            plant(tree, self.changes())
        except StaleBugError as error:
            raise StaleBugError(
                f"{self.path.name} no longer applies: {error}\nPlant the same bug in src by hand, write the output of "
                f"`git diff src` below the two comment lines of {self.path}, and revert src; then `python -m "
                f"tests.mutants {self.name}` finds the first seed"
            ) from None


def simulate(tree: Path, first: int, seeds: int, *, seconds: float = 240.0) -> Verdict:
    """Run ``python -m tests.simulation`` with the package that is in a directory."""
    command = ["-m", "tests.simulation", "--first", str(first), "--seeds", str(seeds)]
    try:
        done = run_python(tree, *command, seconds=seconds)
    except subprocess.TimeoutExpired:
        return Verdict(-1, f"the simulator did not end within {seconds:g} s, from seed {first} on")
    return Verdict(done.returncode, done.stdout + done.stderr)


MUTANTS = [Mutant.read(path) for path in sorted(HERE.glob("*.patch"))]
