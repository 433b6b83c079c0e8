"""The device that only keeps the time keeps it."""

from __future__ import annotations

import asyncio

from .clockwork import BLOCK, measure


def test_stages_take_their_stated_time_and_overlap() -> None:
    figures = asyncio.run(measure((0.4, 1.0, 0.2), BLOCK, 3))
    assert figures.whole >= 1e3  # µs: the slowest stage
    assert figures.processor > 0
