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


#: Answers as a Python does: to the question for its version, and to the commands of a set-up and of a run.
FAKE = """#!/bin/sh
echo "$2" >> {folder}/calls
case "$2" in
venv) /bin/mkdir -p "$3/bin" && /bin/cp "$0" "$3/bin/python" ;;
pip) exit {pip} ;;
pytest) exit {pytest} ;;
*) echo 3.{minor} {level} 3.{minor}.1 ;;
esac
"""


def fake_python(folder: Path, minor: int, level: str = "final", *, pip: int = 0, pytest: int = 0) -> Path:
    command = folder / f"python3.{minor}"
    command.parent.mkdir(exist_ok=True)
    command.write_text(FAKE.format(folder=folder, minor=minor, level=level, pip=pip, pytest=pytest))
    command.chmod(0o755)
    return command


def calls(folder: Path) -> list[str]:
    """Return the modules that the fakes of a folder ran since the last call."""
    found = [line for line in (folder / "calls").read_text().splitlines() if line in ("venv", "pip", "pytest")]
    (folder / "calls").unlink()
    return found


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    return tmp_path


def test_newest_working_version_is_first_and_the_default_is_none(path: Path) -> None:
    fake_python(path, 15, "candidate")
    (path / "python3.14").write_text("#!/bin/sh\nexit 1\n")
    (path / "python3.14").chmod(0o755)
    fake_python(path, 18)
    fake_python(path, 17)
    fake_python(path, sys.version_info.minor)
    assert [each.version for each in other_python.others()] == [(3, 18), (3, 17)]


def test_no_other_version_is_no_failure(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = path / "environment"
    other_python.prepare(place)
    assert not place.exists()
    assert other_python.run(place) == 0
    assert capsys.readouterr().out.count("no other Python here") == 2


def test_newest_version_that_can_be_set_up_runs_the_tests(path: Path) -> None:
    fake_python(path, 18, pip=1)
    fake_python(path, 17, pytest=1)
    other_python.prepare(path / "environments")
    assert calls(path) == ["venv", "pip", "venv", "pip"]
    assert other_python.run(path / "environments") == 1
    assert calls(path) == ["pytest"]


def test_each_version_runs_the_fast_tests_and_those_that_fail_are_named(
    path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setattr(sys, "executable", str(fake_python(path, 11)))
    fake_python(path, 17, pytest=1)
    fake_python(path, 18, pip=1)
    given = [str(fake_python(elsewhere, 19, "candidate")), str(elsewhere / "none"), str(fake_python(elsewhere, 10))]
    assert other_python.run_all(path / "environments", given, ["-x"]) == 4
    assert capsys.readouterr().out.splitlines()[-6:] == [
        f"Python {given[1]}: does not start, is older than 3.11, or has no GIL",
        f"Python {given[2]}: does not start, is older than 3.11, or has no GIL",
        "Python 3.11.1: passed",
        "Python 3.17.1: failed, status 1",
        "Python 3.18.1: cannot be set up",
        "Python 3.19.1: passed",
    ]
    assert calls(path) == ["pytest", "venv", "pip", "pip", "pytest", "venv", "pip"]
    assert calls(elsewhere) == ["venv", "pip", "pip", "pytest"]
    other_python.run_all(path / "environments", [], [])
    assert calls(path) == ["pytest", "pytest", "venv", "pip"]  # nothing is installed again


def test_requirements_are_those_of_the_project() -> None:
    names = {other_python._name(line) for line in other_python.requirements()}
    assert names >= {"numpy", "anyio", "structlog", "cuda-python", *other_python.WANTED}
    more = {other_python._name(line) for line in other_python.more_requirements()}
    assert more >= {"distributed", "typer"}
    assert not more & {*names, *other_python.UNWANTED}
