"""Importing aiocuda has no side effects, is fast, and works without CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from aiocuda._core._form import form
from tests.driver.cuda.fake import build
from tests.project.tree import SOURCE

pytestmark = pytest.mark.slow

#: Required packages. The import time of aiocuda is measured without them, and compared with theirs.
REQUIRED = "import anyio, numpy, structlog"


def fresh(program: str, **environment: str) -> Any:
    """Run a program in a new interpreter, with warnings as errors, and return the JSON that it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AIOCUDA", "COV"))}
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**inherited, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return json.loads(finished.stdout)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param("import aiocuda", id="import"),
        pytest.param("import aiocuda; [getattr(aiocuda, name) for name in aiocuda.__all__]", id="every-name"),
    ],
)
def test_import_time_without_the_required_packages(use: str) -> None:
    # Processor time, which other processes do not increase, in times of what the required packages take: about a third
    # on a slow machine and on a quick one.
    program = f"""
        import json, time
        began = time.process_time()
        {REQUIRED}
        required = time.process_time()
        {use}
        print((time.process_time() - required) / (required - began))
        """
    fresh(program)  # the first run may write bytecode
    assert any(fresh(program) < 0.45 for _ in range(5))  # caches that other processes use take time, too


def test_import_changes_nothing_in_the_process() -> None:
    changed = fresh(
        f"""
        import json, os, pathlib, signal, sys, threading, warnings
        {REQUIRED}

        def process():
            descriptors = pathlib.Path("/proc/self/fd")
            return {{
                "environment": dict(os.environ),
                "threads": threading.active_count(),
                "descriptors": len(list(descriptors.iterdir())) if descriptors.exists() else 0,
                "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
                "path": list(sys.path),
                "hooks": [repr(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
                "warnings": repr(warnings.filters),
                "switch interval": sys.getswitchinterval(),
            }}

        before = process()
        import aiocuda
        after = process()
        for name in aiocuda.__all__:
            getattr(aiocuda, name)
        later = process()
        print(json.dumps({{name: [before[name], after[name], later[name]]
                          for name in before if not before[name] == after[name] == later[name]}}))
        """
    )
    assert changed == {}


def test_import_loads_neither_cuda_nor_an_extra() -> None:
    loaded = fresh(
        f"""
        import json, pathlib, sys
        {REQUIRED}
        before = set(sys.modules)
        import aiocuda
        for name in aiocuda.__all__:
            getattr(aiocuda, name)
        libraries = pathlib.Path("/proc/self/maps")
        print(json.dumps({{
            "packages": sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}),
            "driver": "libcuda" in libraries.read_text() if libraries.exists() else False,
        }}))
        """
    )
    assert "aiocuda" in loaded["packages"]
    assert not {"cuda", "pytest", "rich", "typer"}.intersection(loaded["packages"])
    assert not loaded["driver"]


@pytest.mark.parametrize("module", ["", ".cluster", ".cluster._replica_main", ".data._worker_main"])
def test_import_does_not_load_anyio(module: str) -> None:
    """The first local cluster does. The processes of replicas do not need it."""
    assert fresh(f"import json, sys, aiocuda{module}; print(json.dumps('anyio' in sys.modules))") is False


def test_import_loads_at_most_five_modules_of_the_library() -> None:
    loaded = fresh(
        """
        import json, sys
        import aiocuda
        print(json.dumps({"modules": [name for name in sys.modules if name.partition(".")[0] == "aiocuda"]}))
        """
    )
    assert 1 <= len(loaded["modules"]) <= 5


@pytest.mark.parametrize("package", ["driver", "memory", "observe", "pool"])
def test_subpackage_is_an_attribute_without_an_import(package: str) -> None:
    loaded = fresh(f"import json, aiocuda; print(json.dumps({{'name': aiocuda.{package}.__name__}}))")
    assert loaded == {"name": f"aiocuda.{package}"}


