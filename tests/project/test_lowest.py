"""The lowest versions of the requirements: which they are, and what happens without a package index."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import lowest, other_loaders
from tests.project.tree import ROOT


def test_each_requirement_gets_its_lowest_version() -> None:
    project = {
        "project": {
            "dependencies": ["numpy>=2.1", "cuda-python>=12.9; sys_platform != 'darwin'"],
            "optional-dependencies": {extra: [f"{extra}-package>=3"] for extra in lowest.EXTRAS},
        },
        "dependency-groups": {"dev": ["opentelemetry-sdk>=1.30", "ruff>=0.14"]},
    }
    extras = [f"{extra}-package==3" for extra in lowest.EXTRAS]
    assert lowest.lowest(project) == [
        "numpy==2.1", "cuda-python==12.9; sys_platform != 'darwin'", *extras, "opentelemetry-sdk==1.30"
    ]  # fmt: skip


@pytest.mark.slow
def test_missing_index_is_a_reason_and_leaves_no_environment_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    place = tmp_path / "environment"
    for _ in range(2):
        reason = lowest.prepare(place, sys.executable, ["structlog==24.4"])
        assert reason is not None
        assert reason.startswith("no package index answers: ERROR: No matching distribution found for structlog==24.4")


def test_python_that_is_not_here_is_none() -> None:
    assert lowest.interpreter("{}.{}".format(*sys.version_info)) == sys.executable
    assert lowest.interpreter("3.99") is None


def test_tests_that_run_in_environments_of_their_own_exist() -> None:
    assert lowest.TESTS
    for test in (*lowest.TESTS, *other_loaders.TESTS):
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")
