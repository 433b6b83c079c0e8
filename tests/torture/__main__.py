"""``python -m tests.torture --seconds 420``: does anything ever wait for ever for the GIL? (P9)

Three phases, each a process of its own: other libraries enter CUDA's driver and keep the GIL meanwhile, under both
settings of ``AIOCUDA_GIL``; and they run Python functions on CUDA's threads, under ``release``. None may stop for a
second. Then a control of up to 60 s, which must stop: launches that keep the GIL between such functions.

Each is watched from outside: a process in which nobody has the GIL cannot say so. Figures are printed as JSON; the exit
code is 1 if a phase stopped, or the control did not.
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

#: (name, who else, AIOCUDA_GIL, share of the time)
PHASES = (
    ("others keep the GIL, we release it", "holders", "release", 0.4),
    ("others run Python functions, we release the GIL", "functions", "release", 0.4),
    ("others keep the GIL, and so do we", "holders", "keep", 0.2),
)

#: Seconds without any await: more is a stall; so many, and nobody waits for it any more.
STALL, HOPELESS = 1.0, 5.0

#: Seconds that a phase may take beyond its own: to start, and to end.
MARGIN = 60.0

#: Awaits under ``release`` in 420 s.
AWAITS = 1_000_000


def phase(driver: str, others: str, gil: str, seconds: float) -> dict[str, Any]:
    """What a child told, and what was seen of it from outside."""
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
            said = errors.read()
    last = out.strip().splitlines()[-1:]
    return {**seen, **(json.loads(last[0]) if last else {}), "exit_code": child.returncode, "stderr": said[-3000:]}


def watch(child: subprocess.Popen[str], words: mmap.mmap, deadline: float) -> dict[str, Any]:
    """The longest time without an await, until it is over or hopeless; then the child is killed."""
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
        time.sleep(0.002)  # noqa: TID251 - somebody watches
    return {"awaits": awaits, "longest_gap_s": round(longest, 3), "stalled": longest > STALL}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=420.0, help="of the three phases together")
    parser.add_argument("--control", type=float, default=60.0, help="seconds within which the control must stop")
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    phases = {name: phase(arguments.driver, who, gil, share * arguments.seconds) for name, who, gil, share in PHASES}
    control = phase(arguments.driver, "control", "keep", arguments.control)
    broken = [f"{name}: {told}" for name, told in phases.items() if not is_well(told)]
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


def is_well(told: dict[str, Any]) -> bool:
    """It came to its end, never stopped, lost no wake, and the others had what they wanted."""
    return not (told["stalled"] or told["exit_code"] or told["lost_wakes"] or told["errors_of_others"])


if __name__ == "__main__":
    sys.exit(main())
