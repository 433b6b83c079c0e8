"""The report: what a run writes, as plain JSON.

``{schema, commit, dirty, command, driver, small, machine, versions, seconds, rows: [{name, title, unit, better, p50,
p99, n, bound, ratio, met, checks, baseline, figures, peers, …}]}``. A row or peer that came to grief has ``error``
instead of figures; a peer that cannot run here has ``skipped``. ``dirty`` is True if the code differed from the commit.
``bound`` is the limit of the row's first check, ``ratio`` is p50 divided by the baseline's p50, and p99 always lies on
the bad side.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .figures import Better, summarise
from .peers import PEERS
from .rows import Row

SCHEMA = "aiocuda-benchmarks/1"

#: The entries of every row, also of a failed one.
_UNMEASURED: dict[str, Any] = {"p50": None, "p99": None, "n": 0, "ratio": None, "met": None}


def row_report(
    row: Row, result: Mapping[str, Any], peers: Mapping[str, Mapping[str, Any]], small: bool = False
) -> dict[str, Any]:
    """One row, from what its process and those of its peers handed back. Small sizes are held to no bound."""
    report: dict[str, Any] = {
        "name": row.name,
        "title": row.title,
        "unit": row.unit,
        "better": row.better,
        "bound": row.bounds[0].limit,
        **_UNMEASURED,
        "baseline": None,
        "figures": {},
        "checks": [],
        "peers": {},
        "notes": [],
        **{key: result[key] for key in ("error", "output", "seconds", "statistics") if key in result},
    }
    if "samples" in result:
        report.update(summarise(result["samples"], row.better))
        report["figures"] = dict(result["figures"])
        report["notes"] = list(result.get("notes", ()))
        if result["baseline"]:
            report["baseline"] = {"label": row.baseline, **summarise(result["baseline"], row.better)}
            report["ratio"] = _divide(report["p50"], report["baseline"]["p50"])
    for name, peer in peers.items():
        report["peers"][name] = _peer_report(name, peer, report, row.better)
        if report["peers"][name].get("times") is not None:
            report["figures"][f"times_{name}"] = report["peers"][name]["times"]
    if report["n"] and not small:
        report["checks"] = [bound.check(report) for bound in row.bounds]
        report["met"] = _all_met([check["met"] for check in report["checks"]])
    return report


def _peer_report(name: str, peer: Mapping[str, Any], row: Mapping[str, Any], better: Better) -> dict[str, Any]:
    report: dict[str, Any] = {"label": PEERS[name].label}
    report.update({key: peer[key] for key in ("error", "output", "seconds", "skipped") if key in peer})
    if "samples" in peer:
        report.update(summarise(peer["samples"], better), figures=peer["figures"])
        report["ratio"] = _divide(report["p50"], row["baseline"] and row["baseline"]["p50"])
        pair = (row["p50"], report["p50"]) if better == "higher" else (report["p50"], row["p50"])
        report["times"] = _divide(*pair)  # how many times better we are
    return report


def _divide(dividend: float | None, divisor: float | None) -> float | None:
    if dividend is None or divisor is None or divisor <= 0:
        return None
    return dividend / divisor


def _all_met(checks: list[bool | None]) -> bool | None:
    """False if one is missed; None if nothing is missed and something could not be checked."""
    if False in checks:
        return False
    return None if None in checks else True


def rounded(value: Any) -> Any:
    """Six significant digits: more would be noise that makes two files differ."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def write(report: Mapping[str, Any], path: Path) -> None:
    """Whole or not at all: it is written after every row, and a run may be killed at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(rounded(report), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(draft, path)


def line(row: Mapping[str, Any]) -> str:
    """One row for a terminal."""
    if not row["n"]:
        return f"{row['name']:<20} ERROR {row['error']}"
    ratio = "" if row["ratio"] is None else f"  {row['ratio']:.3g} × {row['baseline']['label']}"
    mark = {True: "  met: ", False: "  MISSED: ", None: "  "}[row["met"]]
    checks = ", ".join(_check(check) for check in row["checks"])
    notes = "".join(f"  ({note})" for note in row.get("notes", ()))
    error = f"  ERROR {row['error']}" if "error" in row else ""
    return f"{row['name']:<20} {number(row['p50'])} {row['unit']}{ratio}{mark}{checks}{notes}{error}"


def _check(check: Mapping[str, Any]) -> str:
    sign, limit = ("≤", check["at_most"]) if "at_most" in check else ("≥", check["at_least"])
    value = "–" if check["value"] is None else number(check["value"])
    return f"{check['figure']} {value} ({sign} {number(limit)})"


def number(value: float) -> str:
    """Three digits, thousands apart."""
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")
    return f"{value:.3g}"
