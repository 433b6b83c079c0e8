"""``python -m tests [ARGS]``: all tests but the soak, the slow ones beside the others, on two processors.

With arguments for pytest it is one process, as pytest by itself is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile


def pytest(*arguments: str) -> list[str]:
    """The command."""
    return [sys.executable, "-m", "pytest", "--timeout", "120", *arguments]


def main(arguments: list[str]) -> int:
    """The first exit status that is not 0."""
    if arguments:
        return subprocess.run(pytest("-m", "not soak", *arguments), check=False).returncode
    with tempfile.TemporaryFile("w+") as told:
        slow = pytest("-m", "slow and not soak", "-o", "cache_dir=.pytest_cache/slow")
        with subprocess.Popen(slow, stdout=told, stderr=subprocess.STDOUT) as beside:
            try:
                status = subprocess.run(pytest("-m", "not slow and not soak"), check=False).returncode
                beside.wait()
            finally:
                beside.kill()
        told.seek(0)
        sys.stdout.write(told.read())
        return status or beside.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
