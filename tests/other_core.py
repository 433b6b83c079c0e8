"""Run tests with the other form of the core: ``python -m tests.other_core ARGUMENTS`` passes the arguments to pytest.

The other form is the one that this process does not use. Without a C compiler there is only one: then nothing runs.
"""

from __future__ import annotations

import os
import subprocess
import sys

from aiocuda._core import build
from aiocuda._core._form import VARIABLE, form

#: The exit status of pytest without a test.
NO_TESTS = 5


def main() -> int:
    """Run pytest and return its exit status."""
    other = "python" if form().name == "compiled" else "compiled"
    if other == "compiled":
        try:
            build.build()
        except build.UnavailableError as error:
            print(f"no tests run with the compiled core: {error}")  # noqa: T201 - a command
            return 0
    print(f"with {VARIABLE}={other}:", flush=True)  # noqa: T201
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    status = subprocess.run(command, check=False, env={**os.environ, VARIABLE: other}).returncode
    return 0 if status == NO_TESTS else status


if __name__ == "__main__":
    sys.exit(main())
