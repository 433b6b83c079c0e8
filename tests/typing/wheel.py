"""Check the wheel: build it from the sdist, install it in an empty environment, type-check and run a program with it.

Then run the demo with the wheel and with the sdist, each in an empty environment, and install the wheel beside another
project; the tests of that project must not change (`tests.typing.foreign`).

``python -m tests.typing.wheel --wheels DIR``; DIR has the wheels of hatchling, of aiocuda's requirements and of the
extras `cli` and `testing`, so that pip downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import aiocuda
from tests.typing import foreign

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("user_program.py")
REPORT = "report.json"


def run(*command: str | Path, cwd: Path, check: bool = True) -> int:
    """Run a command that cannot see the tree: not by its directory, not by its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MYPY"))}
    status = subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=not check).returncode
    if check and status != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit status {status}")
    return status


def install(distribution: Path | str, wheels: Path, environment: Path) -> tuple[Path, Path]:
    """Return a new environment with a wheel or an sdist, and its Python."""
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "venv", environment, cwd=wheels)
    pip = (python, "-m", "pip", "--quiet", "--isolated", "install", "--no-compile")
    run(*pip, "--no-index", "--find-links", wheels, distribution, cwd=wheels)
    return environment, python


def check(wheels: Path, place: Path) -> None:
    """Build, install, type-check and run in `place`; then test another project beside it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", ROOT, cwd=place)
    (wheel,) = (place / "dist").glob("*.whl")

    (sdist,) = (place / "dist").glob("*.tar.gz")

    environment, python = install(wheel, wheels, place / "environment")

    shutil.copy(PROGRAM, place)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", place / "cache")
    typed = (*mypy, "--python-executable", python, PROGRAM.name)
    run(*typed, cwd=place)
    run(python, "-X", "dev", "-W", "error", PROGRAM.name, cwd=place)

    # A check that cannot fail checks nothing: without the marker the same program must not pass.
    (marker,) = environment.glob("lib/python*/site-packages/aiocuda/py.typed")
    marker.unlink()
    if run(*typed, cwd=place, check=False) == 0:
        sys.exit("mypy is content with a wheel that has no types: the check does not look at the wheel")

    examples = place / "examples"  # whose files nothing writes while the demo reads them
    shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("__pycache__"))
    for distribution in (wheel, sdist):
        _, python = install(f"{distribution}[cli]", wheels, place / f"demo from {distribution.suffix}")
        run(python, "-m", "aiocuda", "demo", examples, "--driver", "host", "--json", REPORT, cwd=place)
        report = json.loads((place / REPORT).read_text(encoding="utf-8"))
        if not report["verified"] or report["version"] != aiocuda.__version__:
            sys.exit(f"{distribution.name}: the demo reports {report}")

    foreign.check(wheel, wheels, place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--wheels", type=Path, required=True, help="the folder with the wheels of aiocuda's requirements"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aiocuda-wheel-") as place:
        check(arguments.wheels.resolve(), Path(place))


if __name__ == "__main__":
    main()
