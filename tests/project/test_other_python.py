"""Pythons beside the default: which are found, and that no other is named than those that the tests ran on."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests import other_python
from tests.project.tree import ROOT


def test_classifiers_name_the_versions_of_the_table_and_no_other() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        classifiers = tomllib.load(file)["project"]["classifiers"]
    named = {line.rpartition(" ")[2] for line in classifiers if re.fullmatch(r"Programming .* :: 3\.\d+", line)}
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Where it runs")[2].partition("\n## ")[0]
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


def test_newest_that_works_comes_first_and_never_the_default(path: Path) -> None:
    here = sys.version_info.minor
    fake_python(path, 15, "echo 3.15 candidate")
    fake_python(path, 14, "exit 1")
    fake_python(path, 18, "echo 3.18 final")
    fake_python(path, 17, "echo 3.17 final")
    fake_python(path, here, f"echo 3.{here} final")
    assert [version for version, _ in other_python.others()] == [(3, 18), (3, 17)]


def test_none_is_said_and_no_failure(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = path / "environment"
    other_python.prepare(place)
    assert not place.exists()
    assert other_python.run(place) == 0
    assert capsys.readouterr().out.count("no other Python here") == 2


def test_what_it_needs_is_what_the_project_names() -> None:
    names = {other_python._name(line) for line in other_python.requirements()}
    assert names >= {"numpy", "anyio", "structlog", "cuda-core", *other_python.WANTED}
