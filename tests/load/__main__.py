"""``python -m tests.load --json FILE``: measures our service and its peers, and writes the report and the picture."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.harness import spawn
from tests.benchmarks.machine import ROOT
from tests.benchmarks.report import line, write

from . import picture
from .measure import LOADS, Plan, capacity, figures_at, retries
from .outcomes import Figures
from .report import ALL_OURS, Measured, make_report
from .running import RunningServer, ServerError
from .servers import SERVERS

#: Enough to see that everything works; not held to any bound.
QUICK = Plan(repetitions=1, capacity_s=0.8, load_s=0.8, warm_up_s=0.3, retry_s=(1.2, 1.6))


class LoadTest:
    """One run."""

    def __init__(self, given: argparse.Namespace, command: str) -> None:
        self._plan = QUICK if given.quick else Plan()
        self._path: Path | None = given.json
        self._quick: bool = given.quick
        self._command = command
        self._python: str = given.peers_python
        self._began = time.monotonic()
        self.skipped: dict[str, str] = {}
        self._peers_versions: dict[str, str] = {}
        if any(name not in ALL_OURS for name in given.server):
            answer = json.loads(self._ask_peers())
            peers = [name for name in given.server if name not in ALL_OURS]
            self.skipped = {name: answer["missing"][name] for name in peers if name in answer["missing"]}
            self._peers_versions = answer["versions"]
        self.measured = {name: Measured() for name in given.server if name not in self.skipped}
        self._machine = spawn(["machine"], 60)
        del self._machine["seconds"]
        cores = sorted(os.sched_getaffinity(0))
        self._client_core, self._server_core = cores[0], cores[1 % len(cores)]

    def _ask_peers(self) -> str:
        """Return what the peers' interpreter says about the peers' packages."""
        command = [self._python, "-m", "tests.load.servers", "--describe"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    async def run(self) -> None:
        """Measure all servers in turn, as often as the plan says."""
        os.sched_setaffinity(0, {self._client_core})
        gc.collect()
        gc.freeze()
        for repetition in range(self._plan.repetitions):
            for name, measured in self.measured.items():
                try:
                    await self._measure(name, measured, seed=1000 * repetition)
                except ServerError as error:
                    measured.error = str(error)
                    _tell(f"{name}: {error}")
                self._write()

    async def _measure(self, name: str, measured: Measured, seed: int) -> None:
        server = SERVERS[name]
        python = None if name in ALL_OURS else self._python
        async with RunningServer(server, self._plan.setting, core=self._server_core, python=python) as running:
            gc.disable()  # a collection would make the client late
            try:
                rate = await capacity(running.port, server.saturated_by, self._plan)
                _tell(f"{server.label:<10} capacity {rate:.0f}/s")
                measured.capacities.append(rate)
                for number, load in enumerate(LOADS):
                    figures = await self._at(running.port, load * rate, seed + number)
                    measured.figures.setdefault(load, []).append(figures)
                    _tell(_figures_line(server.label, load, figures))
                if name in ALL_OURS:
                    found = await retries(running.port, rate, self._plan, seed + len(LOADS))
                    measured.retries.append(found)
                    _tell(f"{server.label:<10} {found.sent} retries, {found.held or 0.0:.1%} served in time")
            finally:
                gc.enable()
                gc.collect()

    async def _at(self, port: int, rate: float, seed: int) -> Figures:
        """Return the statistics at a rate. A measurement with a late client is made again, at most twice."""
        for _ in range(2):
            figures = await figures_at(port, rate, self._plan, seed)
            if figures.kept_schedule:
                return figures
        return await figures_at(port, rate, self._plan, seed)

    def _write(self) -> None:
        self.report = make_report(
            self.measured,
            found=self._machine,
            command=self._command,
            seconds=time.monotonic() - self._began,
            quick=self._quick,
            peers=self._peers_versions,
            skipped=self.skipped,
        )
        if self._path is not None:
            write(self.report, self._path)


def _figures_line(label: str, load: float, figures: Figures) -> str:
    times = " / ".join("–" if ms is None else f"{ms:.1f}" for ms in (figures.p50_ms, figures.p99_ms, figures.p999_ms))
    late = "" if figures.kept_schedule else f"  CLIENT LATE: p99 {figures.late_p99_ms:.1f} ms"
    problems = f"  {figures.problems}" if figures.problems else ""
    return (
        f"{label:<10} {load:4.0%} of capacity: {figures.offered:6.0f}/s, goodput {figures.goodput:6.0f}/s, "
        f"p50/p99/p99.9 {times} ms, refused {figures.refused:.1%}{problems}{late}"
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if everything was measured, whether or not the bounds hold; 1 if a server failed or is missing."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the picture here, as SVG")
    parser.add_argument("--quick", action="store_true", help="short measurements: they show that everything works")
    parser.add_argument("--server", action="append", choices=SERVERS, help="only these; may be repeated")
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter that has the peers' packages")
    given = parser.parse_args(arguments)
    given.server = given.server or list(SERVERS)
    test = LoadTest(given, shlex.join(["python", "-m", "tests.load", *arguments]))
    for name, why in test.skipped.items():
        _tell(f"{SERVERS[name].label}: {why}")
    asyncio.run(test.run())
    for row in test.report["rows"]:
        _tell(line(row))
    if given.picture is not None and test.report["curves"]:
        given.picture.write_text(picture.draw(test.report["curves"]), encoding="utf-8")
    return 1 if test.skipped or test.report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
