"""Running the command line, each time as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import PATIENCE
from tests.project.forked import ForkingProcess
from tests.project.tree import ROOT, SOURCE

#: Warnings are errors, and objects that are left open are reported.
STRICT = ("-W", "error")


#: What a fork does: the rest of ``python -m aiocuda``.
_COMMAND = """\
import sys
from tests.project.forked import next_program
next_program()
from aiocuda.cli import main
sys.exit(main())
"""

#: Variables that Python and the libraries read when they start begin otherwise.
_READ_LATER = ("AIOCUDA_", "CUDA_")

_forking: list[ForkingProcess] = []


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("AIOCUDA_", "PYTHON", "COVERAGE"))
    }
    return {**kept, "PYTHONPATH": str(SOURCE), **more}


def aiocuda(*arguments: str | os.PathLike[str], **more: str) -> subprocess.CompletedProcess[str]:
    """``python -m aiocuda …``, to its end, in a fork of a process that has imported it.

    Its start takes half a second. So only a process with other variables, such as those of Python, has one of its own.
    """
    if not all(name.startswith(_READ_LATER) for name in more):
        return started(*arguments, **more)
    if not _forking:
        _forking.append(ForkingProcess(["aiocuda.cli._app"], program=_COMMAND, options=()))
    words = [os.fspath(argument) for argument in arguments]
    status, output, errors = _forking[0].run(words, ROOT, more)
    return subprocess.CompletedProcess(words, status, output, errors)


def end_forking() -> None:
    """End the process that has imported the command line, if there is one."""
    while _forking:
        _forking.pop().close()


def started(*arguments: str | os.PathLike[str], **more: str) -> subprocess.CompletedProcess[str]:
    """``python -m aiocuda …``, from its start to its end."""
    return subprocess.run(
        [sys.executable, *STRICT, "-m", "aiocuda", *arguments],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,  # all rows of `aiocuda bench` take 20 s
        check=False,
    )


def program(text: str, *arguments: str | os.PathLike[str], **more: str) -> subprocess.CompletedProcess[str]:
    """A program, then the command line in the same process."""
    source = textwrap.dedent(text) + "\nimport sys\nfrom aiocuda.cli import main\nsys.exit(main())\n"
    return subprocess.run(
        [sys.executable, *STRICT, "-c", source, *arguments],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,  # all rows of `aiocuda bench` take 20 s
        check=False,
    )


def grow(folder: Path) -> Iterator[Path]:
    """A few files."""
    for number in range(20):
        path = folder / f"{number}.txt"
        path.write_bytes(b"The quick brown fox\n" * number * 50)
        yield path
