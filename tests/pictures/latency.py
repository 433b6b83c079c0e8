"""Latency against load, from docs/benchmarks/host-serving.json; `tests.load.picture` draws it."""

from __future__ import annotations

import json

from tests.benchmarks.machine import ROOT
from tests.load import picture

__all__ = ["draw"]

REPORT = ROOT / "docs" / "benchmarks" / "host-serving.json"


def draw() -> str:
    """Return the picture."""
    return picture.draw(json.loads(REPORT.read_text("utf-8"))["curves"])
