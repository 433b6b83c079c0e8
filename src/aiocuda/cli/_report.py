"""Report: what the demo found, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Final

from ._files import Skipped

__all__ = ["Extreme", "Report", "printable", "result_line"]

#: How many of the most and of the least random files are told.
EXTREMES: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Extreme:
    """A file, and how random its bytes are."""

    path: str
    bytes: int
    entropy: float


@dataclasses.dataclass(slots=True)
class Report:
    """Everything that is told. The fields, in this order, are the JSON's keys; see `as_json`.

    ``stage_seconds`` are those of the step-by-step run; ``speedup_bound`` is their sum ÷ the largest. Both times are
    medians of three runs. ``overlap_efficiency`` is the busiest stage's share of the overlapped run. Where nothing was
    read, speed-ups are None.
    """

    driver: str
    device: str
    version: str
    files: int = 0
    bytes: int = 0  #: of the files, holes included
    verified: bool = True
    seconds: float = 0.0
    sequential_seconds: float = 0.0
    speedup: float | None = None
    speedup_bound: float | None = None
    overlap_efficiency: float = 0.0
    stage_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    host_bandwidth: float | None = None  #: bytes per second of each modelled copy engine; None on a GPU
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    most_random: list[Extreme] = dataclasses.field(default_factory=list)
    least_random: list[Extreme] = dataclasses.field(default_factory=list)
    # For people only.
    streamed: int = dataclasses.field(default=0, metadata={"json": False})  #: bytes that went through the device
    mismatched: list[str] = dataclasses.field(default_factory=list, metadata={"json": False})
    overlapped_stage_seconds: dict[str, float] = dataclasses.field(default_factory=dict, metadata={"json": False})
    changed: int = dataclasses.field(default=0, metadata={"json": False})  #: files that a later run found different
    fallback_reason: str | None = dataclasses.field(default=None, metadata={"json": False})

    def as_json(self) -> str:
        """ASCII, one object. Paths are surrogate-escaped."""
        told = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.metadata.get("json", True)
        }
        return json.dumps(told, indent=2) + "\n"

    def rank(self, found: Sequence[Extreme]) -> None:
        """Keep the most and the least random of these, and of those before."""
        by_entropy = sorted({*self.most_random, *self.least_random, *found}, key=lambda one: (one.entropy, one.path))
        self.least_random = by_entropy[:EXTREMES]
        self.most_random = by_entropy[::-1][:EXTREMES]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [dataclasses.asdict(entry) for entry in value]
    return value


def result_line(path: str, size: int, entropy: float, histogram: Sequence[int]) -> str:
    """A file's line for ``--results``."""
    line = {"path": path, "bytes": size, "entropy": entropy, "histogram": histogram}
    return json.dumps(line) + "\n"


def printable(path: str) -> str:
    """A file's name as a terminal may have it: nothing in it that is no text, or that a terminal would obey."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
