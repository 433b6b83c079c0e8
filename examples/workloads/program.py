"""What these programs have in common as programs: their output files, and how they end where there is no GPU."""

from __future__ import annotations

import asyncio
import sys

import aiocuda

__all__ = ["check_outputs", "run"]


def check_outputs(parser, *names):
    """Refuse what cannot be written before the work begins: it would be lost."""
    for name in names:
        if name not in (None, "-"):
            try:
                open(name, "a").close()
            except OSError as error:
                parser.error(str(error))


def run(main):
    """What a coroutine brings; a driver that was asked for by name and is not there is told in a line."""
    try:
        return asyncio.run(main)
    except aiocuda.DriverNotAvailableError as error:
        sys.exit(str(error))
