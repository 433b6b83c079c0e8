"""``python -m tests.torture --seconds 420``: does any thread wait forever for the GIL? (P9)

There are three phases, each in its own process. In two of them other libraries call CUDA's driver and keep the GIL
during the calls, with both settings of ``AIOCUDA_GIL``; in one they run Python functions on CUDA's threads, with
``release``. No phase may stop for a second. Then a control runs for up to 60 s, and must stop: launches that keep the
GIL between such functions.

The parent process watches each phase, because a process in deadlock cannot report it. The figures are printed as JSON.
The exit code is 1 if a phase stopped, or the control did not.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.project.tree import ROOT, SOURCE
from tests.torture.child import PROGRESS

#: (name, other libraries, AIOCUDA_GIL, share of the time)
PHASES = (
    ("others keep the GIL, we release it", "holders", "release", 0.4),
    ("others run Python functions, we release the GIL", "functions", "release", 0.4),
    ("others keep the GIL, and so do we", "holders", "keep", 0.2),
)

#: Seconds without an await that count as a stall; seconds after which the process is killed.
STALL, HOPELESS = 1.0, 5.0

#: Additional seconds of a phase, to start and to end.
MARGIN = 60.0

#: Least number of awaits with ``release`` in 420 s.
AWAITS = 1_000_000


def phase(driver: str, others: str, gil: str, seconds: float) -> dict[str, Any]:
    """Run one phase. Return the figures of the child and of the parent."""
    with tempfile.TemporaryDirectory(prefix="aiocuda-torture-") as place:
        progress = Path(place, "progress")
        progress.write_bytes(bytes(PROGRESS.size))
        command = [
            *(sys.executable, "-m", "tests.torture.child", "--driver", driver, "--others", others),
            *("--seconds", str(seconds), "--progress", str(progress)),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]),
            "AIOCUDA_GIL": gil,
        }
        with (
            progress.open("rb") as file,
            mmap.mmap(file.fileno(), PROGRESS.size, access=mmap.ACCESS_READ) as words,
            Path(place, "errors").open("w+") as errors,
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as child,
        ):
            seen = watch(child, words, time.monotonic() + seconds + MARGIN)
            out, _ = child.communicate()
            errors.seek(0)
            stderr = errors.read()
    last = out.strip().splitlines()[-1:]
    return {**seen, **(json.loads(last[0]) if last else {}), "exit_code": child.returncode, "stderr": stderr[-3000:]}


def watch(child: subprocess.Popen[str], words: mmap.mmap, deadline: float) -> dict[str, Any]:
    """Return the longest time without an await. Kill the child if it hangs."""
    longest, at = 0.0, time.monotonic()
    awaits = 0
    while child.poll() is None:
        now = time.monotonic()
        count, over = PROGRESS.unpack(words[:])
        if over:
            deadline = min(deadline, now + MARGIN)
        elif count != awaits:
            if awaits:
                longest = max(longest, now - at)
            awaits, at = count, now
        elif (awaits and now - at > HOPELESS) or now > deadline:
            longest = max(longest, now - at)
            child.kill()
        time.sleep(0.002)  # noqa: TID251 - the pace of the watcher
    return {"awaits": awaits, "longest_gap_s": round(longest, 3), "stalled": longest > STALL}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=420.0, help="of the three phases together")
    parser.add_argument("--control", type=float, default=60.0, help="seconds within which the control must stop")
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    phases = {
        name: phase(arguments.driver, others, gil, share * arguments.seconds) for name, others, gil, share in PHASES
    }
    control = phase(arguments.driver, "control", "keep", arguments.control)
    broken = [f"{name}: {figures}" for name, figures in phases.items() if not is_well(figures)]
    if not control["stalled"]:
        broken.append(f"the control did not stop: {control}")
    released = sum(phases[name]["awaits"] for name, _, gil, _ in PHASES if gil == "release")
    if arguments.driver == "cuda" and released < AWAITS * min(1.0, arguments.seconds / 420):
        broken.append(f"only {released} awaits under release")
    figures = {
        "driver": arguments.driver,
        **phases,
        "control": control,
        "awaits_under_release": released,
        "broken": broken,
    }
    text = json.dumps(figures, indent=1)
    sys.stdout.write(f"{text}\n")
    if arguments.json is not None:
        arguments.json.write_text(text)
    return 1 if broken else 0


def is_well(figures: dict[str, Any]) -> bool:
    """True if a phase ended without a stall, a lost wake-up, or an error of the other libraries."""
    return not (figures["stalled"] or figures["exit_code"] or figures["lost_wakes"] or figures["errors_of_others"])


if __name__ == "__main__":
    sys.exit(main())
