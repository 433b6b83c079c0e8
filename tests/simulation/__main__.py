"""``python -m tests.simulation``: run random programs on the simulated driver, one seed after the other."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.simulation.run import simulate, sweep

#: Real seconds of one seed, at most. The slowest takes about one.
LONGEST = 60.0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="Run random programs on the simulated driver and check the invariants after each step. The exit "
        "code is 1 if a seed violates one; that seed is the last. The same seed always does the same.",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds (1 000, or no limit with --seconds)")
    parser.add_argument("--first", type=int, metavar="S", help="the first seed (a random one)")
    parser.add_argument("--seconds", type=float, metavar="T", help="start no further seed after this time")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the driver's trace of the first seed")
    parser.add_argument("--synchronous", action="store_true", help="use default streams only, without notifiers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parsed = parser.parse_args(arguments)
    if parsed.seeds is not None and parsed.seeds < 1:
        parser.error(f"--seeds {parsed.seeds}: at least 1")
    if parsed.seconds is not None and not parsed.seconds > 0:
        parser.error(f"--seconds {parsed.seconds}: more than 0")
    if parsed.seeds is None and parsed.seconds is None:
        parsed.seeds = 1000
    if parsed.first is None:
        parsed.first = random.SystemRandom().randrange(1 << 32)
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parsed = _parse(arguments)
    print(f"first seed {parsed.first}", flush=True)  # noqa: T201 - a command
    if parsed.trace is not None:
        lines = simulate(parsed.first, trace=True, asynchronous=not parsed.synchronous).trace
        parsed.trace.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    result = sweep(parsed.first, parsed.seeds, parsed.seconds, asynchronous=not parsed.synchronous, longest=LONGEST)
    report = result.report()
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for violation in result.violations:
        print(violation)  # noqa: T201
    if result.traceback:
        print(result.traceback, file=sys.stderr)  # noqa: T201
    print(  # noqa: T201
        f"{result.seeds} seeds in {result.seconds:.1f} s, {len(result.violations)} violations; median "
        f"{report['operations_median']:g} operations in {report['streams_median']:g} streams"
    )
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
