"""Running the command line, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import PATIENCE
from tests.project.tree import SOURCE

#: Warnings are errors, and objects that are left open are reported.
STRICT = ("-W", "error")


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("AIOCUDA_", "PYTHON", "COVERAGE"))
    }
    return {**kept, "PYTHONPATH": str(SOURCE), **more}


def aiocuda(*arguments: str | os.PathLike[str], **more: str) -> subprocess.CompletedProcess[str]:
    """``python -m aiocuda …``, to its end."""
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
