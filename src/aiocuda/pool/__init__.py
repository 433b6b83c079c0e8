"""Pools: what is lent out and comes back."""

from __future__ import annotations

from .events import EventPool, EventPoolStatistics

__all__ = ["EventPool", "EventPoolStatistics"]
