"""The tables of figures in README and the documentation, from ``docs/benchmarks/*.json``.

``docs/benchmarks`` has the latest run of each row on each machine; where only an older run has the times of other
libraries, that one (``h200.json``). Git keeps the rest. README has a few rows of ``h200.json`` and
``h200-peers.json``, ``docs/benchmarks.md`` has all rows of all files, ``docs/reference/limits.md`` the limits of the
project, ``docs/how-to/service.md`` two servers of ``host-serving.json``, and ``docs/how-to/data-loader.md`` and
``docs/how-to/training.md`` some rows of ``h200-loaders.json``. ``python -m tests.benchmarks.readme`` writes the tables
between the markers of these pages, and the file with the published figures that ``aiocuda bench`` shows; with
``--check`` it compares, and exits with 1 if a page or that file differs. Each table has the version, the commit, and
whether the code differed from that commit. ``make pictures`` draws the pictures of figures again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .machine import ROOT
from .report import SCHEMA, number

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

_CURE = "run python -m tests.benchmarks.readme"


class ReadmeError(Exception):
    """README or a file of figures cannot be used. The message names the file and the reason."""


#: The rows of README's table, in plain words.
FIGURES = {
    "await_empty_kernel": "await one small kernel, from the launch to the next line of the coroutine",
    "ops_8x16": "awaited kernels per second, 128 at a time on 8 streams",
    "streams_32": "32 tasks, each with three kernels of 10 ms",
    "busy_loop": "delay of a result while another coroutine keeps the loop busy, 100 µs in each iteration",
    "pageable_up": "copy 1 GiB of a NumPy array to the GPU",
    "empty_free": "allocate and free 1 MiB of device memory",
}

#: The sections of ``docs/benchmarks.md``, by the name of their file, in their order. Other files come after these.
SECTIONS = {
    "h200": "Operations, copies and pipelines",
    "h200-coordination": "Coordinators and collectives",
    "h200-peers": "Waiting, beside other libraries",
    "h200-waits": "Waiting, beside a raw host callback",
    "h200-wait": "Waiting for PyTorch's events",
    "h200-stalls": "Calls of CUDA that wait for kernels",
    "h200-x2-stalls": "The first copy between two GPUs",
    "h200-x2-collectives": "All-reduce on two GPUs, before the owner of a part sent its result",
    "h100": "With the compiled core, on an H100",
    "h200-freeze": "A service with and without frozen objects",
    "h200-loaders": "Loading data",
    "h200-training": "A training step behind a loader",
    "h200-workloads": "Iterative workloads in both modes",
    "h200-serving": "Requests in batches, with PyTorch",
    "h200-services": "Requests one by one, with PyTorch",
    "host-serving": "A service under load",
    "h200-cluster": "Replicas of a cluster",
    "h200-x2-cluster": "Replicas on two GPUs",
}

#: The loads of the table in ``docs/how-to/service.md``.
LOADS = (0.5, 0.8, 0.95, 1.5)

#: The columns of README's table for peers, and the beginnings of the names of their peers.
LIBRARIES = {"PyTorch": "torch", "CuPy": "cupy"}


#: The file in the package with the published figures.
PUBLISHED = Path("src", "aiocuda", "cli", "published.json")

#: The page with the tables of `limits`.
LIMITS = Path("docs", "reference", "limits.md")

#: The page with the table of `concurrency_table`.
CONCURRENCY = Path("docs", "how-to", "service.md")

#: The tables of `loaders_table`: a page, and the cases that it shows, in plain words.
LOADERS: dict[Path, dict[str, str]] = {
    Path("docs", "how-to", "data-loader.md"): {
        "memcpy_9.6_MB_step_0.2_ms": "9.6 MB, one copy; 0.2 ms",
        "memcpy_9.6_MB_step_1_ms": "9.6 MB, one copy; 1 ms",
        "memcpy_1_MB_step_10_ms": "1 MB, one copy; 10 ms",
        "memcpy_66_KB_step_0.2_ms": "66 KB, one copy; 0.2 ms",
        "memcpy_4.1_KB_step_0.02_ms": "4 KB, one copy; 0.02 ms",
        "images_9.6_MB_step_0.2_ms": "64 images of 150 KB, a copy each; 0.2 ms",
        "png_9.6_MB_step_1_ms": "64 images, decoded from PNG; 1 ms",
    },
    Path("docs", "how-to", "training.md"): {
        "memcpy_9.6_MB_step_1_ms": "9.6 MB, one copy from memory; 1 ms",
        "images_9.6_MB_step_0.2_ms": "64 images of 150 KB, a copy each; 0.2 ms",
        "png_9.6_MB_step_1_ms": "64 images, decoded from PNG; 1 ms",
    },
}

#: The rows that ``aiocuda bench`` shows: the row of ``h200.json``, its unit there, and the figure from that row.
PUBLISHED_ROWS: dict[str, tuple[str, str, Callable[[Mapping[str, Any]], float]]] = {
    **{
        name: (name, unit, lambda row: float(row["p50"]))
        for name, unit in (
            ("await_empty_kernel", "µs"),
            ("ops_8x16", "ops/s"),
            ("pageable_up", "GB/s"),
            ("pageable_down", "GB/s"),
            ("empty_free", "µs"),
            ("triple_buffer", "iterations/s"),
            ("pipeline_iteration", "µs"),
        )
    },
    "launches": ("burst_20000", "ms", lambda row: 20_000 / row["p50"] * 1e3),
    # Pinned memory was copied in the same runs, for the ratio.
    "pinned_up": ("pageable_up", "GB/s", lambda row: row["p50"] / row["figures"]["pinned_ratio"]),
    "pinned_down": ("pageable_down", "GB/s", lambda row: row["p50"] / row["figures"]["pinned_ratio"]),
}


def published(folder: Path) -> str:
    """Return the published figures that travel with the package, as JSON."""
    path = folder / "h200.json"
    report = _load(path)
    rows = {row["name"]: row for row in report["rows"] if row["n"]}
    found = {}
    for name, (source, unit, figure) in PUBLISHED_ROWS.items():
        if source not in rows or rows[source]["unit"] != unit:
            raise ReadmeError(f"{path} has no row {source} in {unit}, which `aiocuda bench` shows")
        found[name] = {"p50": float(f"{figure(rows[source]):.6g}"), "row": source}
    machine, versions = report["machine"], report["versions"]
    commit, dirty = _tree(report)
    measured = {
        "gpu": machine["gpu"],
        "cuda": machine["cuda"],
        "driver": machine["driver"],
        "cpus": machine["cpus"],
        "python": versions["python"],
        "aiocuda": versions["aiocuda"],
        "commit": commit,
        "dirty": dirty,
    }
    return json.dumps({"measured": measured, "rows": found}, indent=2) + "\n"


def short_table(folder: Path) -> str:
    """Return README's table: a few rows of the H200, with the peers that awaited the same work."""
    path = folder / "h200.json"
    if not path.is_file():
        return "No figures have been recorded yet: `make bench NAME=h200` measures them.\n"
    report, older = _load(path), folder / "h200-peers.json"
    rows = {row["name"]: (row, "") for row in report["rows"] if row["n"]}
    measured = f"Measured with {_code(report)}"
    if older.is_file():
        beside = _load(older)
        rows |= {row["name"]: (row, " *") for row in beside["rows"] if row["n"]}
        measured += f"; the rows with * with {_code(beside)}"
    lines = [_cells("", "aiocuda", *LIBRARIES, "driver alone"), "|---" * (len(LIBRARIES) + 3) + "|"]
    for name, title in FIGURES.items():
        if name not in rows:
            raise ReadmeError(f"{path} has no figures of {name}, which README's table shows")
        row, mark = rows[name]
        values = [row["p50"], *(_peer(row, library) for library in LIBRARIES.values()), row["baseline"]["p50"]]
        lines.append(_cells(title + mark, *(_value(value, row["unit"]) for value in values)))
    return "\n".join([*lines, "", f"{measured}.", ""])


