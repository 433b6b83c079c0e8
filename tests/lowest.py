"""Run tests with the lowest versions of the requirements.

``python -m tests.lowest DIR`` creates an environment there, once, with the lowest Python and the lowest versions that
`pyproject.toml` allows, and runs tests that use each of these packages. Without that Python, or without a package
index, it prints the reason and succeeds.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.other_python import others, say
from tests.project.tree import ROOT, SOURCE

#: The extras whose packages are installed, and the packages of the group ``dev`` that their tests need.
EXTRAS = ("cli", "nvrtc", "observe", "testing")
WANTED = ("opentelemetry-sdk",)

#: Tests that use each package.
TESTS = (
    "tests/project/test_import.py::test_every_module_can_be_imported",
    "tests/cli/test_doctor.py",  # typer and rich
    "tests/cli/test_main.py::test_demo_writes_text_and_json",
    "tests/cli/test_main.py::test_info_has_the_reason_for_no_gpu",
    "tests/driver/cuda/test_compiler.py",  # cuda-pathfinder, NVRTC and CUDA's headers
    "tests/stream/test_stream.py",  # anyio
    "tests/memory/test_dlpack.py",  # NumPy, as the next ones
    "tests/memory/test_host_dlpack.py",
    "tests/memory/test_array_interface.py",
    "tests/memory/test_shapes.py",
    "tests/observe/test_nvtx.py",
    "tests/observe/test_opentelemetry.py",
    "tests/observe/test_prometheus.py",
    "tests/test_log.py",  # structlog
    "tests/testing/test_fixtures.py",  # pytest, pytest-asyncio and pytest-timeout
)


def lowest(project: dict[str, Any]) -> list[str]:
    """Return the requirements of `pyproject.toml`, each with its lowest version."""
    extras = project["project"]["optional-dependencies"]
    tests = [line for line in project["dependency-groups"]["dev"] if line.startswith(WANTED)]
    lines = [*project["project"]["dependencies"], *(line for extra in EXTRAS for line in extras[extra]), *tests]
    return [line.replace(">=", "==", 1) for line in lines]


def interpreter(version: str) -> str | None:
    """Return the command of a Python version, if it is there."""
    wanted = tuple(map(int, version.split(".")))
    if sys.version_info[:2] == wanted:
        return sys.executable
    return next((python.command for python in others() if python.version == wanted), None)


def prepare(place: Path, command: str, requirements: list[str]) -> str | None:
    """Create the environment, unless it is there. Return the reason why that cannot be done here, or None.

    Raises
    ------
    SystemExit
        A package index answers, and the requirements cannot be installed.
    """
    stamp = place / "requirements.txt"
    text = "\n".join(requirements)
    if stamp.exists() and stamp.read_text() == text:
        return None
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([command, "-m", "venv", "--without-pip", str(place)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", _python(place), "install", "--quiet", "--retries", "1"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", *requirements], cwd=place, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        stamp.write_text(text)
        return None
    if re.search(r"connection broken by|from versions: none", done.stderr):
        return f"no package index answers: {done.stderr.strip().splitlines()[-1]}"
    raise SystemExit(f"the requirements cannot be installed:\n{done.stderr.strip()[-2000:]}")


def run(place: Path) -> int:
    """Return the tests' exit status."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [
        *(_python(place), "-m", "pytest", "-q", "-r", "fE", "--timeout", "600", "-o", "cache_dir=.pytest_cache/lowest"),
        *("-m", "not heavy and not soak and not gpu and not alone", *TESTS),
    ]
    return subprocess.run(command, cwd=ROOT, env={**environment, "PYTHONPATH": str(SOURCE)}, check=False).returncode


def _python(place: Path) -> str:
    return str(place / "bin" / "python")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", type=Path)
    place = parser.parse_args().place.absolute()
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    version = project["project"]["requires-python"].removeprefix(">=")
    command = interpreter(version)
    reason = f"no Python {version} here" if command is None else prepare(place, command, lowest(project))
    if reason is not None:
        say(f"the lowest versions of the requirements are not tried: {reason}")
        return 0
    return run(place)


if __name__ == "__main__":
    sys.exit(main())
