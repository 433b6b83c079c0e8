"""``python -m tests.benchmarks.compare OLD NEW``: two versions of aiocuda, in slices that alternate.

OLD and NEW are checkouts, each with a compiled core of its own. Each has a process with an open device, and both run
the `slices` of this checkout. While one runs a slice, the other waits for a line on its standard input. A pair is a
slice of each; the order changes from pair to pair. A ratio is the new figure divided by the old one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import aiocuda

from . import report
from .figures import percentile
from .machine import ROOT
from .slices import SLICES

__all__ = ["compared", "main"]

SCHEMA = "aiocuda-comparison/1"

#: Seconds that a process has for one answer.
_LIMIT = 120.0


def compared(name: str, old: Sequence[dict[str, float]], new: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return a row, from the ``value`` and the ``cores`` of each slice."""
    values = {side: [one["value"] for one in slices] for side, slices in (("old", old), ("new", new))}
    cores = {side: [one["cores"] for one in slices] for side, slices in (("old", old), ("new", new))}
    pairs = [_divide(after, before) for before, after in zip(values["old"], values["new"], strict=True)]
    return {
        "name": name,
        "unit": SLICES[name].unit,
        "better": SLICES[name].better,
        "pairs": len(pairs),
        "old": median(values["old"]),
        "new": median(values["new"]),
        "ratio": _divide(median(values["new"]), median(values["old"])),
        "pair_ratio_p25": percentile(pairs, 25),
        "pair_ratio_p50": percentile(pairs, 50),
        "pair_ratio_p75": percentile(pairs, 75),
        "old_cores": median(cores["old"]),
        "new_cores": median(cores["new"]),
        "old_values": values["old"],
        "new_values": values["new"],
    }


def _divide(dividend: float, divisor: float) -> float:
    return dividend / divisor if divisor else float("nan")


def line(row: dict[str, Any]) -> str:
    """One row for a terminal."""
    old, new = (
        f"{report.number(row[side])} {row['unit']}, {row[f'{side}_cores']:.3f} cores" for side in ("old", "new")
    )
    quartiles = f"{row['pair_ratio_p25']:.3f} to {row['pair_ratio_p75']:.3f}"
    return f"{row['name']:<20} {row['ratio']:.3f} × old ({quartiles}); old {old}; new {new}; {row['better']} is better"


class _Side:
    """The process of one version."""

    def __init__(self, checkout: Path, driver: str) -> None:
        package = checkout / "src"
        if not (package / "aiocuda" / "__init__.py").is_file():
            raise SystemExit(f"{checkout} is no checkout: it has no src/aiocuda")
        path = [str(package), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.compare", "--child", "--driver", driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        self._package = package

    def about(self) -> dict[str, Any]:
        """Return what the process says of its version, when its device is open."""
        about = self._answer()
        if not Path(about["file"]).is_relative_to(self._package):
            raise SystemExit(f"{about['file']} was imported, not that in {self._package}")
        return about

    def ask(self, *words: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(_LIMIT, self._process.kill)
        timer.start()
        try:
            answer = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not answer:
            raise SystemExit(f"the process with {self._package} ended, or did not answer within {_LIMIT:g} s")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        with self._process, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
            try:
                self._process.wait(_LIMIT)
            finally:
                self._process.kill()


@contextlib.contextmanager
def _sides(old: Path, new: Path, driver: str) -> Iterator[dict[str, _Side]]:
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, checkout in (("old", old), ("new", new)):
            sides[name] = _Side(checkout.resolve(), driver)
            stack.callback(sides[name].close)
        yield sides


def _row(sides: dict[str, _Side], name: str, pairs: int, seconds: float) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for side in sides.values():
        side.ask("open", name, f"{seconds:g}")
    order = list(sides)
    for _ in range(pairs):
        for side_name in order:
            found[side_name].append(sides[side_name].ask("go"))
        order.reverse()
    for side in sides.values():
        side.ask("close")
    return compared(name, found["old"], found["new"])


async def _serve(driver: Any) -> None:
    """Run slices as standard input asks for them: ``open NAME SECONDS``, ``go``, ``close``; each gets one answer."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with aiocuda.open_device(driver=driver) as device:
        core = getattr(device.statistics(), "core", "unknown")
        _say(file=aiocuda.__file__, version=aiocuda.__version__, core=core, device=device.name)
        gc.collect()
        gc.freeze()
        while words := (await reader.readline()).decode().split():
            _, name, seconds = words
            await _serve_row(reader, device, name, float(seconds))


async def _serve_row(reader: asyncio.StreamReader, device: aiocuda.Device, name: str, seconds: float) -> None:
    async with SLICES[name].open(device) as work:
        await work(seconds / 3)  # kernels are loaded, and the policy has learned
        _say(open=name)
        while (await reader.readline()).decode().strip() == "go":
            cpu, wall = process_time(), perf_counter()
            value = await work(seconds)
            _say(value=value, cores=(process_time() - cpu) / (perf_counter() - wall))
    _say(closed=name)


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compare", description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW", help="the folders with src/aiocuda")
    parser.add_argument("--rows", nargs="+", choices=list(SLICES), default=list(SLICES), metavar="NAME")
    parser.add_argument("--driver", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a slice (default %(default)g)")
    parser.add_argument("--quick", action="store_true", help="3 pairs of slices of 0.05 s: shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, after each of them")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        warnings.simplefilter("ignore")  # advice: a slice awaits one operation after the other on purpose
        asyncio.run(_serve(given.driver))
        return 0
    if len(given.checkouts) != 2:
        parser.error("give two checkouts: OLD NEW")
    pairs, seconds = (3, 0.05) if given.quick else (given.pairs, given.seconds)
    rows: list[dict[str, Any]] = []
    old, new = given.checkouts
    with _sides(old, new, given.driver) as sides:
        about = {name: side.about() for name, side in sides.items()}
        for name, one in about.items():
            print(f"{name}: {one['file']}, core: {one['core']}, {one['device']}")
        if about["old"]["core"] != about["new"]["core"]:
            print("the cores differ: build both with `python -m aiocuda._core.build`", file=sys.stderr)
        for name in given.rows:
            rows.append(_row(sides, name, pairs, seconds))
            print(line(rows[-1]), flush=True)
            if given.json is not None:
                report.write({"schema": SCHEMA, **about, "seconds": seconds, "rows": rows}, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
