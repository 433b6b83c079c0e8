"""Run the tests of the drivers and of completion on the newest other Python.

``python -m tests.other_python prepare DIR`` creates an environment of it, once, with the packages that these tests
need; ``… run DIR`` runs them there, offline. Without another Python that is new enough, it prints that and succeeds.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.project.tree import ROOT, SOURCE

#: Unit tests, the conformance suite, and what an event loop does differently from version to version.
TESTS = ("tests/driver", "tests/completion", "tests/test_shutdown.py")

#: What they need beside what aiocuda requires, as `pyproject.toml` names it.
WANTED = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")

_ASK = """
import sys, venv, ensurepip
assert getattr(sys, "_is_gil_enabled", lambda: True)()
print("%d.%d" % sys.version_info[:2], sys.version_info.releaselevel)
"""


def others() -> list[tuple[tuple[int, int], str]]:
    """(version, command) of each other Python that is new enough, the newest first."""
    found: dict[tuple[int, int], str] = {}
    for command in _candidates():
        told = subprocess.run([command, "-c", _ASK], capture_output=True, text=True, timeout=30, check=False)
        if told.returncode == 0:
            version, level = told.stdout.split()
            major, minor = map(int, version.split("."))
            if level == "final" and (major, minor) >= (3, 11) and (major, minor) != sys.version_info[:2]:
                found.setdefault((major, minor), command)
    return sorted(found.items(), reverse=True)


def _candidates() -> Iterator[str]:
    for minor in range(11, 20):
        command = shutil.which(f"python3.{minor}")
        if command is not None:
            yield command
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))  # whose commands run only the selected version
    yield from map(str, sorted(pyenv.glob("versions/3.*/bin/python")))


def requirements() -> list[str]:
    """What aiocuda requires, and the tests."""
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    everything = [
        *project["project"]["optional-dependencies"]["testing"],
        *project["dependency-groups"]["dev"],
    ]
    return [*project["project"]["dependencies"], *(line for line in everything if _name(line) in WANTED)]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def prepare(place: Path) -> None:
    """An environment of the newest one for which there is all that it takes."""
    for version, command in others():
        shutil.rmtree(place, ignore_errors=True)
        name = ".".join(map(str, version))
        steps = [
            [command, "-m", "venv", str(place)],
            [_python(place), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *requirements()],
        ]
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                say(f"Python {name} is there, and cannot be set up: {done.stderr.strip()[-2000:]}")
                break
        else:
            say(f"Python {name}: {command}")
            return
    shutil.rmtree(place, ignore_errors=True)
    say("no other Python here to run the tests with")


def run(place: Path) -> int:
    """The tests' exit status."""
    if not place.exists():
        say("no other Python here: nothing was run with one")
        return 0
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [
        *(_python(place), "-m", "pytest", "-q", "-r", "fE", "--timeout", "120", "-o", "cache_dir=.pytest_cache/other"),
        *("-m", "not slow and not heavy and not soak and not gpu", *TESTS),
    ]
    return subprocess.run(command, cwd=ROOT, env={**environment, "PYTHONPATH": str(SOURCE)}, check=False).returncode


def _python(place: Path) -> str:
    return str(place / "bin" / "python")


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("place", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "run":
        return run(arguments.place)
    prepare(arguments.place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
