"""``aiocuda bench``: measures this machine, beside the published figures."""

from __future__ import annotations

from ._report import BenchReport, BenchRow, bench

__all__ = ["BenchReport", "BenchRow", "bench"]
