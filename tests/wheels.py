"""Build the sdist, a wheel for each Python that is found here, and the pure wheel: ``python -m tests.wheels DIR``.

`pyproject.toml` configures cibuildwheel, which builds wheels that other Linux systems can use, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.other_python import others
from tests.project.tree import ROOT


def main() -> int:
    """Build everything, and print the names of the files."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the files are written")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("aiocuda-*"):
        old.unlink()
    _run([sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(folder), str(ROOT)])
    (sdist,) = folder.glob("aiocuda-*.tar.gz")
    for python in (sys.executable, *(other.command for other in others())):
        command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sdist)]
        _run(command, AIOCUDA_BUILD="compiled")
    pure = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    _run(pure, AIOCUDA_BUILD="python")
    for made in sorted(folder.glob("aiocuda-*")):
        print(made.name)  # noqa: T201 - a command
    return 0


def _run(command: list[str], **environment: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
