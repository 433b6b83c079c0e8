"""Common parts of these programs: their output files, and their end on machines without a GPU."""

from __future__ import annotations

import asyncio
import sys

import aiocuda

__all__ = ["check_outputs", "run"]


def check_outputs(parser, *names):
    """Refuse a file that cannot be written, before the work begins: its result would be lost."""
    for name in names:
        if name not in (None, "-"):
            try:
                open(name, "a").close()
            except OSError as error:
                parser.error(str(error))


def run(main):
    """Run a coroutine and return its result; print one line if the requested driver is missing."""
    try:
        return asyncio.run(main)
    except aiocuda.errors.DriverNotAvailableError as error:
        sys.exit(str(error))
