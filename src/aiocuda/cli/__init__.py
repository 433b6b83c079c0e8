"""The command line ``aiocuda``: its commands, and what they print. See its README.md in the repository."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]

#: The packages of the extra ``cli``, and the packages that these need.
_EXTRA = frozenset({"typer", "rich", "click", "shellingham"})


def main() -> int:
    """Run the command line and return the exit code."""
    try:
        try:
            from ._app import run
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _EXTRA:
                raise
            from .._base._extras import install

            print(
                f"aiocuda: the command line needs {missing}, which is not installed: {install('cli')}", file=sys.stderr
            )
            return 2
        return run(sys.argv[1:])
    except KeyboardInterrupt:
        print("aiocuda: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output has closed its pipe. Without this, Python reports it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
