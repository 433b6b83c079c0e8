"""The command line: ``aiocuda demo`` and ``aiocuda info``.

Files
    `app`        commands, options and exit codes
    `screen`     what people see: progress and tables
    `demo`       the main job
    `files`      what there is to read
    `batches`    how files are laid out in slots
    `reading`    from files into slots
    `histogram`  the kernel, its twin, and a count to check them by
    `tally`      from rows of counts to files
    `report`     what was found
    `info`       what there is to run on

Only `app` and `screen` need what the extra ``cli`` brings.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]

#: What the extra ``cli`` brings, and what that needs in turn.
_EXTRA = frozenset({"typer", "rich", "click", "shellingham"})


def main() -> int:
    """Run the command line; the exit code."""
    try:
        try:
            from ._app import run
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _EXTRA:
                raise
            print(
                f'aiocuda: the command line needs {missing}, which is not installed: pip install "aiocuda[cli]"',
                file=sys.stderr,
            )
            return 2
        return run(sys.argv[1:])
    except KeyboardInterrupt:
        print("aiocuda: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has left. Python would complain of it once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
