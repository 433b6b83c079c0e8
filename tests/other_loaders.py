"""Run the tests with the loaders of others, and those of the training with PyTorch.

``python -m tests.other_loaders DIR`` creates an environment there, once, with the dependency group ``loaders`` of
`pyproject.toml`, and runs the tests that need it. Without a package index it prints the reason and succeeds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.lowest import prepare
from tests.other_python import say
from tests.project.tree import ROOT, SOURCE

TESTS = ("tests/data/test_other_loaders.py", "tests/examples/test_training.py")


def requirements(project: dict[str, Any]) -> list[str]:
    """Return what aiocuda and its tests require, and the loaders."""
    tables = project["project"]
    return [
        *tables["dependencies"],
        *tables["optional-dependencies"]["testing"],
        *project["dependency-groups"]["loaders"],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", type=Path)
    place = parser.parse_args().place.absolute()
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    reason = prepare(place, sys.executable, requirements(project))
    if reason is not None:
        say(f"the loaders of others are not tried: {reason}")
        return 0
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(place / "bin" / "python"), "-m", "pytest", "-q", "-r", "fEs", "--timeout", "600", *TESTS]
    command += ["-o", "cache_dir=.pytest_cache/other_loaders"]
    return subprocess.run(command, cwd=ROOT, env={**environment, "PYTHONPATH": str(SOURCE)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
