"""The GPU tests run from the source tree, with few packages beside pytest, as on many GPU machines."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.project.tree import ROOT, SOURCE

pytestmark = pytest.mark.slow

#: The packages on such a machine: those that aiocuda requires, pytest and pytest-asyncio, and their requirements.
THERE = {
    *("anyio", "cuda-bindings", "cuda-core", "cuda-pathfinder", "cuda-python", "numpy", "structlog"),
    *("pytest", "pytest-asyncio", "iniconfig", "packaging", "pluggy", "pygments", "idna", "typing-extensions"),
}

#: Runs pytest in an interpreter that can import only these packages.
BARE = f"""
    import importlib.metadata, re, sys

    class Absent:
        owners = importlib.metadata.packages_distributions()

        def find_spec(self, name, path=None, target=None):
            owners = self.owners.get(name.partition(".")[0])
            if owners and not {THERE!r}.intersection(re.sub("[._-]+", "-", owner).lower() for owner in owners):
                if "aiocuda" not in owners:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    sys.meta_path.insert(0, Absent())
    import pytest
    sys.exit(pytest.main(sys.argv[1:]))
"""

FULL = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


def gpu_tests(program: str) -> set[str]:
    """Return the ids of the GPU tests."""
    command = [sys.executable, "-c", textwrap.dedent(program), "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, "--collect-only", "--quiet", "-m", "gpu", "tests"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}, output
    # uvloop is optional, and adds tests.
    found = {line for line in finished.stdout.splitlines() if "::" in line}
    return {line for line in found if "uvloop" not in line}


@pytest.mark.heavy
def test_gpu_tests_need_no_other_packages() -> None:
    assert gpu_tests(BARE) == gpu_tests(FULL)
