"""One pytest process, and the reports of its plugin."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.project.tree import ROOT

#: Seconds between two looks at the reports.
_TICK = 1.0

#: Seconds until the first report, at least: for imports and the collection.
_START = 60.0


@dataclasses.dataclass
class Ended:
    """How a pytest process has ended."""

    events: list[dict[str, Any]]  #: the lines of the plugin
    returncode: int
    hung: bool  #: True if it was killed, since a test took too long
    log: Path  #: its output

    @property
    def running(self) -> str | None:
        """The test that was running at the end."""
        begun = [event["test"] for event in self.events if event["event"] == "begins"]
        ended = {event["test"] for event in self.events if event["event"] == "ends"}
        return begun[-1] if begun and begun[-1] not in ended else None

    @property
    def cause(self) -> str:
        """Return how the process ended, in words."""
        if self.hung:
            return "the test took too long, and its process was killed"
        code = self.returncode
        return (
            f"the process ended by {signal.Signals(-code).name}"
            if code < 0
            else f"the process ended with exit code {code}"
        )

    def tail(self, lines: int = 60) -> str:
        """Return the last lines of the output. After a hang they are the stacks of all threads."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


async def run_pytest(place: Path, arguments: Sequence[str], seconds: float) -> Ended:
    """Run pytest, and kill it and its children if a test, or the collection, takes more than some seconds.

    Parameters
    ----------
    place
        The path of the reports and of the log, without suffix.
    arguments
        The arguments of pytest.
    seconds
        The longest time of a test. A test with the mark ``timeout`` has its own.
    """
    report, log = place.with_suffix(".jsonl"), place.with_suffix(".log")
    report.touch()
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-r", "N", "-p", "no:cacheprovider", "-p", "tests.gpu.plugin"),
        *("--gpu-report", str(report), "-o", f"faulthandler_timeout={0.9 * seconds:g}"),
        # In its common folder, pytest would remove the folders of other runs before it exits: that can take minutes.
        *("--basetemp", str(place.with_suffix(".tmp")), *arguments),
    ]
    # Some containers forbid .pyc files, and each of the processes would compile all modules again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    hung = True
    try:
        hung = await _watch(process, report, seconds)
    finally:
        if hung or process.returncode != 0:  # its children may go on
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return Ended(_events(report), process.returncode or 0, hung, log)


async def _watch(process: asyncio.subprocess.Process, report: Path, seconds: float) -> bool:
    """Wait for the end of the process. Return True if nothing was reported for too long."""
    ended = asyncio.ensure_future(process.wait())
    size, since, limit = 0, time.monotonic(), max(seconds, _START)
    try:
        while not (await asyncio.wait([ended], timeout=_TICK))[0]:
            now, present = time.monotonic(), _size(report)
            if present != size:
                events = _events(report)
                own = events[-1].get("limit") if events else None
                size, since, limit = present, now, max(seconds, (own or 0) + 10)
            elif now - since > limit:
                return True
    finally:
        ended.cancel()
    return False


def _size(report: Path) -> int:
    return report.stat().st_size


def _events(report: Path) -> list[dict[str, Any]]:
    """Return the lines that are complete."""
    *lines, _ = report.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]
