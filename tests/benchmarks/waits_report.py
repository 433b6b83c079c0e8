"""``python -m tests.benchmarks.waits_report FILE``: the tables of the rows about lateness, as Markdown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .durations import PATTERNS
from .lateness import POLICIES, RAW

__all__ = ["table"]

_WAYS = (*POLICIES, RAW)


def table(report: Mapping[str, Any]) -> str:
    """Return p50, p99 and the longest lateness in µs, and cores, by pattern and way."""
    lines = [
        "| µs: p50, p99, longest; cores |" + "".join(f" {way} |" for way in _WAYS),
        "|---" * (1 + len(_WAYS)) + "|",
    ]
    for row in report["rows"]:
        if not (row["name"].startswith("lateness") and row["figures"]):
            continue
        for pattern in PATTERNS:
            cells = [_cell(row["figures"], f"{way}_{pattern}") for way in _WAYS]
            lines.append(f"| {row['name']}, {pattern} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(figures: Mapping[str, float], prefix: str) -> str:
    late = ", ".join(f"{figures[f'{prefix}_{name}_us']:.0f}" for name in ("p50", "p99", "max"))
    return f"{late}; {figures[f'{prefix}_cores']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.waits_report", description=__doc__)
    parser.add_argument("file", type=Path, help="what `python -m tests.benchmarks waits --json FILE` wrote")
    print(table(json.loads(parser.parse_args().file.read_text("utf-8"))), end="")


if __name__ == "__main__":
    main()
