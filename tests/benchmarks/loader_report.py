"""The report of the benchmark of data loaders: a row for each case and executor, as `report` describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import machine, report
from .figures import summarise
from .harness import spawn
from .loader_cases import WORKERS, Case

__all__ = ["LoaderReport"]

_LABELS = {"spdl": "SPDL", "spdl-subprocess": "SPDL in a process", "torch": "PyTorch", "serial": "no loader"}
_EXECUTORS = {"thread": f"{WORKERS} threads", "process": f"{WORKERS} processes"}
_BOUNDS = {
    "step": "steps alone",
    "link": "copies alone",
    "decode_thread": f"decoder alone in {WORKERS} threads",
    "decode_process": f"decoder alone in {WORKERS} processes",
}


class LoaderReport:
    """The figures of all loaders, written after each.

    Attributes
    ----------
    errors
        By loader: why it did not end.
    """

    def __init__(self, path: Path | None, command: str, *, small: bool, driver: str, before: str = "") -> None:
        self._before = before
        self.errors: dict[str, str] = {}
        self._path = path
        self._small = small
        found = spawn(["machine"], 60)
        found.pop("seconds")
        self._head: dict[str, Any] = {
            "schema": report.SCHEMA,
            **machine.tree(),
            "command": command,
            "driver": driver,
            "small": small,
            "machine": found,
            "versions": machine.versions(),
        }
        self._limits: dict[str, dict[str, float]] = {}
        self._lines: dict[str, dict[str, dict[str, Any]]] = {}  # by case and loader

    def add_case(self, case: Case, limits: dict[str, float]) -> None:
        """Add a case with its bounds, in batches per second."""
        self._limits[case.name] = limits
        self._lines[case.name] = {}

    def add(self, line: dict[str, Any]) -> str:
        """Add the figures of a loader in a case, write the report, and return a line for a terminal."""
        case, loader = line["case"], line["loader"]
        self._lines[case][loader] = line
        if self._path is not None:
            report.write({**self._head, "errors": self.errors, "rows": self._rows()}, self._path)
        rate = summarise(line["rates"], "higher")["p50"]
        name, bound = self._bound(case, loader)
        turn = "" if line["longest_turn_ms"] is None else f", turn {line['longest_turn_ms']:.1f} ms"
        return (
            f"{loader:16} {case:32} {rate:8.0f}/s {rate / bound:5.2f} of {name}, first {line['first_ms']:6.0f} ms, "
            f"{line['cores']:.1f} cores{turn} {line['note']}"
        )

    def _bound(self, case: str, loader: str) -> tuple[str, float]:
        """Return the smallest bound of a loader, and its name."""
        limits = self._limits[case]
        decode = "decode_process" if loader in ("aiocuda-process", "before-process", "torch") else "decode_thread"
        return min(((name, limits[name]) for name in ("step", "link", decode)), key=lambda each: each[1])

    def _rows(self) -> list[dict[str, Any]]:
        return [
            self._row(case, executor, lines)
            for case, lines in self._lines.items()
            for executor in _EXECUTORS
            if f"aiocuda-{executor}" in lines
        ]

    def _row(self, case: str, executor: str, lines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        line = lines[f"aiocuda-{executor}"]
        bound_name, bound = self._bound(case, f"aiocuda-{executor}")
        figures = {key: line[key] for key in ("first_ms", "cores", "longest_turn_ms")}
        found = summarise(line["rates"], "higher")
        peers: dict[str, Any] = {}
        if "by_hand" in self._limits[case]:
            by_hand = min(self._limits[case]["by_hand"], self._limits[case]["step"])
            peers["by_hand"] = {"label": "by hand", "p50": by_hand, "n": 1, "times": found["p50"] / by_hand}
        for loader, label in {**_LABELS, f"before-{executor}": self._before}.items():
            name = loader.removesuffix(f"-{executor}")
            if loader in lines:
                peer = summarise(lines[loader]["rates"], "higher")
                first = lines[loader]["first_ms"]
                peers[name] = {"label": label, **peer, "first_ms": first, "times": found["p50"] / peer["p50"]}
                figure = f"times_{loader.partition('-')[0]}"  # of SPDL, that beside its faster form
                figures[figure] = min(peers[name]["times"], figures.get(figure, math.inf))
            elif name in self.errors:
                peers[name] = {"label": label, "error": "did not end"}
        if "torch" in peers and "first_ms" in peers["torch"]:
            figures["first_of_torch"] = line["first_ms"] / peers["torch"]["first_ms"]
        row = {
            "name": f"loader_{executor}_{case}".replace(", ", "_").replace(" ", "_"),
            "title": f"batches loaded by {_EXECUTORS[executor]}: {case}",
            "unit": "batches/s",
            "better": "higher",
            **found,
            "ratio": found["p50"] / bound,
            "baseline": {"label": _BOUNDS[bound_name], "p50": bound, "n": 1},
            "figures": figures,
            "bounds": self._limits[case],
            "peers": peers,
            "notes": [line["note"]],
        }
        row["checks"] = [] if self._small else _checks(case, executor, row)
        row["met"] = all(check["met"] for check in row["checks"])
        return row


def _checks(case: str, executor: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bounds that the row is held to."""
    decoder, size, step = case.split(", ")
    wanted: list[tuple[str, str, float]] = [("longest_turn_ms", "at_most", 5.0)]
    if step in ("step 0.2 ms", "step 1 ms"):  # in the other cases a loader may not help
        wanted.append(("ratio", "at_least", 0.95))
    if "times_spdl" in row["figures"] and decoder == "memcpy" and size.endswith("MB"):
        wanted.append(("times_spdl", "at_least", 0.99))  # never slower; where the step is the bound, both have its rate
    if "times_before" in row["figures"]:
        wanted.append(("times_before", "at_least", 0.95))
    if executor == "thread" and "first_of_torch" in row["figures"]:
        wanted.append(("first_of_torch", "at_most", 0.5))
    if executor == "process" and case == "memcpy, 9.6 MB, step 0.2 ms":
        wanted += [("p50", "at_least", 2000.0), ("times_spdl", "at_least", 5.0), ("times_torch", "at_least", 8.0)]
    checks = []
    for figure, side, limit in wanted:
        value = row["figures"].get(figure, row.get(figure))
        met = None if value is None else value <= limit if side == "at_most" else value >= limit
        checks.append({"figure": figure, "value": value, side: limit, "met": met})
    return checks
