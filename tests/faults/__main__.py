"""``python -m tests.faults``: every kind of device fault, many times, alone and beside other work.

About 250 processes, in two and a half minutes. Six processes at a time open the device, but they fault one after the
other, because the driver sometimes reports only one of two simultaneous faults. They use 8 hardware queues: with the
library's 32 a trap is reported after 3 s, and the whole run takes 15 minutes (``--queues 32 --at-once 1``). Cases that
the JSON file already contains are not run again, so the run can be split. The exit code is 1 if a promise was broken or
a case was not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.benchmarks.machine import tree
from tests.faults.matrix import ALONE, BESIDE, children, complaints, line, margin_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--times", type=int, default=20, help="of each kind alone")
    parser.add_argument("--beside", type=int, default=5, help="of each kind beside each other work")
    parser.add_argument("--at-once", type=int, default=6, help="that open the device side by side")
    parser.add_argument("--queues", type=int, default=8, help="CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--seconds", type=float, default=540, help="begin no further child after that")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    # The cases alternate, so that a run that stops early has some of each.
    rounds = max(arguments.times, arguments.beside)
    cases = [
        case
        for number in range(rounds)
        for case in ALONE * (number < arguments.times) + BESIDE * (number < arguments.beside)
    ]
    began = time.monotonic()
    told: dict[str, list[dict[str, Any]]] = defaultdict(list)
    parts: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        before = json.loads(arguments.json.read_text())
        told.update(before["reports"])
        parts = before["parts"]
    missing = list(cases)
    for name, reports in told.items():
        whole = [report for report in reports if "failed" not in report]  # the others stay in the report, and run anew
        for case in [case for case in missing if name_of(*case) == name][: len(whole)]:
            missing.remove(case)
    left = 0
    for report in children(missing, arguments.driver, arguments.at_once, arguments.seconds, arguments.queues):
        if report is None:
            left += 1
        else:
            told[name_of(report["kind"], report["during"])].append(report)
    part = {**tree(), "at_once": arguments.at_once, "queues": arguments.queues}
    part["processes"] = len(missing) - left
    parts.append({**part, "seconds": time.monotonic() - began})
    broken = [
        "\n    ".join([line(report), *wrong])
        for reports in told.values()
        for report in reports
        if (wrong := complaints(report, arguments.driver))
    ]
    for name, reports in told.items():
        whole = [report for report in reports if "failed" not in report]
        if whole:
            codes = sorted({report["code"] for report in whole})
            say(
                f"{name}: {len(whole)} of {len(reports)}, codes {codes}, first seen after "
                f"{spread([report['first_seen_ms'] for report in whole])} ms, last raised "
                f"{spread([margin_ms(report) for report in whole])} ms after that; "
                f"the kernel itself: {sorted({report['culprit'] for report in whole})}"
            )
    for each in broken:
        say(each)
    say(
        f"{sum(part['processes'] for part in parts)} processes in {sum(part['seconds'] for part in parts):.0f} s, "
        f"{len(broken)} broke a promise; {left} of {len(cases)} cases are left"
    )
    if arguments.json is not None:
        figures = {"driver": arguments.driver, "parts": parts, "left": left, "broken": broken, "reports": told}
        arguments.json.write_text(json.dumps(figures).replace('{"kind"', '\n{"kind"') + "\n")  # a line for each process
    return 1 if broken or left else 0


def name_of(kind: str, during: str) -> str:
    return f"{kind} during {during}"


def spread(values: list[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
