"""``python -m aiocuda.testing simulate``: random programs on the simulated driver, one seed after the other."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from .simulation.run import simulate, sweep


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m aiocuda.testing")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "simulate",
        help="run random programs in virtual time, and look at the invariants after each step",
        description="Runs random programs on the simulated driver and looks at the invariants after each step. Ends "
        "with 1 at the first seed that breaks one. The same seed does the same again.",
    )
    command.add_argument("--seeds", type=int, metavar="N", help="so many seeds (1 000, or as many as --seconds takes)")
    command.add_argument("--first", type=int, metavar="S", help="the first one (one that nobody knows)")
    command.add_argument("--seconds", type=float, metavar="T", help="no longer than this")
    command.add_argument("--trace", type=Path, metavar="FILE", help="write what the first seed's driver did")
    command.add_argument("--synchronous", action="store_true", help="on default streams only, without notifiers")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args(given)
    if arguments.seeds is not None and arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: at least 1")
    if arguments.seconds is not None and not arguments.seconds > 0:
        parser.error(f"--seconds {arguments.seconds}: more than 0")
    if arguments.seeds is None and arguments.seconds is None:
        arguments.seeds = 1000
    if arguments.first is None:
        arguments.first = random.SystemRandom().randrange(1 << 32)
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = _arguments(given)
    print(f"first seed {arguments.first}", flush=True)  # noqa: T201 - what a command says
    if arguments.trace is not None:
        lines = simulate(arguments.first, trace=True, asynchronous=not arguments.synchronous).trace
        arguments.trace.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    result = sweep(arguments.first, arguments.seeds, arguments.seconds, asynchronous=not arguments.synchronous)
    report = result.report()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for violation in result.violations:
        print(violation)  # noqa: T201
    if result.where:
        print(result.where, file=sys.stderr)  # noqa: T201
    print(  # noqa: T201
        f"{result.seeds} seeds in {result.seconds:.1f} s, {len(result.violations)} violations; median "
        f"{report['operations_median']:g} operations in {report['streams_median']:g} streams"
    )
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
