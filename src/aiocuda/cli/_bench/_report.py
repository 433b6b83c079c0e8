"""`bench`: runs the measurements; the result, and its JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ... import __version__
from ...device import Device
from ...errors import DeviceOutOfMemory
from ._rows import ROWS, Row

__all__ = ["SCHEMA", "BenchReport", "BenchRow", "bench", "published_figures"]

SCHEMA: Final = "aiocuda-bench/1"

#: Seconds of a row, with its first samples, which do not count.
ROW_SECONDS: Final = 1.0

#: A row may take up to so many seconds for its least number of samples. With one sample, it ends then.
MOST_ROW_SECONDS: Final = 1.5
LEAST_SAMPLES: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRow:
    """The figures of a measurement. The fields, in this order, are the keys of the JSON.

    ``p99`` is on the bad side: 99 % of the samples are better. ``ratio`` is ``p50`` ÷ ``published``.
    """

    name: str
    title: str
    p50: float | None  #: None if it could not be measured
    p99: float | None
    n: int  #: samples
    unit: str
    published: float | None  #: the published p50; None if there is none
    ratio: float | None
    error: str | None = None


@dataclasses.dataclass(slots=True)
class BenchReport:
    """The result. The fields, in this order, are the keys of the JSON."""

    schema: str
    command: str
    driver: str
    comparable: bool  #: False on another driver than ``cuda``: it has no GPU
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None  #: of a package that runs from a checkout of git
    dirty: bool | None  #: True if its files differ from that commit
    published: dict[str, Any]  #: where the published figures were measured
    rows: list[BenchRow] = dataclasses.field(default_factory=list)

    def as_json(self) -> str:
        """Return the report as one JSON object in ASCII."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def published_figures() -> dict[str, Any]:
    """Return the content of ``published.json``."""
    text = resources.files(__package__ or "").joinpath("published.json").read_text("utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures


async def bench(
    device: Device, reason: str | None, begin: Callable[[BenchReport], None], show: Callable[[BenchRow], None]
) -> BenchReport:
    """Measure every row, and return the report.

    Parameters
    ----------
    device
        An open device.
    reason
        Why no GPU is used, or None.
    begin, show
        Called with the report before the first row, and with each row when it has been measured.
    """
    figures = published_figures()
    versions = await device.offload(device.driver.versions)
    commit, dirty = await device.offload(checkout, Path(__file__).parents[2])
    is_gpu = device.driver.name == "cuda"
    report = BenchReport(
        schema=SCHEMA,
        command=" ".join(["aiocuda", *sys.argv[1:]]),
        driver=device.driver.name,
        comparable=is_gpu,
        machine={
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "gpu": device.name if is_gpu else None,
            "reason": reason,
            "cuda": versions.get("cuda-driver"),
        },
        versions={"aiocuda": __version__, "python": platform.python_version(), "numpy": np.__version__, **versions},
        commit=commit,
        dirty=dirty,
        published=figures["measured"],
    )
    begin(report)
    for row in ROWS:
        report.rows.append(await _measured(row, device, figures["rows"].get(row.name, {}).get("p50")))
        show(report.rows[-1])
    return report


async def _measured(row: Row, device: Device, published: float | None) -> BenchRow:
    try:
        samples = await _samples(row, device)
    except (DeviceOutOfMemory, MemoryError) as error:
        return BenchRow(row.name, row.title, None, None, 0, row.unit, published, None, str(error) or "out of memory")
    ordered = sorted(samples, reverse=not row.lower_is_better)
    p50 = statistics.median(ordered)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    ratio = None if published is None else p50 / published
    return BenchRow(row.name, row.title, p50, p99, len(ordered), row.unit, published, ratio)


async def _samples(row: Row, device: Device) -> list[float]:
    """Return the samples of a row, without the first ones."""
    found: list[float] = []
    begin = time.perf_counter()
    async with contextlib.aclosing(row.measure(device)) as samples:
        async for sample in samples:
            found.append(sample)
            taken = len(found) - row.warmup
            seconds = time.perf_counter() - begin
            limit = ROW_SECONDS if taken >= LEAST_SAMPLES else MOST_ROW_SECONDS
            if taken >= row.most or (taken > 0 and seconds > limit):
                break
    return found[row.warmup :]


class Checkout(NamedTuple):
    """The commit, and whether files differ from it. None if the package does not run from a checkout of git."""

    commit: str | None
    dirty: bool | None


def checkout(package: Path) -> Checkout:
    """Return the commit of a package's folder. **May block**, to run git."""
    try:
        # An installed package may be below the folder of another repository, and is no part of it.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        return Checkout(_git(package, "rev-parse", "HEAD").strip(), bool(_git(package, "status", "--porcelain", ".")))
    except (OSError, subprocess.SubprocessError):
        return Checkout(None, None)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
