"""Examples and README run as a user runs them, and print exactly the documented output."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.project.forked import ForkingProcess
from tests.project.tree import ROOT, SOURCE

pytestmark = pytest.mark.slow

NUMBER = r"\d+\.\d\d"

#: What each example prints, as a pattern: times differ from run to run.
PRINTS = {
    "01_saxpy": r"\[1\. 3\. 5\. 7\.\]\n",
    "02_streams_and_events": (
        rf"\[ 0\.  4\. 10\. 18\.\]\nleft {NUMBER} ms, right {NUMBER} ms, from fork to join {NUMBER} ms\n"
    ),
    "03_cancellation": (
        r"timed out; the launch is submitted\n"
        r"awaited again: done, \[2\. 2\. 2\. 2\.\]\n"
        r"first cancelled: True, second: \[3\. 3\. 3\. 3\.\]\n"
        r"abandoned: abandoned, target \[0\. 0\. 0\. 0\.\]\n"
        r"the stream went on: \[4\. 4\. 4\. 4\.\]\n"
    ),
    "04_pipeline": (
        r"10 results in order, at most 3 slots busy\n"
        r"one step after the other \d+ ms, overlapped \d+ ms\n"
    ),
    "06_fork_and_join": (
        r"20 images, 20 checksums, at most 3 slots busy\n"
        r"busiest: \w+, \d+% of the time at work\n"
        r"advised: \d+ slots, \d streams; .* takes \S+ ms for each item, more than any other: .*\n"
    ),
    "07_graphs": (
        r"fork and join \[2\. 3\.\]\n"
        r"diamond 10\.0\n"
        r"reduction tree 28\.0\n"
        r"26 operations, 13 of them transfers\n"
    ),
    "08_service": r"1\d\d answered in \d+ batches, \d\d cancelled, 0 in flight\n",
    "09_context": r"asynchronous: 8 steps, 4 streams made\nsynchronous: 8 steps, 0 streams made\nbit-equal: True\n",
    "10_data_loader": (
        r"left after 48 samples, with a state of 106 bytes\n"
        r"resumed: 96 of 96 samples, each once: True\n"
        r"sums are right: True\n"
    ),
    "11_cluster": (
        r"1000 requests answered, all right: True\n"
        r"the killed replica serves again, in epoch 2\n"
    ),
    "12_gather": r"\[0, 5, 10, 15, 20, 25, 30, 35\] at most 3 at a time\n",
    "ports/output_loop": (
        rf"asked every millisecond: {NUMBER} ms a step, {NUMBER} ms of a processor\n"
        rf"aiocuda\.wait: {NUMBER} ms a step, {NUMBER} ms of a processor\n"
    ),
    "ports/sender": (
        r"aiocuda\.wait: \d+\.\d ms, \d+\.\d ms of a processor, \d+ threads\n"
        r"a thread each: \d+\.\d ms, \d+\.\d ms of a processor, \d+ threads\n"
    ),
    "ports/codec": (
        r"aiocuda\.wait: 32 chunks in \d+\.\d ms, \d+\.\d ms of a processor\n"
        r"a thread each: 32 chunks in \d+\.\d ms, \d+\.\d ms of a processor\n"
    ),
    "05_pytest": rf"\.\.\. +\[100%\]\n3 passed, 3 deselected in {NUMBER}s\n",
}

#: asyncio's debug mode reports loop iterations above 100 ms. On a busy machine this is no property of the program.
SLOW = re.compile(r"^Executing <.* took \d+\.\d+ seconds\n", re.MULTILINE)


def output(*command: str) -> str:
    """What a Python program prints, warnings being errors; it prints nothing to stderr."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIOCUDA_", "PYTEST_"))}
    environment = kept | {"AIOCUDA_WARN": os.environ.get("AIOCUDA_WARN", "1")}
    finished = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", *command],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    complaints = SLOW.sub("", finished.stderr)
    assert (finished.returncode, complaints) == (0, ""), finished.stdout + finished.stderr
    return finished.stdout


#: What a fork does: the rest of ``python examples/NAME.py …``.
_SCRIPT = """\
import runpy, sys
from tests.project.forked import next_program
next_program()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[ForkingProcess]:
    """A process that has imported what the examples import, and forks for those that are not to work."""
    with contextlib.closing(ForkingProcess(["asyncio", "numpy", "starlette.applications"], program=_SCRIPT)) as process:
        yield process


@pytest.mark.parametrize("missing", ["httpx", "starlette"])
def test_service_without_a_package_names_the_command(missing: str) -> None:
    program = f"""
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["08_service.py", "--driver", "host"]
runpy.run_path("examples/08_service.py", run_name="__main__")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (1, f"this example needs {missing}: pip install starlette httpx\n")


def test_each_example_is_here() -> None:
    examples = ROOT / "examples"
    found = (*examples.glob("[0-9]*.py"), *(examples / "ports").glob("*.py"))
    assert {str(path.relative_to(examples).with_suffix("")) for path in found} == set(PRINTS)


def test_ports_and_the_program_of_readme_are_short() -> None:
    for path in ((ROOT / "examples" / "12_gather.py"), *(ROOT / "examples" / "ports").glob("*.py")):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path


#: The part that runs on a GPU machine, which may lack a web framework. `test_service` has the rest of that example.
ON_A_GPU = sorted(PRINTS.keys() - {"08_service"})


@pytest.mark.parametrize(
    ("name", "driver"),
    [(name, "host") for name in sorted(PRINTS)]
    + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ON_A_GPU],
)
def test_example_prints_its_own_output_only(name: str, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "11_cluster":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")  # its replicas share a GPU
    if driver == "host":
        monkeypatch.setenv("AIOCUDA_WARN", "0")  # advice depends on the time that other programs leave to this one
    found = output(f"examples/{name}.py", "--driver", driver)
    assert re.fullmatch(PRINTS[name], found), found


@pytest.mark.parametrize("name", sorted(PRINTS))
def test_example_takes_a_gpu_where_there_is_one(name: str, scripts: ForkingProcess) -> None:
    """Without an option the example uses the choice of `open_device`, which reads the environment first."""
    if name == "05_pytest":  # its tests name their drivers themselves
        assert 'default="auto"' in (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        return
    finished = scripts.run([f"examples/{name}.py"], ROOT, {"AIOCUDA_DRIVER": "nonsense"})
    assert finished.status == 1
    assert "AIOCUDA_DRIVER='nonsense' names no driver" in finished.errors


@pytest.mark.parametrize("name", sorted(PRINTS))
def test_example_lists_its_options(name: str, scripts: ForkingProcess) -> None:
    finished = scripts.run([f"examples/{name}.py", "--help"], ROOT, {})
    assert (finished.status, finished.errors) == (0, "")
    assert "--driver {auto,host,cuda}" in finished.output