#: A short program on the host driver, to be run while some modules cannot be imported.
HOST_PROGRAM = """
import asyncio
import numpy
import aiocuda

async def main():
    x = numpy.arange(100, dtype=numpy.float32)
    async with aiocuda.open_device(driver="host") as device:
        stream = device.stream()
        return (await stream.download(await stream.upload(x))).tolist() == x.tolist()
"""

#: Modules that exist only on POSIX systems.
POSIX = ("fcntl", "grp", "posix", "pwd", "resource", "termios")


def without(*modules: str) -> str:
    """Return the first lines of a program in which these modules cannot be imported."""
    return textwrap.dedent(
        f"""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {modules!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Blocked())
        for name in {modules!r}:
            sys.modules.pop(name, None)
        """
    )


def test_host_driver_without_the_cuda_packages() -> None:
    program = without("cuda") + HOST_PROGRAM + "print('true' if asyncio.run(main()) else 'false')"
    assert fresh(program) is True


@pytest.mark.parametrize(
    ("platform", "blocked"),
    [
        pytest.param("darwin", ("cuda",), id="macos"),
        pytest.param("win32", ("cuda", *POSIX), id="windows"),
    ],
)
def test_host_driver_on_another_platform(platform: str, blocked: tuple[str, ...]) -> None:
    # This finds modules of aiocuda that need Linux. It does not show how the libraries of the other system behave. The
    # default loop on Windows has no `add_reader`, so the loop of this test has none.
    program = (
        f"import asyncio, ctypes, sys; {REQUIRED}\n"
        + without(*blocked)
        + f"sys.platform = {platform!r}\n"
        + HOST_PROGRAM
        + textwrap.dedent(
            """
            class Loop(asyncio.SelectorEventLoop):
                def add_reader(self, *arguments):
                    raise NotImplementedError

            factory = Loop if sys.platform == "win32" else asyncio.SelectorEventLoop
            with asyncio.Runner(loop_factory=factory) as runner:
                print('true' if runner.run(main()) else 'false')
            """
        )
    )
    assert fresh(program) is True


def test_every_module_can_be_imported() -> None:
    """Those of a library that is not installed, and only they, raise an `ImportError` that names it."""
    program = """
        import importlib, json, pkgutil, aiocuda

        missing = {}
        for info in pkgutil.walk_packages(aiocuda.__path__, "aiocuda."):
            if not info.name.endswith("__main__"):
                try:
                    importlib.import_module(info.name)
                except ImportError as error:
                    missing[info.name] = error.name
        print(json.dumps(missing))
        """
    missing = fresh(program)
    optional = {"cuda.core", "cupy", "distributed", "hatchling", "numba_cuda", "torch"}
    assert set(missing.values()) <= optional, missing
    assert all(".integrations." in name or name.endswith(("._dask", "._hatch_hook")) for name in missing), missing


def test_first_wait_loads_little(tmp_path: Path) -> None:
    """A library that only waits loads neither streams nor memory. The core in Python has about 20 modules more."""
    if form().name != "compiled":
        pytest.skip("the core is not compiled")
    build(tmp_path).rename(tmp_path / "libcuda.so.1")
    program = """
        import asyncio, ctypes, json, pathlib, sys, aiocuda
        libcuda = ctypes.CDLL("libcuda.so.1")
        libcuda.fake_reset()
        libcuda.fake_value(b"cuDeviceGetCount", ctypes.c_uint64(1))

        class Stream:
            def __cuda_stream__(self):
                return (0, 64)

        async def main():
            await aiocuda.wait([Stream(), Stream()], timeout=10)

        asyncio.run(main())
        loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "aiocuda"]
        files = {module.__file__ for module in loaded if module.__file__.endswith(".py")}
        print(json.dumps([len(loaded), sum(len(pathlib.Path(file).read_text().splitlines()) for file in files)]))
        """
    modules, lines = fresh(program, LD_LIBRARY_PATH=str(tmp_path))
    assert modules <= 70
    assert lines <= 10_000
