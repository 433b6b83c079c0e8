"""Test a project of another author without aiocuda and then beside it: an installed aiocuda changes nothing (P35).

The project uses for itself the names of the marks, the option and the fixtures that aiocuda's own tests use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = """\
[pytest]
addopts = --strict-markers --strict-config
asyncio_mode = strict
asyncio_default_fixture_loop_scope = function
filterwarnings = error
markers =
    gpu(kind): the kind of GPU
    heavy
    slow
    soak
"""

#: Writes each test's outcome and the state of the process to a file.
CONFTEST = """\
import asyncio, gc, json, logging, os, pathlib, signal, sys, threading, warnings

# What aiocuda requires is installed in both environments. It counts as part of the project.
import anyio, numpy, structlog
import pytest

outcomes = {}


def pytest_addoption(parser):
    parser.addoption("--require-gpu", choices=["a100", "h100"], default="a100")


@pytest.fixture
def device(request):
    return request.config.getoption("--require-gpu")


@pytest.fixture
def latch():
    return "latch"


@pytest.fixture
def simulated_driver():
    return "driver"


@pytest.fixture
def simulated_device(simulated_driver):
    return simulated_driver


def hooks():
    for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook):
        yield getattr(hook, "func", hook).__qualname__


def state():
    loggers = logging.Logger.manager.loggerDict.items()
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "warnings": [repr(warnings.filters), warnings.showwarning.__module__],
        "root logger": [logging.root.level, logging.root.disabled],
        "root handlers": [type(each).__name__ for each in logging.root.handlers],
        "loggers": [name for name, each in loggers if getattr(each, "handlers", ()) or getattr(each, "level", 0)],
        "logging": [logging.getLoggerClass().__name__, logging.raiseExceptions, logging.root.manager.disable],
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "hooks": list(hooks()),
        "policy": type(asyncio.get_event_loop_policy()).__name__,
        "threads": threading.active_count(),
        "switch interval": sys.getswitchinterval(),
        "garbage": [gc.isenabled(), gc.get_threshold()],
    }


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        outcomes[report.nodeid] = report.outcome


def pytest_deselected(items):
    outcomes.update({item.nodeid: "deselected" for item in items})


def pytest_runtest_call(item):
    if item.name == "test_state":
        outcomes["state"] = state()


def pytest_sessionfinish(exitstatus):
    pathlib.Path("outcomes.json").write_text(json.dumps(outcomes))
"""

TESTS = """\
import asyncio
import pytest


@pytest.mark.gpu("a100")
def test_kind(device):
    assert device == "h100"


@pytest.mark.gpu
def test_gpu():
    pass


@pytest.mark.gpu(8)
@pytest.mark.skip
def test_skipped():
    pass


@pytest.mark.soak
def test_soak():
    pass


@pytest.mark.slow
@pytest.mark.heavy
def test_slow():
    pass


@pytest.mark.asyncio
async def test_loop(simulated_device, latch):
    assert (simulated_device, latch) == ("driver", "latch")
    assert type(asyncio.get_running_loop()).__module__.startswith("asyncio.")


def test_fails():
    assert False


def test_state():
    pass
"""

#: The outcomes of `TESTS`.
OUTCOMES = {
    "test_fails": "failed",
    "test_gpu": "passed",
    "test_kind": "passed",
    "test_loop": "passed",
    "test_skipped": "skipped",
    "test_slow": "passed",
    "test_soak": "passed",
    "test_state": "passed",
}

#: A test file that uses aiocuda's names in the same project.
USES = """\
import pytest


@pytest.mark.aiocuda_gpu
def test_needs_a_gpu():
    pass


@pytest.mark.asyncio
async def test_device(aiocuda_device):
    assert aiocuda_device.driver.name == "host"
"""


def check(wheel: Path, wheels: Path, place: Path) -> None:
    """Test the project without and with aiocuda in a new environment, and compare."""
    project = place / "foreign"
    project.mkdir()
    for name, text in {"pytest.ini": SETTINGS, "conftest.py": CONFTEST, "test_all.py": TESTS}.items():
        (project / name).write_text(text, encoding="utf-8")
    environment = place / "foreign-environment"
    python = environment / "bin" / "python"
    _run(project, sys.executable, "-m", "venv", environment)
    pip = (python, "-m", "pip", "--quiet", "--isolated", "install", "--no-compile", "--no-index")
    _run(project, *pip, *sorted(wheels.glob("*.whl")))

    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--require-gpu", "h100")
    without = _outcomes(project, 1, *pytest)
    found = {name.partition("::")[2]: outcome for name, outcome in without.items() if name != "state"}
    if found != OUTCOMES:
        sys.exit(f"without aiocuda the foreign project's tests give {found}, and not {OUTCOMES}")
    _run(project, *pip, "--no-deps", wheel)
    with_aiocuda = _outcomes(project, 1, *pytest)
    for key in sorted(without.keys() | with_aiocuda.keys()):
        before, after = without.get(key), with_aiocuda.get(key)
        if before != after:
            sys.exit(f"aiocuda changes {key} of a foreign project, from {before} to {after}")

    (project / "test_aiocuda.py").write_text(USES, encoding="utf-8")
    used = _outcomes(project, 0, *pytest, "test_aiocuda.py")
    if used != {"test_aiocuda.py::test_needs_a_gpu": "skipped", "test_aiocuda.py::test_device": "passed"}:
        sys.exit(f"tests that use aiocuda's plugin without a GPU give {used}")
    _outcomes(project, 4, *pytest, "--aiocuda-require-gpu", "test_aiocuda.py")


def _outcomes(project: Path, status: int, *command: str | Path) -> Any:
    """Run pytest and return what the project's conftest wrote; pytest must exit with `status`."""
    file = project / "outcomes.json"
    file.unlink(missing_ok=True)
    output = _run(project, *command, status=status)
    if not file.exists():
        sys.exit(f"pytest runs no session in a foreign project:\n{output}")
    return json.loads(file.read_text(encoding="utf-8"))


def _run(project: Path, *command: str | Path, status: int = 0) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "AIOCUDA"))}
    run = subprocess.run(
        command,
        cwd=project,
        env={**kept, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode != status:
        sys.exit(f"{' '.join(map(str, command))}: exit status {run.returncode}\n{run.stdout}")
    return run.stdout
