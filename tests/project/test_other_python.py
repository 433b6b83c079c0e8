"""Other Python versions: which are found, and which the project names."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests import other_python
from tests.project.tree import ROOT


def test_classifiers_are_the_versions_of_the_table() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        classifiers = tomllib.load(file)["project"]["classifiers"]
    named = {line.rpartition(" ")[2] for line in classifiers if re.fullmatch(r"Programming .* :: 3\.\d+", line)}
    table = (
        (ROOT / "docs" / "how-to" / "install.md")
        .read_text(encoding="utf-8")
        .partition("## Where it runs")[2]
        .partition("\n## ")[0]
    )
    assert named == set(re.findall(r"^\| Linux, Python (3\.\d+)", table, re.MULTILINE))


def fake_python(folder: Path, minor: int, answer: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / f"python3.{minor}"
    command.write_text(f"#!/bin/sh\n{answer}\n")
    command.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    return tmp_path


def test_newest_working_version_is_first_and_the_default_is_none(path: Path) -> None:
    here = sys.version_info.minor
    fake_python(path, 15, "echo 3.15 candidate")
    fake_python(path, 14, "exit 1")
    fake_python(path, 18, "echo 3.18 final")
    fake_python(path, 17, "echo 3.17 final")
    fake_python(path, here, f"echo 3.{here} final")
    assert [version for version, _ in other_python.others()] == [(3, 18), (3, 17)]


def test_no_other_version_is_no_failure(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = path / "environment"
    other_python.prepare(place)
    assert not place.exists()
    assert other_python.run(place) == 0
    assert capsys.readouterr().out.count("no other Python here") == 2


def test_requirements_are_those_of_the_project() -> None:
    names = {other_python._name(line) for line in other_python.requirements()}
    assert names >= {"numpy", "anyio", "structlog", "cuda-python", *other_python.WANTED}
