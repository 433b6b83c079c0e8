"""What a release needs: the workflows, the page about security, the steps of CONTRIBUTING."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import aiocuda
from tests import wheels
from tests.project.test_contributing import section
from tests.project.test_security import OWN_PROCESSES
from tests.project.tree import PACKAGE, ROOT

GITHUB = ROOT / ".github"


def workflow(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    loaded: dict[str, Any] = yaml.safe_load((GITHUB / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
    return loaded


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_only_the_job_that_publishes_gets_an_identity() -> None:
    """A job that builds or tests runs code of packages, and may only read."""
    given = {(name, job): rights for name in ("tests", "wheels") for job, rights in jobs_with_rights(name).items()}
    assert given == {("wheels", "publish"): {"id-token": "write"}, ("wheels", "release"): {"contents": "write"}}
    steps = workflow("wheels")["jobs"]["publish"]["steps"]
    assert [step.get("run") for step in steps] == [None] * len(steps), "the job that publishes runs no commands"


def jobs_with_rights(name: str) -> dict[str, dict[str, str]]:
    content = workflow(name)
    assert content["permissions"] == {"contents": "read"}
    return {key: job["permissions"] for key, job in content["jobs"].items() if "permissions" in job}


def test_published_is_what_all_builds_have_made() -> None:
    jobs = workflow("wheels")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"wheels", "sources"}
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert {each["arch"] for each in jobs["wheels"]["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}


def test_tests_and_wheels_are_for_the_pythons_of_the_classifiers() -> None:
    content = pyproject()
    classified = set(re.findall(r":: (3\.\d+)", "\n".join(content["project"]["classifiers"])))
    tested = {
        version
        for job in workflow("tests")["jobs"].values()
        for step in job["steps"]
        for version in str(step.get("with", {}).get("python-version", "")).split()
    }
    built = content["tool"]["cibuildwheel"]["build"].split()
    assert tested == classified
    assert {f"cp{version.replace('.', '')}-manylinux_*" for version in classified} == set(built)


def test_read_the_docs_builds_as_make_does() -> None:
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    assert content["build"]["commands"][0] == "make docs PYTHON=python"
    built = re.search(r"^docs: .*\n\t.* (docs/\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert built is not None
    assert f" {built[1]} " in content["build"]["commands"][-1]


def test_security_names_what_listens_and_loads_pickles() -> None:
    text = (GITHUB / "SECURITY.md").read_text(encoding="utf-8")
    for path in OWN_PROCESSES:
        assert path in text or path.rpartition("/")[2] in text, path
    for named in re.findall(r"`(src/[\w/.]+|tests/[\w/.]+)`", text):
        assert (ROOT / named).exists(), named
    for file in ("coordination/_reductions.ptx.xz", "_core/_compiled.pxd"):
        assert (PACKAGE / file).exists()
        assert file.partition(".")[0] in text
    for _, target in re.findall(r"\[([^]]+)\]\(([^)#]+)", text):
        assert (GITHUB / target).exists(), target


def test_the_version_is_in_the_changelog_and_a_release_is_recorded() -> None:
    is_released = ".dev" not in aiocuda.__version__
    heading = aiocuda.__version__ if is_released else "Unreleased"
    assert f"\n## [{heading}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not is_released or (ROOT / "tests" / "project" / "api" / f"{aiocuda.__version__}.json").exists()


def test_what_the_steps_of_a_release_name_is_there() -> None:
    steps = section("Release")
    for path in re.findall(r"`((?:src|docs|tests)/[\w/.-]+|\.\w+/?[\w.]*|[\w.]+\.(?:toml|md))`", steps):
        assert (ROOT / path).exists(), path
    for named in re.findall(r"python -m\s+([\w.]+)", steps):
        assert importlib.util.find_spec(named) is not None, named
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for names in re.findall(r"`make ([a-z ]+)", steps) for name in names.split()} <= set(targets)
    assert (GITHUB / "workflows" / re.findall("workflow `(.*?)`", steps)[0]).exists()


def wheel_of(folder: Path, name: str, content: bytes) -> Path:
    """Return a wheel for Linux with one file."""
    wheel = folder / f"aiocuda-9-cp311-cp311-linux_{os.uname().machine}.whl"
    tag = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_{os.uname().machine}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, content)
        archive.writestr("aiocuda-9.dist-info/METADATA", "Metadata-Version: 2.4\nName: aiocuda\nVersion: 9\n")
        archive.writestr("aiocuda-9.dist-info/WHEEL", tag)
        archive.writestr("aiocuda-9.dist-info/RECORD", f"{name},,\n")
    return wheel


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_make_wheels_names_the_oldest_system_that_can_use_a_wheel(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel")
    source, built = tmp_path / "part.c", tmp_path / "part.so"
    source.write_text("#include <stdlib.h>\nvoid *PyInit_part(void) { return malloc(1); }\n", encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    wheel = wheel_of(tmp_path, "part.so", built.read_bytes())
    assert wheels.repair(wheel) == ""
    (found,) = tmp_path.glob("*.whl")
    assert re.search(r"-manylinux[\w.]+\.whl$", found.name)


@pytest.mark.slow
def test_make_wheels_says_which_wheel_no_index_accepts(tmp_path: Path) -> None:
    """Nothing in it is compiled. Without auditwheel the reason is another one."""
    wheel = wheel_of(tmp_path, "part.py", b"")
    assert wheels.repair(wheel).startswith(f"{wheel.name} is for systems like this one, and no index accepts it: ")
    assert wheel.exists()
