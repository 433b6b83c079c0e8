"""``python -m tests.benchmarks [NAME…] --json FILE``"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from . import report
from .harness import BUDGET, LIMIT, Options, Run
from .rows import GROUPS, ROWS, size


def main(argv: list[str] | None = None) -> int:
    """0 when everything was measured, whether or not the bounds hold; 1 when a row or a peer came to grief."""
    arguments = sys.argv[1:] if argv is None else argv
    groups = [f"{group} ({', '.join(names)})" for group, names in GROUPS.items()]
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"rows and groups of rows; if none is named, all rows without a group that this machine has the devices "
        f"for. Groups: {'; '.join(groups)}. Others: {', '.join(name for name, row in ROWS.items() if not row.group)}",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report here, after every row; - is stdout")
    parser.add_argument("--driver", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--small", action="store_true", default=None, help="the sizes of the host driver, anywhere")
    parser.add_argument(
        "--size",
        action="append",
        type=size,
        default=[],
        metavar="NAME=VALUE",
        help="another size for each row that has it, as in --size runs=2; may be given several times",
    )
    parser.add_argument("--no-peers", action="store_true", help="ours and the baselines alone")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one process (default %(default)g)")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all (default %(default)g)")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in ROWS and name not in GROUPS]
    if unknown:
        parser.error(f"no row is called {unknown[0]!r}; there are {', '.join([*GROUPS, *ROWS])}")
    named = [row for name in given.names for row in GROUPS.get(name, (name,))]
    run = Run(
        Options(
            names=tuple(dict.fromkeys(named)),
            driver=given.driver,
            small=given.small,
            peers=not given.no_peers,
            path=Path(given.json) if given.json not in (None, "-") else None,
            command=shlex.join(["python", "-m", "tests.benchmarks", *arguments]),
            limit=given.limit,
            budget=given.budget,
            sizes=dict(given.size),
        ),
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    result = run.run()
    if given.json == "-":
        print(json.dumps(report.rounded(result), indent=1, ensure_ascii=False))
    missed = [row["name"] for row in result["rows"] if row["met"] is False]
    print(f"{result['seconds']:.0f} s; missed: {', '.join(missed) or 'nothing'}", file=sys.stderr)
    grief = [row for row in result["rows"] if "error" in row or any("error" in peer for peer in row["peers"].values())]
    return 1 if grief else 0


if __name__ == "__main__":
    sys.exit(main())