def _peer(row: Mapping[str, Any], library: str) -> float | None:
    """Return the figure of a library's peer, or None."""
    return next((peer.get("p50") for name, peer in row["peers"].items() if name.startswith(library)), None)


def _value(value: float | None, unit: str) -> str:
    """Return a figure with its unit; a long time in milliseconds or seconds."""
    if value is None:
        return "–"
    for longer in ("ms", "s"):
        if unit in ("µs", "ms") and value >= 1000:
            value, unit = value / 1000, longer if unit == "µs" else "s"
    return f"{number(value)} {unit}" if unit != "ops/s" else number(value)


def section(folder: Path) -> str:
    """Return the tables of all files, one for each machine, for ``docs/benchmarks.md``."""
    reports = _reports(folder)
    if not reports:
        return "No figures have been recorded yet: `make bench` measures them.\n"
    return "\n".join(_table(path, report) for path, report in reports.items())


def limits(folder: Path) -> str:
    """Return the tables of the limits of all files, for ``docs/reference/limits.md``."""
    reports = _reports(folder).values()
    return "\n".join(_limits(report) for report in reports if any(row["checks"] for row in report["rows"]))


def _reports(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the files of a folder, in the order of the page.

    ``local.json`` and ``local-serving.json`` are what `make bench` writes without a name: git ignores them, and so do
    the pages.
    """
    order = list(SECTIONS)
    files = sorted(
        (path for path in folder.glob("*.json") if not path.name.startswith("local")),
        key=lambda path: (order.index(path.stem) if path.stem in order else len(order), path.stem),
    )
    return {path: _load(path) for path in files}


def concurrency_table(folder: Path) -> str:
    """Return the table of ``docs/how-to/service.md``: our server with two batches at a time, and with one."""
    path = folder / "host-serving.json"
    report = _load(path)
    curves = {curve["server"]: curve for curve in report.get("curves", ())}
    if not curves.keys() >= {"ours", "ours_one"}:
        raise ReadmeError(f"{path} has no figures of ours and ours_one, which {CONCURRENCY} shows")
    servers = [curves["ours_one"], curves["ours"]]
    lines = [
        _cells("", "one batch at a time", "`max_concurrent_batches=2`"),
        "|---|---|---|",
        _cells("requests per second, at most", *(number(server["capacity"]) for server in servers)),
    ]
    for load in LOADS:
        points = [next(point for point in server["points"] if point["load"] == load) for server in servers]
        times = [f"{_value_or_dash(point['p50_ms'])} / {_value_or_dash(point['p99_ms'])} ms" for point in points]
        lines.append(_cells(f"latency at {load * 100:g} % of that, p50 / p99", *times))
    where = f"Measured with {_code(report)} ([`{path.name}`](../benchmarks/{path.name}))."
    return "\n".join([*lines, "", where, ""])


def loaders_table(folder: Path, cases: Mapping[str, str]) -> str:
    """Return a table of batches per second: our threads and processes, the loaders of others, and the limit."""
    path = folder / "h200-loaders.json"
    report = _load(path)
    rows = {row["name"]: row for row in report["rows"]}
    left_out = ("by_hand", "before")
    others = {
        name: peer["label"] for row in rows.values() for name, peer in row["peers"].items() if name not in left_out
    }
    columns = ["batches, and the time of a step", *others.values(), "threads", "processes", "limit"]
    lines = [_cells(*columns), "|---" * len(columns) + "|"]
    for case, title in cases.items():
        threads, processes = (rows.get(f"loader_{executor}_{case}") for executor in ("thread", "process"))
        if threads is None or processes is None:
            raise ReadmeError(f"{path} has no figures of {case}, which a table of loaders shows")
        peers = [threads["peers"].get(name, {}).get("p50") for name in others]
        limit = max(row["baseline"]["p50"] for row in (threads, processes))
        lines.append(_cells(title, *map(_value_or_dash, [*peers, threads["p50"], processes["p50"], limit])))
    where = f"Measured with {_code(report)} ([`{path.name}`](../benchmarks/{path.name})), on {_machine(report)}."
    return "\n".join([*lines, "", where, ""])


def _load(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ReadmeError(f"{path} is not JSON: {error}") from error
    if report.get("schema") != SCHEMA:
        raise ReadmeError(f"{path} has the schema {report.get('schema')!r}, not {SCHEMA!r}")
    return report


def _tree(report: Mapping[str, Any]) -> tuple[str | None, bool | None]:
    """Return the commit, and whether the code differed from it. Older files have ``-dirty`` in the commit."""
    commit: str | None = report["commit"]
    if commit is None or "dirty" in report:
        return commit, report.get("dirty")
    return commit.removesuffix("-dirty"), commit.endswith("-dirty")


def _code(report: Mapping[str, Any]) -> str:
    """Return the version, the commit, and whether the code differed from it."""
    commit, dirty = _tree(report)
    of = "an unknown commit" if commit is None else f"commit `{commit[:12]}`"
    return f"aiocuda {report['versions']['aiocuda']}, {of}{' with uncommitted changes' if dirty else ''}"


def _machine(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    if not machine["gpu"]:
        return f"host driver, {machine['cpus']} CPUs"
    gpus = f"{count} × " if (count := machine.get("gpus", 1)) > 1 else ""  # older files have no number
    return f"{gpus}{machine['gpu']}, CUDA {machine['cuda']}, driver {machine['driver']}, {machine['cpus']} CPUs"


def _table(path: Path, report: Mapping[str, Any]) -> str:
    """Return the section of a file: its figures beside those of the others, without the limits."""
    sizes = " Reduced sizes: it shows that the rows run, and no more." if report["small"] else ""
    lines = [
        f"## {SECTIONS.get(path.stem, path.stem)}",
        "",
        f"{_machine(report)}, Python {report['versions']['python']}, {_code(report)}. Medians of one run "
        f"([`{path.name}`](benchmarks/{path.name}), with its command).{sizes}",
        "",
        "| | aiocuda | p99 | baseline | others |",
        "|---|---|---|---|---|",
        *(_line(row) for row in report["rows"]),
        "",
        *_curves(report.get("curves", ())),
    ]
    return "\n".join(lines)


def _limits(report: Mapping[str, Any]) -> str:
    """Return the limits of a file's rows."""
    rows = [_cells(row["title"], _checks(row["checks"])) for row in report["rows"] if row["checks"]]
    return "\n".join([f"{_machine(report)}, {_code(report)}:", "", "| | measured (limit) |", "|---|---|", *rows, ""])


def _curves(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of a load test: a line for each server, a column for each load."""
    if not curves:
        return []
    loads = [f"{point['load'] * 100:g} %" for point in curves[0]["points"]]
    lines = [
        "Latency of accepted requests from their scheduled time, p50 / p99 / p99.9 in ms, at parts of each server's "
        "own capacity. The last two columns are at the highest load: right results in time, and the refused share.",
        "",
        _cells("", "capacity, requests/s", *loads, "in time, per s", "refused"),
        "|---" * (len(loads) + 4) + "|",
    ]
    for curve in curves:
        points = curve["points"]
        last = points[-1]
        cells = [
            " / ".join(_value_or_dash(point[name]) for name in ("p50_ms", "p99_ms", "p999_ms")) for point in points
        ]
        lines.append(
            _cells(
                curve["label"],
                number(curve["capacity"]),
                *cells,
                number(last["goodput"]),
                f"{last['refused'] * 100:.0f} %",
            )
        )
    picture = "![Latency and goodput against the offered load](pictures/latency-against-load.svg)"
    caption = (
        "*Left, lower is better; a line that crosses the deadline no longer answers in time. Right, higher is better: "
        "a server that stays level beyond 100 % refuses what it cannot answer in time.*"
    )
    return [*lines, "", picture, "", caption, ""]


def _value_or_dash(value: float | None) -> str:
    return "–" if value is None else number(value)


def _line(row: Mapping[str, Any]) -> str:
    if not row["n"]:
        return _cells(row["title"], f"error: {row['error']}", "", "", _others(row))
    baseline = row["baseline"]
    beside = "" if baseline is None else f"{number(baseline['p50'])} ({baseline['label']})"
    value = f"{number(row['p50'])} {row['unit']}"
    return _cells(row["title"], value, number(row["p99"]), beside, _others(row))


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


#: Explanations of the names of figures.
_NAMES = {
    "p50": "",
    "ratio": "× baseline",
    "cpu_share": "of a core",
    "longest_turn_ms": "ms, longest turn of the loop",
    "longest_call_ms": "ms, longest call",
    "held_ratio": "× baseline behind a full queue",
    "times_cupy_host_function": "× CuPy",
    "times_spdl": "× SPDL",
    "times_torch": "× PyTorch",
    "first_of_torch": "of PyTorch's time to the first batch",
    "times_best": "× the best of the others",
    "with_retry_after": "of the refusals have Retry-After",
    "p99": "p99",
}


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    """``1.21 × baseline (≤ 1.4)``; a missed bound is marked."""
    parts = []
    for check in checks:
        limit = f"≤ {number(check['at_most'])}" if "at_most" in check else f"≥ {number(check['at_least'])}"
        value = "–" if check["value"] is None else number(check["value"])
        text = " ".join(f"{value} {_NAMES.get(check['figure'], check['figure'])}".split()) + f" ({limit})"
        parts.append(f"**missed: {text}**" if check["met"] is False else text)
    return "; ".join(parts)


def _others(row: Mapping[str, Any]) -> str:
    parts = []
    for peer in row["peers"].values():
        if "p50" in peer:
            parts.append(f"{peer['label']} {number(peer['p50'])}")
        elif "error" in peer:
            parts.append(f"{peer['label']}: {peer['error']}")
    return "; ".join(parts)


def filled(page: str, table: str) -> str:
    """Return a page with ``table`` between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before:
        raise ReadmeError(f"pages with a table of figures need one {BEGIN} and, below it, one {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder with README.md (default: this project's)")
    given = parser.parse_args(argv)
    folder: Path = given.root / "docs" / "benchmarks"
    pages: dict[Path, Callable[[Path], str]] = {
        given.root / "README.md": short_table,
        given.root / "docs" / "benchmarks.md": section,
        given.root / LIMITS: limits,
        given.root / CONCURRENCY: concurrency_table,
        **{given.root / page: partial(loaders_table, cases=cases) for page, cases in LOADERS.items()},
    }
    figures = given.root / PUBLISHED
    try:
        old = {path: path.read_text("utf-8") for path in pages}
        new = {path: filled(old[path], table(folder)) for path, table in pages.items()}
        if figures.parent.is_dir():
            old[figures] = figures.read_text("utf-8") if figures.exists() else ""
            new[figures] = published(folder)
    except (ReadmeError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    differing = [path for path in new if old[path] != new[path]]
    for path in differing:
        if given.check:
            print(f"{path} and docs/benchmarks/*.json disagree: {_CURE}", file=sys.stderr)
        else:
            path.write_text(new[path], "utf-8")
    return 1 if given.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
