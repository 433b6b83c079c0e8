"""The fork server of a loader: what it imports, what it leaves to its processes, what these see, and its end."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiocuda._processes import _fork_server
from aiocuda._processes._child import Child
from aiocuda._processes._fork_server import MOST_SERVERS, ProgramServer, order_of, server_of
from aiocuda._processes._imports import SLOW, Order, Source, _imports_of, _statements
from tests.data import samples
from tests.helpers import PATIENCE
from tests.processes import programs
from tests.project.tree import ROOT

#: Writes a line into a file beside it. The first line of a package that is imported in a test.
COUNTS = "import os, pathlib\nwith open(__file__ + '.log', 'a') as log: print(os.getpid(), file=log)\n"

#: What PyTorch has of its generator on the CPU, which its import seeds.
TORCH = """\
import random

class Generator:
    def seed(self):
        self._seed = random.randrange(1 << 64)
    def initial_seed(self):
        return self._seed

default_generator = Generator()
default_generator.seed()
"""

#: Packages that must not be forked, or end the server that imports them.
LEFT_OUT = {
    "thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    "file": "import os\nPIPE = os.pipe()\n",
    "numbers": "import random\nRANDOM = random.Random()\n",
    "generator": "import numpy\nGENERATOR = numpy.random.default_rng()\n",
    "end": "import os, sys\nif sys.argv[0] == '-c': os._exit(0)\n",
}


# -- what it imports -------------------------------------------------------------------------------------------------


def test_statements_at_the_top_of_a_module(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import json, os.path as path\nfrom PIL import Image, ImageOps\nfrom . import near\nfrom ..far import away\n"
        "from other import *\nimport own\ntry:\n    import optional\nexcept ImportError:\n    import otherwise\n"
        "if TYPE_CHECKING:\n    import typed\ndef function():\n    import inside\nfrom ....too.far import away\n"
        "import json\n",
        encoding="utf-8",
    )
    sources = (Source("own", "a.b", str(file)), Source("gone", "", str(tmp_path / "gone.py")))
    assert _imports_of(Order((), ("first",), sources)) == [
        ("first", ()), ("json", ()), ("os.path", ()), ("PIL", ("Image", "ImageOps")), ("a.b", ("near",)),
        ("a.far", ("away",)), ("other", ()), ("optional", ()),
    ]  # fmt: skip
    assert not list(_statements([], ""))


@pytest.mark.parametrize("text", ["import (", "\0", "# coding: none\n"])
def test_module_that_cannot_be_read_names_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    assert _imports_of(Order((), (), (Source("module", "", str(tmp_path / "module.py")),))) == []


def test_order_is_that_of_the_modules_of_the_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "/program.py", raising=False)
    monkeypatch.setattr(main, "__package__", None)
    monkeypatch.setattr(sys, "path", ["", "/folder"])
    objects = [samples.write, functools.partial(functools.partial(samples.write, 1), 2), samples.Squares(1), range(3)]
    order = order_of(["first"], [*objects, None, [1]])
    assert order.modules == ("first",)
    assert order.sources == (
        Source("__main__", "", "/program.py"),
        Source("tests.data.samples", "tests.data", samples.__file__),
    )
    assert order.path[1:] == ("/folder",)
    assert os.path.isdir(order.path[0])
    monkeypatch.setattr(main, "__file__", None)  # a notebook
    assert [source.name for source in order_of((), objects).sources] == ["tests.data.samples"]


# -- its processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Callable[[], dict[str, Any]]]]:
    """Return a function that starts a server, and returns a function that returns the report of a process of it."""
    servers: list[ProgramServer] = []

    def start(*modules: str) -> Callable[[], dict[str, Any]]:
        server = ProgramServer(Order((str(tmp_path), *sys.path), modules, ()))
        servers.append(server)
        assert server.ready.wait(PATIENCE)
        return functools.partial(report, server, modules)

    yield start
    for server in servers:
        server._server._stop()  # type: ignore[attr-defined]  # for tests, says `multiprocessing`


def report(server: ProgramServer, modules: tuple[str, ...]) -> dict[str, Any]:
    process = Child(programs.reports, modules, name="test", use="run a test", server=server, daemon=True)
    process.start()
    found: dict[str, Any] = process.first_message()
    assert process.end() == 0
    return found


def imports(package: Path) -> list[int]:
    """The processes that have imported a package of this test."""
    log = Path(f"{package}.log")
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.slow
def test_packages_are_imported_once_for_all_processes(tmp_path: Path, serve: Any) -> None:
    (tmp_path / "counted.py").write_text(COUNTS, encoding="utf-8")
    (tmp_path / "fails.py").write_text("raise SystemExit", encoding="utf-8")
    report = serve("fails", "counted", "numpy.random")
    first, second = report(), report()
    assert first["modules"] == second["modules"] == ["counted", "numpy.random"]
    assert len(imports(tmp_path / "counted.py")) == 1
    assert first["threads"] == 1
    assert first["numpy"] != second["numpy"]  # NumPy seeds at its import only
    assert first["random"] != second["random"]


@pytest.mark.slow
def test_each_process_has_its_own_random_numbers_of_torch(tmp_path: Path, serve: Any) -> None:
    (tmp_path / "torch.py").write_text(TORCH, encoding="utf-8")
    (tmp_path / "numbers_of_torch.py").write_text("import torch\nOWN = torch.Generator()\n", encoding="utf-8")
    report = serve("torch", "numbers_of_torch")
    first, second = report(), report()
    assert first["modules"] == second["modules"] == ["torch"]  # a generator of the program is left to the processes
    assert first["torch"] != second["torch"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEFT_OUT)
def test_package_that_must_not_be_forked_is_left_to_the_processes(tmp_path: Path, serve: Any, kind: str) -> None:
    (tmp_path / "counted.py").write_text(COUNTS, encoding="utf-8")
    (tmp_path / "left_out.py").write_text(LEFT_OUT[kind], encoding="utf-8")
    report = serve("numpy", "left_out", "counted")
    assert report()["modules"] == ["numpy", "counted"]
    assert report()["threads"] == 1
    assert len(imports(tmp_path / "counted.py")) == 1


@pytest.mark.slow
def test_slow_imports_are_not_repeated(tmp_path: Path, serve: Any) -> None:
    (tmp_path / "first.py").write_text(COUNTS + LEFT_OUT["file"], encoding="utf-8")
    (tmp_path / "slow.py").write_text(f"{COUNTS}import time\ntime.sleep({SLOW})\n", encoding="utf-8")
    names = [f"left_out_{number}" for number in range(3)]
    for name in names:
        (tmp_path / f"{name}.py").write_text(COUNTS + LEFT_OUT["file"], encoding="utf-8")
    (tmp_path / "last.py").write_text(COUNTS, encoding="utf-8")
    assert serve("first", "slow", *names, "last")()["modules"] == ["slow", "last"]
    assert [len(imports(tmp_path / f"{name}.py")) for name in ("first", "slow", *names, "last")] == [1] * 6


@pytest.mark.slow
def test_processes_have_the_environment_and_folders_of_their_start(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEFORE", "1")
    report = serve()
    monkeypatch.delenv("BEFORE")
    monkeypatch.setenv("LATER", "\udcff ä")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/later")
    found = report()
    assert (found["environment"].get("BEFORE"), found["environment"]["LATER"]) == (None, "\udcff ä")
    assert (found["folder"], found["path"][0]) == (str(tmp_path), "/later")


@pytest.mark.slow
def test_server_that_was_killed_is_started_again(tmp_path: Path, serve: Any) -> None:
    (tmp_path / "counted.py").write_text(COUNTS, encoding="utf-8")
    report = serve("counted")
    first = report()
    os.kill(first["parent"], signal.SIGKILL)
    second = report()
    assert second["modules"] == ["counted"]
    assert second["parent"] != first["parent"]
    assert len(imports(tmp_path / "counted.py")) == 2


def test_equal_orders_share_a_server_and_many_orders_one_without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Order] = []
    monkeypatch.setattr(_fork_server, "ProgramServer", made.append)
    monkeypatch.setattr(_fork_server, "_servers", {})
    for _ in range(2):
        for number in range(MOST_SERVERS + 5):
            server_of(Order((), (str(number),), ()))
    assert made == [*(Order((), (str(number),), ()) for number in range(MOST_SERVERS)), Order((), (), ())]


# -- programs --------------------------------------------------------------------------------------------------------

#: Runs loaders, and prints a line for each: the process ids of the workers, and the seconds of their start.
PROGRAM = """
import asyncio, os, time
from pathlib import Path
import counted
import aiocuda
from aiocuda.data import DataLoader

