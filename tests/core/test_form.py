"""The form of the core: which one a process uses, and what says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import aiocuda
from aiocuda._core._form import form
from aiocuda._core._sources import MODULES, hash_of_sources
from tests.driver.cuda.fake import build
from tests.helpers import open_peer
from tests.project.tree import ROOT

PACKAGE = Path(aiocuda.__file__).parent

SAYS = "from aiocuda._core._form import form; import json; print(json.dumps(form()[:2]))"


def run(program: str, tree: Path = PACKAGE.parent, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the package of a tree."""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), str(ROOT))), "AIOCUDA_CORE": "", **environment},
    )


def chosen(tree: Path = PACKAGE.parent, **environment: str) -> tuple[str, str | None]:
    """Return the form that a process uses, and why it is not the compiled one."""
    told = run(SAYS, tree, **environment)
    assert told.returncode == 0, told.stderr
    name, missing = json.loads(told.stdout)
    return name, missing


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tree with a copy of the package, without an extension."""
    shutil.copytree(PACKAGE, tmp_path / "aiocuda", ignore=shutil.ignore_patterns("__pycache__", "_compiled*.so"))
    return tmp_path


def pretend_to_compile(tree: Path, sources: str) -> None:
    """Put a module in the place of the extension: the modules of the core in one, and the hash of their sources."""
    names = "\n".join(f"from .{module} import *" for module in MODULES)
    (tree / "aiocuda/_core/_compiled.py").write_text(f"{names}\n# {sources}\n", encoding="utf-8")


def test_python_form_can_be_chosen() -> None:
    assert chosen(AIOCUDA_CORE="python") == ("python", None)


def test_unset_and_auto_take_the_form_that_is_there(copy: Path) -> None:
    assert chosen(copy) == chosen(copy, AIOCUDA_CORE="auto") == ("python", "the core is not compiled for this Python")
    sources = hash_of_sources()
    assert sources is not None
    pretend_to_compile(copy, sources)
    assert chosen(copy) == chosen(copy, AIOCUDA_CORE="auto") == ("compiled", None)


def test_compiled_form_that_is_not_there_is_an_import_error_with_the_command(copy: Path) -> None:
    told = run("import aiocuda; aiocuda.Operation", copy, AIOCUDA_CORE="compiled")
    assert told.stderr.strip().splitlines()[-1] == (
        "ImportError: AIOCUDA_CORE=compiled, but the core is not compiled for this Python: build it by "
        "`python -m aiocuda._core.build`"
    )


def test_command_that_builds_runs_where_the_compiled_form_is_asked_for(copy: Path) -> None:
    """The package of the command is imported before it: that must not fail for want of what the command builds."""
    told = run("import aiocuda._core.build as b; b.main()", copy, AIOCUDA_CORE="compiled", CC="no-such-compiler")
    assert "there is no C compiler 'no-such-compiler': install one, or name one in CC" in told.stderr


def test_edited_source_is_not_hidden_by_a_stale_extension(copy: Path) -> None:
    sources = hash_of_sources()
    assert sources is not None
    pretend_to_compile(copy, sources)
    with (copy / "aiocuda/_core/_hot.py").open("a", encoding="utf-8") as file:
        file.write("\nEDITED = True\n")
    assert chosen(copy) == ("python", "the compiled core is older than its source")
    told = run("import aiocuda; aiocuda.Operation", copy, AIOCUDA_CORE="compiled")
    assert told.stderr.strip().endswith("older than its source: build it by `python -m aiocuda._core.build`")
    edited = run("from aiocuda._core import Lease; import sys; print(sys.modules[Lease.__module__].EDITED)", copy)
    assert edited.stdout == "True\n"


def test_stale_extension_is_not_even_executed(copy: Path) -> None:
    text = "raise TypeError('made for other constants')\n"
    (copy / "aiocuda/_core/_compiled.py").write_text(text, encoding="utf-8")
    assert chosen(copy) == ("python", "the compiled core is older than its source")


def test_extension_that_cannot_be_loaded_is_not_used(copy: Path) -> None:
    text = f"# {hash_of_sources()}\nraise ImportError('another ABI')\n"
    (copy / "aiocuda/_core/_compiled.py").write_text(text, encoding="utf-8")
    assert chosen(copy) == ("python", "the compiled core cannot be loaded: another ABI")


def test_without_the_source_the_extension_is_used(copy: Path) -> None:
    """A distribution may leave the sources out. Here one of them is missing that nothing imports."""
    pretend_to_compile(copy, "another hash")
    (copy / "aiocuda/_core/_compiled.pxd").unlink()
    assert chosen(copy) == ("compiled", None)


def test_another_value_is_refused() -> None:
    told = run("import aiocuda; aiocuda.Operation", AIOCUDA_CORE="fast")
    assert (
        told.stderr.strip()
        .splitlines()[-1]
        .endswith("AIOCUDA_CORE='fast': use 'auto' (the default), 'compiled' or 'python'")
    )


@pytest.mark.asyncio
async def test_statistics_say_the_form() -> None:
    async with open_peer() as (_, device):
        assert device.statistics().core == form().name


_OPENS = """
import asyncio, sys, warnings
import aiocuda
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.host import HostDriver
from pathlib import Path
from tests.driver.cuda.fake import Fake

aiocuda.Operation  # the core is imported here
fake = Fake(Path(sys.argv[1] if len(sys.argv) > 1 else PATH))
fake.value("cuDeviceGetCount", 1)
driver = CudaDriver(fake.path) if GPU else HostDriver()

async def main():
    for _ in range(2):
        async with aiocuda.open_device(driver=driver):
            pass

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("libcuda"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "environment", "warned"),
    [
        (True, {}, 1),
        (True, {"AIOCUDA_CORE": "python"}, 0),
        (True, {"AIOCUDA_WARN": "0"}, 0),
        (False, {}, 0),
    ],
    ids=["a GPU", "the Python form was chosen", "no advice is wanted", "the host driver"],
)
def test_opening_a_gpu_without_the_compiled_form_warns_once(
    copy: Path, libcuda: Path, gpu: bool, environment: dict[str, str], warned: int
) -> None:
    told = run(_OPENS.replace("PATH", repr(str(libcuda))).replace("GPU", str(gpu)), copy, **environment)
    assert told.returncode == 0, told.stderr
    assert told.stderr.count("PerformanceWarning") == warned
    if warned:
        assert "the core is not compiled for this Python, so it runs in Python" in told.stderr
        assert "python -m aiocuda._core.build" in told.stderr
