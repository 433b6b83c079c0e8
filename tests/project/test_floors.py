"""The floors hold, and would not if somebody broke them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import PACKAGE, ROOT

pytestmark = pytest.mark.slow


def lint(tree: Path) -> tuple[int, str]:
    """Exit status and words of import-linter on the package below a folder."""
    pytest.importorskip("importlinter")
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    finished = subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo", "--config", str(ROOT / "pyproject.toml")],
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
    """A copy of the package, to be broken."""
    shutil.copytree(PACKAGE, tmp_path / "aiocuda", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_floors_hold(tree: Path) -> None:
    status, words = lint(tree)
    assert status == 0, words
    assert "0 broken" in words


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        pytest.param("errors.py", "from aiocuda import memory", "lower floors only", id="upward"),
        pytest.param("driver/host/__init__.py", "from aiocuda.driver import cuda", "not each other", id="sideways"),
        pytest.param("driver/protocol.py", "import asyncio", "No event loop", id="asyncio-in-a-driver"),
        pytest.param("driver/host/__init__.py", "import structlog", "no logging in a driver", id="logs-in-a-driver"),
        pytest.param("completion/_policy.py", "import cuda.bindings.driver", "in one place", id="cuda-elsewhere"),
        pytest.param("driver/host/__init__.py", "from cuda import core", "in one place", id="cuda-in-the-host-driver"),
        pytest.param("completion/_policy.py", "import rich", "where that extra is", id="extra-elsewhere"),
        pytest.param("cli/__init__.py", "import pytest", "where that extra is", id="extra-of-another"),
    ],
)
def test_a_broken_floor_is_found(tree: Path, file: str, line: str, broken: str) -> None:
    path = tree / "aiocuda" / file
    with path.open("a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    status, words = lint(tree)
    assert status == 1
    assert [line for line in words.splitlines() if broken in line and "BROKEN" in line]


@pytest.mark.parametrize("place", ["aiocuda/attic.py", "aiocuda/driver/attic.py"])
def test_a_room_without_a_floor_is_found(tree: Path, place: str) -> None:
    (tree / place).write_text('"""Nowhere."""\n', encoding="utf-8")
    status, words = lint(tree)
    assert status == 1
    assert "attic" in words
