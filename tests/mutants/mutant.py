"""A mutant: a copy of the package with one bug planted in it, and what the simulator says to that."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import aiocuda

__all__ = ["MUTANTS", "Mutant", "StalePatchError", "Verdict", "simulate"]

HERE = Path(__file__).parent
PACKAGE = Path(aiocuda.__file__).parent

#: A mutant is given seeds from so many before the first one that is known to kill it.
BEFORE = 2

#: So many of them, and more where it takes long: a change of the library moves which ones kill.
SPAN = 20
MOST_MORE = 200

#: A first line says what is wrong, the second which invariants may find it, and the first seed that did.
HEADER = re.compile(r"\A# (?P<what>.+)\n# (?P<expected>(?:[VP]\d+ )+)by seed (?P<seed>\d+)\n")

HUNK = re.compile(r"^@@ .*\n((?:[ +-].*\n|\n)+)", re.MULTILINE)


class StalePatchError(Exception):
    """What a patch is to change is not there, or not once."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the simulator said."""

    code: int
    output: str

    @property
    def seed(self) -> int | None:
        """The seed that ended it; None if all passed."""
        found = re.search(r"^seed (\d+): ", self.output, re.MULTILINE)
        return None if found is None else int(found[1])

    @property
    def violated(self) -> str | None:
        """The first violation's id."""
        found = re.search(r"^seed \d+: (\w+)", self.output, re.MULTILINE)
        return None if found is None else found[1]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One patch."""

    path: Path
    what: str
    expected: tuple[str, ...]
    seed: int

    @classmethod
    def read(cls, path: Path) -> Mutant:
        header = HEADER.match(path.read_text(encoding="utf-8"))
        assert header is not None, f"{path.name} begins with `# what is wrong` and `# V1 V2 by seed 0`"
        return cls(path, header["what"], tuple(header["expected"].split()), int(header["seed"]))

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def first(self) -> int:
        """The first seed that it is given."""
        return max(0, self.seed - BEFORE)

    @property
    def seeds(self) -> int:
        """How many it is given."""
        return SPAN + min(self.seed, MOST_MORE)

    def plant(self, tree: Path) -> None:
        """Copy the package into a directory, and change it. Lines are found by what they say, wherever they stand."""
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
                        f"{self.path.name} no longer applies: this stands {text.count(before)} times in "
                        f"{file.relative_to(tree)}:\n\n{before}\nPlant the same bug in src by hand, and put "
                        f"`git diff src` under the two comment lines of {self.path}; take it out of src again; then "
                        "`python -m tests.mutants` finds the seed that kills it"
                    )
                text = text.replace(before, after)
            file.write_text(text, encoding="utf-8")
            for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
                compiled.unlink()  # it may be taken for that of the new text, if that was written in the same second


def simulate(tree: Path, first: int, seeds: int, *, seconds: float = 60.0) -> Verdict:
    """``python -m aiocuda.testing simulate`` with the package that is in a directory."""
    command = [sys.executable, "-m", "aiocuda.testing", "simulate", "--first", str(first), "--seeds", str(seeds)]
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Verdict(-1, f"it went on for more than {seconds:g} s, from seed {first} on")
    return Verdict(done.returncode, done.stdout + done.stderr)


MUTANTS = [Mutant.read(path) for path in sorted(HERE.glob("*.patch"))]