def decode(sample, out):
    out["x"][...] = sample

async def load():
    async with aiocuda.open_device(driver="host") as device:
        async with DataLoader(
            device, range(6), fields={"x": ((), "i8")}, decode=decode, workers=3, executor="process"
        ) as loader:
            assert [index async for batch in loader for index in batch.indices] == list(range(6))
            print(*loader.worker_pids, loader.statistics().start_seconds, flush=True)

async def cancel():
    loading = asyncio.ensure_future(load())
    while len(Path(counted.__file__ + ".log").read_text().split()) < 2:
        await asyncio.sleep(0.01)
    loading.cancel()
    await asyncio.wait({loading})

if __name__ == "__main__":
"""


def run(tmp_path: Path, counted: str, program: str) -> list[list[str]]:
    """Run a program with a package. Return the words of each line that it has printed."""
    (tmp_path / "counted.py").write_text(COUNTS + counted, encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM + program, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(tmp_path / "program.py")], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    return [line.split() for line in ended.stdout.splitlines()]


@pytest.mark.heavy
def test_workers_of_all_loaders_import_no_package_again(tmp_path: Path) -> None:
    lines = run(tmp_path, "", "    print(os.getpid())\n    for _ in range(2): asyncio.run(load())\n")
    program, server = imports(tmp_path / "counted.py")
    assert program == int(lines[0][0])
    for *workers, seconds in lines[1:]:
        assert len(set(workers)) == 3
        assert str(server) not in workers
        assert float(seconds) > 0


@pytest.mark.heavy
def test_fork_of_the_program_has_a_server_of_its_own(tmp_path: Path) -> None:
    lines = run(
        tmp_path, "",
        "    asyncio.run(load())\n    child = os.fork()\n    asyncio.run(load())\n"
        "    if child: assert os.waitpid(child, 0)[1] == 0\n",
    )  # fmt: skip
    assert len(lines) == 3
    assert len(imports(tmp_path / "counted.py")) == 3  # the program, and two servers


@pytest.mark.heavy
@pytest.mark.parametrize("end", ["cancel", "kill"])
def test_end_of_the_program_during_an_import_leaves_nothing(tmp_path: Path, end: str) -> None:
    """The opening of the loader does not wait for the import, which never ends."""
    program = {
        "cancel": "    asyncio.run(cancel())\n",
        "kill": "    if not os.fork(): asyncio.run(load())\n"
        "    while len(Path(counted.__file__ + '.log').read_text().split()) < 2: time.sleep(0.01)\n"
        "    os.kill(int(Path(f'/proc/self/task/{os.getpid()}/children').read_text()), 9)\n",
    }[end]
    run(tmp_path, "import sys, time\nif sys.argv[0] == '-c': time.sleep(600)\n", program)
    _, server = imports(tmp_path / "counted.py")
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{server}").exists():
        assert time.monotonic() < deadline, "the fork server is left"
        time.sleep(0.01)  # noqa: TID251 - it sees the end of its parent
