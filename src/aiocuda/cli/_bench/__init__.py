"""``aiocuda bench``: measures this machine, beside the published figures.

Files
    `_rows`           the measurements, through the public methods of the library
    `_report`         runs them; the result, and its JSON
    `_checkout`       the commit of the measured code, if it is in a checkout
    `_screen`         the table in the terminal
    `published.json`  the published figures, from ``docs/benchmarks/h200.json`` by ``tests/benchmarks/readme.py``
"""

from __future__ import annotations

from ._report import BenchReport, BenchRow, bench
from ._screen import BenchTable

__all__ = ["BenchReport", "BenchRow", "BenchTable", "bench"]
