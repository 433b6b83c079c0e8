"""The content of the wheel and of the sdist."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import aiocuda
from tests.project.tree import PACKAGE, ROOT, SOURCE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, bytes]]:
    """The names in the sdist, and the files of the wheel that was built from it."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "AIOCUDA_BUILD": "python"},  # `tests/core/test_build.py` builds the compiled wheel
    )
    (archive,) = target.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    (archive,) = target.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    return names, files


def tracked(*folders: Path) -> set[str]:
    """Return the files of some folders, without files that a run creates."""
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
        and not {"__pycache__", "_build", ".hypothesis"}.intersection(path.parts)
        and not re.fullmatch(r"_compiled\..*so|_compiled\.c", path.name)
    }


def test_wheel_contains_only_the_package_without_its_readmes(distributions: tuple[list[str], dict[str, bytes]]) -> None:
    _, wheel = distributions
    metadata = f"aiocuda-{aiocuda.__version__}.dist-info/"
    package = {str(Path(name).relative_to("src")) for name in tracked(PACKAGE) if not name.endswith("/README.md")}
    package.remove("aiocuda/_core/_hatch_hook.py")
    assert {name for name in wheel if not name.startswith(metadata)} == package
    assert wheel[f"{metadata}licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_sdist_contains_the_project(distributions: tuple[list[str], dict[str, bytes]]) -> None:
    sdist, _ = distributions
    wanted = tracked(SOURCE, ROOT / "tests", ROOT / "docs", ROOT / "examples", ROOT / ".ci", ROOT / ".github")
    wanted |= {".readthedocs.yaml", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"}
    wanted.add("pyproject.toml")
    assert wanted - set(sdist) <= {"docs/benchmarks/local.json"}
    assert set(sdist) - wanted == {"PKG-INFO", ".gitignore"}


def test_metadata(distributions: tuple[list[str], dict[str, bytes]]) -> None:
    _, wheel = distributions
    folder = f"aiocuda-{aiocuda.__version__}.dist-info"
    metadata = email.message_from_bytes(wheel[f"{folder}/METADATA"])
    assert metadata["Version"] == aiocuda.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert wheel[f"{folder}/METADATA"].decode().partition("\n\n")[2] == (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata.get_all("Provides-Extra") == ["cli", "cluster", "docs", "nvrtc", "observe", "testing"]
    required = {line.partition(";")[0].strip() for line in metadata.get_all("Requires-Dist", []) if "extra" not in line}
    names = {line.partition(">")[0] for line in required}
    assert names == {"anyio", "cuda-pathfinder", "cuda-python", "numpy", "structlog"}
    entry_points = wheel[f"{folder}/entry_points.txt"].decode()
    assert "aiocuda = aiocuda.cli:main" in entry_points
    assert "aiocuda.testing.plugin = aiocuda.testing.plugin" in entry_points
