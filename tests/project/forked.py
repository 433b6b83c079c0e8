"""Programs that run in forks of one process, which has imported their libraries: quicker than a process for each."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import aiocuda
from tests.project.tree import ROOT, SOURCE

__all__ = ["LIBRARIES", "Finished", "ForkingProcess", "forking_pytest", "next_program"]

#: What many programs import. Packages that the attributes of `aiocuda` do not reach are left to the programs: a missing
#: import must fail.
LIBRARIES = ("asyncio", "numpy", "anyio", "structlog", "fastapi", "starlette.applications")

#: Runs a file like an asyncio prompt: in an event loop, if there is an `await` outside of functions.
_PROMPT = """\
import ast, asyncio, inspect, sys
from tests.project.forked import next_program
next_program()
with open(sys.argv[1], encoding="utf-8") as file:
    running = eval(compile(file.read(), sys.argv[1], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
if inspect.iscoroutine(running):
    asyncio.run(running)
"""

#: Runs pytest. No fork has imported its plugins, some of which look for each other, except for aiocuda: so pytest does
#: not rewrite its assertions, of which it has none.
_PYTEST = """\
import sys
from tests.project.forked import next_program
next_program()
import pytest
options = ["-p", "no:cacheprovider", "-p", "aiocuda.testing.plugin"]
sys.exit(pytest.main([*options, *sys.argv[1:], "-W", "ignore::pytest.PytestAssertRewriteWarning"]))
"""

_OUTPUT, _ERRORS = "output", "errors"


class Finished(NamedTuple):
    """The exit status of a program, and its output."""

    status: int
    output: str
    errors: str


class ForkingProcess:
    """A process that forks for each program.

    Parameters
    ----------
    libraries
        What the process imports, besides aiocuda.
    program
        What each fork does. It calls `next_program` first; then `sys.argv` has the arguments of the program.
    options
        The options of Python, besides that warnings are errors. By default asyncio is in debug mode.
    """

    def __init__(
        self, libraries: Sequence[str] = LIBRARIES, *, program: str = _PROMPT, options: Sequence[str] = ("-X", "dev")
    ) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIOCUDA_", "PYTEST_"))}
        path = os.pathsep.join(filter(None, (str(SOURCE), str(ROOT), os.environ.get("PYTHONPATH"))))
        self._folder = tempfile.TemporaryDirectory(prefix="aiocuda-forked-")
        self._process = subprocess.Popen(
            [sys.executable, *options, "-W", "error", "-c", program, *libraries],
            env={**kept, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: Sequence[str], directory: Path, variables: dict[str, str]) -> Finished:
        """Run a program with these arguments in a directory, with more environment variables."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        folder = tempfile.mkdtemp(dir=self._folder.name)  # processes that a program leaves may write later
        self._process.stdin.write(json.dumps([folder, str(directory), [*arguments], variables]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        output, errors = (Path(folder, name).read_text(encoding="utf-8") for name in (_OUTPUT, _ERRORS))
        return Finished(int(answer), output, errors)

    def close(self) -> None:
        """End the process."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._folder.cleanup()


def forking_pytest(*options: str) -> ForkingProcess:
    """Return a process that forks for each run of pytest, with aiocuda's plugin. The options are those of Python."""
    return ForkingProcess(["asyncio", "numpy", "pytest", "hypothesis"], program=_PYTEST, options=options)


def next_program() -> None:
    """Fork for each program that the parent process names. Returns in each fork, with its arguments in `sys.argv`."""
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):  # an optional one
            importlib.import_module(name)
    for name in aiocuda.__all__:
        getattr(aiocuda, name)
    gc.collect()
    gc.freeze()  # no fork collects the objects of the libraries, which would copy their pages
    # Whether a stage gets this advice depends on the time that other programs leave to this one.
    warnings.filterwarnings("ignore", "stage .* of a pipeline blocked the event loop here")
    for line in sys.stdin:
        program = os.fork()
        if not program:
            _become(*json.loads(line))
            return
        print(_status(program), flush=True)  # noqa: T201 - the answer
    sys.exit()


def _become(folder: str, directory: str, arguments: list[str], variables: dict[str, str]) -> None:
    """Make this process what a new one would be. Its output goes to files of a folder."""
    os.setsid()
    os.chdir(directory)
    os.environ.update(variables)
    sys.argv[1:] = arguments
    sys.path[0] = ""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for name, descriptor in ((_OUTPUT, 1), (_ERRORS, 2)):
        opened = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.close(nothing)


def _status(program: int, seconds: float = 100.0) -> int:
    """Wait for a program and return its exit status. It is killed, with its processes, after so many seconds."""
    limit = threading.Timer(seconds, os.killpg, (program, signal.SIGKILL))
    limit.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    finally:
        limit.cancel()
        limit.join()
