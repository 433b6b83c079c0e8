"""Find the first seed that finds each mutant, and write it into the patch and into the documentation."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutant import MUTANTS, Mutant, Verdict, simulate
from tests.mutants.table import HEAD, PAGE, table
from tests.planting import StaleBugError

#: If no seed below this finds a mutant, the bug is harmless, or the programs or the invariants are too weak.
MOST_SEEDS = 3_000


def search(mutant: Mutant) -> Verdict | StaleBugError:
    """Run the mutant from seed 0 on."""
    with tempfile.TemporaryDirectory() as tree:
        try:
            mutant.plant(Path(tree))
        except StaleBugError as error:
            return error
        return simulate(Path(tree), 0, MOST_SEEDS, seconds=1_800)


def write_seed(mutant: Mutant, found: Verdict | StaleBugError) -> bool:
    """Write the seed into the patch; print the reason and return False if that is not possible."""
    if isinstance(found, StaleBugError):
        print(found)  # noqa: T201 - a command
        return False
    if found.seed is None or found.violated not in mutant.expected:
        print(f"{mutant.name}: expected {', '.join(mutant.expected)}, and the output was:\n{found.output}")  # noqa: T201
        return False
    print(f"{mutant.name}: {found.violated} by seed {found.seed}", flush=True)  # noqa: T201
    text = mutant.path.read_text(encoding="utf-8")
    mutant.path.write_text(re.sub(r"by seed \d+\n", f"by seed {found.seed}\n", text, count=1), encoding="utf-8")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    names = parser.parse_args().names
    wanted = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        written = [write_seed(mutant, found) for mutant, found in zip(wanted, threads.map(search, wanted), strict=True)]
    page = PAGE.read_text(encoding="utf-8")
    rows = table([Mutant.read(mutant.path) for mutant in MUTANTS])
    PAGE.write_text(re.sub(re.escape(HEAD) + r"(?:\|.*\n)*", lambda _: rows, page), encoding="utf-8")
    return 0 if all(written) else 1


if __name__ == "__main__":
    raise SystemExit(main())
