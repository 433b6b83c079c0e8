"""The parent: one process per row and per peer, each with a time limit; the report, rewritten after each.

The rows come first, the peers after them: where time runs out, it is the others' figures that are missing. A process
that hangs or crashes is a finding. It becomes an ``error`` in its row, with the end of what it printed, and the run
goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import aiocuda

from . import machine, report
from .peers import PEERS, missing
from .rows import ROWS
from .setting import HOST_DEVICES

#: Seconds. A row takes 2 to 10, those of long pipelines 45; PyTorch needs 12 for three awaits beside a busy loop.
LIMIT, BUDGET = 60.0, 300.0

#: Seconds below which a process is not worth starting, and that one gets to print where it hangs.
_SHORT, _LAST_WORDS = 3.0, 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    names: Sequence[str] = tuple(ROWS)
    driver: str = "auto"
    small: bool | None = None  #: None: on the host driver
    peers: bool = True
    path: Path | None = None
    command: str = ""
    limit: float = LIMIT
    budget: float = BUDGET
    sizes: Mapping[str, float] = dataclasses.field(default_factory=dict)  #: instead of those of each row that has them


def spawn(arguments: Sequence[str], limit: float) -> dict[str, Any]:
    """Run `child` and give what it handed back; ``error`` and ``output`` where it did not end well."""
    began = perf_counter()
    with tempfile.TemporaryDirectory(prefix="aiocuda-benchmark-") as folder:
        out = Path(folder, "result.json")
        with open(Path(folder, "output"), "w+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.child", *arguments, "--out", str(out)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=machine.ROOT,
                env=_environment(),
                start_new_session=True,
            )
            error = _end_of(process, limit)
            output.seek(0)
            said = output.read().decode(errors="replace")
        result: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {}
    if error is None and not result:
        error = "it ended without a result"
    if error is not None:
        result.setdefault("error", error)
        result.update(output=said if len(said) <= 12_000 else f"{said[:6000]}\n…\n{said[-6000:]}")
    result["seconds"] = perf_counter() - began
    return result


def _end_of(process: subprocess.Popen[bytes], limit: float) -> str | None:
    """What went wrong until the process ended, or None."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        for question in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(question)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS)
        return f"did not end within {limit:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return None if code == 0 else f"exit code {code}"


def _environment() -> dict[str, str]:
    """The parent's, with the parent's aiocuda first."""
    ours = [str(Path(aiocuda.__file__).parents[1]), str(machine.ROOT)]
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(ours + ([inherited] if inherited else []))}


class Run:
    """One run. `report` is complete at any time."""

    def __init__(self, options: Options, tell: Callable[[str], None]) -> None:
        self._options = options
        self._tell = tell
        self._began = perf_counter()
        found = spawn(["machine"], LIMIT)
        found.pop("seconds")
        self._driver = options.driver
        if options.driver == "auto":
            self._driver = "host" if found.get("gpu") is None else "cuda"
            if self._driver == "host":
                tell(f"on the host driver: {found.get('reason') or found.get('error')}")
        self._small = self._driver == "host" if options.small is None else options.small
        devices = found.get("gpus", 0) if self._driver == "cuda" else HOST_DEVICES
        self._names = options.names or tuple(
            name for name, row in ROWS.items() if row.devices <= devices and not row.group
        )
        self._results: dict[str, dict[str, Any]] = {}
        self._peers: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in self._names}
        self.report: dict[str, Any] = {
            "schema": report.SCHEMA,
            **machine.tree(),
            "command": options.command,
            "driver": self._driver,
            "small": self._small,
            "machine": found,
            "versions": machine.versions(),
            "seconds": 0.0,
            "rows": [],
        }

    def run(self) -> dict[str, Any]:
        for name in self._names:
            self._results[name] = self._spawn(["row", name])
            self._tell(report.line(self._update(name)))
        if self._options.peers:
            for name in self._names:
                for peer in ROWS[name].peers:
                    self._peers[name][peer] = self._peer(name, peer)
                    self._tell(_peer_line(name, self._update(name)["peers"][peer]))
        return self.report

    def _peer(self, name: str, peer: str) -> dict[str, Any]:
        reason = missing(PEERS[peer], gpu=self._driver == "cuda")
        return self._spawn(["peer", name, "--peer", peer]) if reason is None else {"skipped": reason}

    def _spawn(self, arguments: Sequence[str]) -> dict[str, Any]:
        left = self._options.budget - (perf_counter() - self._began)
        if left < _SHORT:
            return {"error": f"not run: the {self._options.budget:g} s of this run were used up"}
        size = ["--small"] if self._small else []
        size += [f"--size={name}={value:g}" for name, value in self._options.sizes.items()]
        return spawn([*arguments, "--driver", self._driver, *size], min(self._options.limit, left))

    def _update(self, name: str) -> dict[str, Any]:
        """Build the rows that there are, and write the report."""
        self.report["seconds"] = perf_counter() - self._began
        self.report["rows"] = [
            report.row_report(ROWS[known], result, self._peers[known], self._small)
            for known, result in self._results.items()
        ]
        if self._options.path is not None:
            report.write(self.report, self._options.path)
        found: dict[str, Any] = next(row for row in self.report["rows"] if row["name"] == name)
        return found


def _peer_line(name: str, peer: dict[str, Any]) -> str:
    if "p50" not in peer:
        return f"{name:<20} {peer['label']}: {peer.get('skipped') or peer.get('error')}"
    times = "" if peer["times"] is None else f"; aiocuda is {peer['times']:.3g} × as fast"
    return f"{name:<20} {peer['label']}: {report.number(peer['p50'])}{times}"
