"""import-linter finds no violation of the layers in the package, and finds each one that is planted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import PACKAGE, ROOT

pytestmark = pytest.mark.slow


def lint(tree: Path, config: str = "pyproject.toml") -> tuple[int, str]:
    """Run import-linter on the package in a folder. Return its exit code and output."""
    pytest.importorskip("importlinter")
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    finished = subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo", "--config", str(ROOT / config)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return finished.returncode, finished.stdout + finished.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package, to be changed."""
    shutil.copytree(PACKAGE, tmp_path / "aiocuda", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_package_keeps_the_layers(tree: Path) -> None:
    status, output = lint(tree)
    assert status == 0, output
    assert "0 broken" in output


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        pytest.param("errors.py", "from aiocuda import memory", "from lower layers", id="upward"),
        pytest.param("driver/host/__init__.py", "from aiocuda.driver import cuda", "independent", id="sideways"),
        pytest.param("pool/_place.py", "from ..completion import _reactor", "above lowlevel", id="around-lowlevel"),
        pytest.param("data/_batch.py", "from ..device.streams import _stream", "above lowlevel", id="below-lowlevel"),
        pytest.param("driver/protocol.py", "import asyncio", "No event loop", id="asyncio-in-a-driver"),
        pytest.param("driver/host/__init__.py", "import structlog", "no logging in a driver", id="logs-in-a-driver"),
        pytest.param("completion/_alarm.py", "import cuda.bindings.driver", "in one place", id="cuda-elsewhere"),
        pytest.param("driver/host/__init__.py", "from cuda import core", "in one place", id="cuda-in-the-host-driver"),
        pytest.param("completion/_alarm.py", "import rich", "needs the extra", id="extra-elsewhere"),
        pytest.param("cli/__init__.py", "import pytest", "needs the extra", id="extra-of-another"),
    ],
)
def test_planted_violation_is_found(tree: Path, file: str, line: str, broken: str) -> None:
    path = tree / "aiocuda" / file
    with path.open("a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    status, output = lint(tree)
    assert status == 1
    assert [line for line in output.splitlines() if broken in line and "BROKEN" in line]


def test_type_from_above_in_the_core_is_found(tree: Path) -> None:
    status, output = lint(tree, "tests/project/core.importlinter")
    assert status == 0, output
    with (tree / "aiocuda" / "_core" / "_watch.py").open("a", encoding="utf-8") as module:
        module.write("\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..completion import _reactor\n")
    status, output = lint(tree, "tests/project/core.importlinter")
    assert status == 1
    assert "not even a type BROKEN" in output


@pytest.mark.parametrize("place", ["aiocuda/new_module.py", "aiocuda/driver/new_module.py"])
def test_module_without_a_layer_is_found(tree: Path, place: str) -> None:
    (tree / place).write_text('"""A module."""\n', encoding="utf-8")
    status, output = lint(tree)
    assert status == 1
    assert "new_module" in output
