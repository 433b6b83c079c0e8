"""Random programs that look for broken rules: what the modules `simulation` of four packages share."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiocuda.testing import SimulatedLoop

__all__ = ["Violation", "check", "command", "run_in_virtual_time"]


class Violation(AssertionError):  # noqa: N818 - it is the finding of a run
    """A rule that a program has found broken."""


def check(rule: str, holds: bool, text: str) -> None:
    """Raise `Violation` unless the rule holds."""
    if not holds:
        raise Violation(f"{rule} {text}")


def run_in_virtual_time(
    main: Coroutine[Any, Any, object], rule: str, make_loop: Callable[[], SimulatedLoop] = SimulatedLoop
) -> None:
    """Run a program. `Violation` if it breaks a rule; any other exception breaks ``rule``."""
    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(main)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        found = _violation_in(error)
        if found is not None:
            raise found from None
        raise Violation(f"{rule} {type(error).__name__}: {error}") from error


def _violation_in(error: BaseException | None) -> Violation | None:
    """Return the violation that an error is, contains, or is caused by."""
    while error is not None and not isinstance(error, Violation):
        if isinstance(error, BaseExceptionGroup):
            return next((found for each in error.exceptions if (found := _violation_in(each)) is not None), None)
        error = error.__cause__ or error.__context__
    return error


def command(run: Callable[[int], None], module: str, description: str, arguments: Sequence[str] | None = None) -> int:
    """Run programs by seed, as a command does. Return 1 at the first violation."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--raise", dest="raises", action="store_true", help="show the traceback")
    options = parser.parse_args(arguments)
    for seed in range(options.first, options.first + options.seeds):
        try:
            run(seed)
        except Violation as violation:
            if options.raises:
                raise
            print(f"seed {seed}: {violation}")  # noqa: T201 - a command
            return 1
    print(f"{options.seeds} programs, no violation")  # noqa: T201 - a command
    return 0
