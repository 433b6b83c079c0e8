"""``python -m tests.gpu``: run all GPU tests and show which of them fail.

First several pytest processes run side by side; then a quarter as many, with the tests that start processes of their
own on the GPU (`FEW_ON_A_GPU` in `tests/conftest.py`). Then the tests run that need the device alone (`ALONE` and
`ALONE_ON_A_GPU`), one process after the other. At last each test that has failed runs again, alone in a new process.
This tells a test that fails only beside others from one that fails.

It needs no package beyond those that the library requires, pytest and pytest-asyncio, and no installation:
``PYTHONPATH=src python3 -m tests.gpu``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.project.tree import ROOT

from .results import ALONE, BESIDE, FEW, Results
from .running import Run, RunError


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Return the test files in these files and folders, the largest first, so that shares of them are of one size."""
    found = {file.resolve() for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    return sorted(found, key=lambda file: (-file.stat().st_size, file))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "tests"], help="files and folders; all tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes, during the run, too")
    parser.add_argument(
        "--processes", type=int, default=max(1, usable * 3 // 4), help="side by side (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=120, help="longest time of a test (default: %(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit code 1 also if a test has failed once")
    parser.add_argument("-m", dest="marks", default="gpu and not soak", help="as of pytest (default: %(default)s)")
    parser.add_argument("--without-gpu", action="store_true", help="run tests that need no GPU; use it with -m")
    return parser.parse_args()


async def run(given: argparse.Namespace, results: Results) -> None:
    """Run the tests until they end, or until SIGTERM: then the results so far are shown."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="aiocuda-gpu-", ignore_cleanup_errors=True) as folder:
        options = ["-m", given.marks, *([] if given.without_gpu else ["--require-gpu"])]
        one = Run(results, Path(folder), processes=given.processes, seconds=given.seconds, arguments=options, say=say)
        await one.all(files_of(given.paths))


def main() -> int:
    """Return 0 if no test has failed twice, 1 if one has or some did not run, 2 if none can run."""
    given = arguments()
    results = Results(given.json, command=shlex.join(sys.argv), processes=given.processes)
    try:
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(run(given, results))
    except RunError as error:
        say(str(error))
        return 2
    results.save()
    say(results.summary())
    once = [test for part in (BESIDE, FEW, ALONE) for test in results.failed_once(part)] if given.strict else []
    return 0 if results.complete and not results.failed and not once else 1


if __name__ == "__main__":
    sys.exit(main())
