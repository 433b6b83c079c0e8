"""The build of the compiled core: alone, for wheels and for sdists."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from aiocuda._core import __all__ as names_of_the_core
from aiocuda._core import build as builder
from aiocuda._core._sources import FOLDER, MODULES, hash_of_sources
from tests.project.tree import ROOT

needs_compiler = pytest.mark.skipif(builder.why_not_compiled() is not None, reason=str(builder.why_not_compiled()))


def test_all_modules_of_the_core_are_sources() -> None:
    """A new module must be listed, or the extension would lack it, and its edits would not be noticed."""
    apart = {"__init__", "_calls", "_form", "_hatch_hook", "_sources", "_state", "build"}
    assert {path.stem for path in FOLDER.glob("*.py")} - {"_compiled"} == {*MODULES, *apart}


def test_joined_source_is_python_and_has_all_names() -> None:
    joined: dict[str, object] = {"__name__": "joined"}
    text = builder.joined()
    compile(text, "joined", "exec")
    assert "TYPE_CHECKING:" not in text
    assert not re.search(r"^from \._(?!state)", text, re.MULTILINE)
    defined = set(re.findall(r"^(?:class|def) (\w+)|^(\w+) = ", text, re.MULTILINE))
    found = {name for pair in defined for name in pair}
    constants = {name for name in names_of_the_core if name.isupper()} - {"INSTANT", "INTERNAL"}
    assert set(names_of_the_core) - constants - {"CopyOut", "Extra", "State"} <= found
    assert joined["__name__"] == "joined"


@pytest.mark.parametrize(
    ("module", "added", "problem"),
    [
        ("_estimate", "def _refresh(): return 2", None),
        ("_estimate", "LONG = 0.001", None),  # as in `_ring`
        ("_estimate", "LONG = 4", "_ring.py bind LONG to different"),
        ("_estimate", "def new_operation(): return 2", "_ring.py bind new_operation to different"),
        ("_hot", "from ctypes import Array as Estimate", "_hot.py and _estimate.py bind Estimate to different"),
        ("_estimate", "try:\n    gather = 1\nfinally:\n    pass", "_gather.py bind gather to different"),
        ("_hot", "if TYPE_CHECKING:\n    SLOW = 8\nelse:\n    SLOW = 8", "_hot.py has a module-level else in line"),
    ],
)
def test_modules_that_would_differ_when_joined_are_refused(
    module: str, added: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = shutil.copytree(FOLDER, tmp_path / "core", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (core / f"{module}.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{added}\n")
    monkeypatch.setattr(builder, "_HERE", core)
    if problem is None:
        assert added in builder.joined()
    else:
        with pytest.raises(builder.BuildError, match=re.escape(problem)):
            builder.joined()


def test_reason_why_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    reason = builder.why_not_compiled()
    assert reason == "there is no C compiler 'no-such-compiler': install one, or name one in CC"
    with pytest.raises(builder.BuildError, match="no-such-compiler"):
        builder.build(force=True)
    monkeypatch.setattr(sys, "platform", "win32")
    assert builder.why_not_compiled() == "the compiled core is for Linux, as the CUDA driver is"


def test_free_threaded_python_has_the_core_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sysconfig.get_config_var", {"Py_GIL_DISABLED": 1, "CC": "cc"}.get)
    assert "free-threaded Python uses the core in Python" in str(builder.why_not_compiled())


def test_old_cython_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before 3.3.1 it released an attribute's old object while the attribute still pointed to it."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.3.0")
    with pytest.raises(builder.UnavailableError, match=re.escape("pip install 'cython>=3.3.1'")):
        builder.generate(tmp_path)


def test_hash_is_the_same_for_each_python() -> None:
    """The C in an sdist serves all of them. `importlib.util.source_hash` would differ with each version."""
    names = [
        *(f"{module}.py" for module in MODULES),
        "_state.py",
        "_compiled.pxd",
        "_calls.h",
        "build.py",
    ]
    content = b"\0".join((FOLDER / name).read_bytes() for name in names)
    assert hash_of_sources() == hashlib.sha256(content).hexdigest()[:16]


@needs_compiler
def test_folder_that_cannot_be_written_is_no_failure_of_the_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(builder, "generate", lambda folder: _empty_module(folder))

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(shutil, "copy", refuse)
    with pytest.raises(builder.UnavailableError, match=r"cannot be written: read-only"):
        builder.build(tmp_path)


def _empty_module(folder: Path) -> Path:
    source = folder / "empty.c"
    source.write_text("int nothing;\n", encoding="utf-8")
    return source


@needs_compiler
def test_extension_of_these_sources_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / builder.extension_name()
    kept.write_bytes(f"...aiocuda core {hash_of_sources()}...".encode())
    assert builder.build(tmp_path) == kept
    assert kept.read_bytes().startswith(b"...")


def _build(place: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an unpacked sdist that was built without a compiler: it has the generated C all the same."""
    place = tmp_path_factory.mktemp("sdist")
    built = _build(place, "--sdist", ROOT, CC="no-such-compiler")
    assert built.returncode == 0, built.stderr + built.stdout
    (sdist,) = place.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    return place / sdist.name.removesuffix(".tar.gz")


