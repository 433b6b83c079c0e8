"""Countdown: one waiter for many operations."""

from __future__ import annotations

import asyncio

__all__ = ["Countdown"]


class Countdown:
    """One waiter for many operations. It is woken when all are done, or when the first one fails."""

    __slots__ = ("fail_fast", "future", "left")

    def __init__(self, future: asyncio.Future[None], left: int, fail_fast: bool) -> None:
        self.future = future
        self.left = left
        self.fail_fast = fail_fast