@pytest.mark.heavy
@pytest.mark.slow
@needs_compiler
def test_wheel_of_an_sdist_has_the_extension(unpacked: Path, tmp_path: Path) -> None:
    """The sdist has the generated C, from which the wheel is built, and the wheel works with it alone."""
    assert [str(path.relative_to(unpacked)) for path in unpacked.rglob("_compiled.c")] == [
        "src/aiocuda/_core/_compiled.c"
    ]
    built = _build(tmp_path, "--wheel", unpacked, CFLAGS="-O0")  # quicker to compile
    assert built.returncode == 0, built.stderr + built.stdout
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert f"aiocuda/_core/{builder.extension_name()}" in inside
    assert not [name for name in inside if name.endswith(("_compiled.c", "_hatch_hook.py"))]
    assert "py3-none-any" not in wheel.name
    told = subprocess.run(
        [sys.executable, "-c", "import aiocuda; print(aiocuda.Operation.__mro__[0], aiocuda.__file__)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "AIOCUDA_CORE": "compiled"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(tmp_path / "installed") in told.stdout, told.stderr


@pytest.mark.heavy
@pytest.mark.slow
def test_pure_wheel(tmp_path: Path) -> None:
    built = _build(tmp_path, ROOT, AIOCUDA_BUILD="python")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "_core/_compiled." in name and not name.endswith(".pxd")]


@pytest.mark.heavy
@pytest.mark.slow
def test_build_without_a_compiler_is_pure_and_says_so(unpacked: Path, tmp_path: Path) -> None:
    built = _build(tmp_path, "--wheel", unpacked, CC="no-such-compiler")
    assert built.returncode == 0, built.stderr
    assert "aiocuda is built without its compiled core: there is no C compiler" in built.stdout + built.stderr
    assert next(tmp_path.glob("*.whl")).name.endswith("-py3-none-any.whl")
    refused = _build(tmp_path / "again", "--wheel", unpacked, CC="no-such-compiler", AIOCUDA_BUILD="compiled")
    assert refused.returncode != 0
    assert "there is no C compiler" in refused.stdout + refused.stderr


def test_build_takes_no_other_form(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiocuda._core._hatch_hook import CoreBuildHook

    monkeypatch.setenv("AIOCUDA_BUILD", "fast")
    hook = CoreBuildHook.__new__(CoreBuildHook)
    with pytest.raises(ValueError, match="AIOCUDA_BUILD='fast': use 'auto'"):
        hook.dependencies()


@pytest.mark.heavy
@pytest.mark.slow
@needs_compiler
def test_built_in_place_by_the_command(tmp_path: Path) -> None:
    """A second call of the command finds the extension; `--force` builds it again."""
    shutil.copytree(FOLDER.parent, tmp_path / "aiocuda", ignore=shutil.ignore_patterns("__pycache__", "_compiled*.so"))
    extension = tmp_path / "aiocuda" / "_core" / builder.extension_name()
    times = []
    for options in ((), (), ("--force",)):
        done = subprocess.run(
            [sys.executable, "-m", "aiocuda._core.build", *options],
            env={**os.environ, "PYTHONPATH": str(tmp_path), "CFLAGS": "-O0"},  # it is not run
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, str(extension)), done.stderr
        times.append(extension.stat().st_mtime_ns)
    assert times[0] == times[1] < times[2]
