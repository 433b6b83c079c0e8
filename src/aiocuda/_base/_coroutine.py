"""Coroutines of awaitables."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["coroutine_of"]

T = TypeVar("T")


async def coroutine_of(awaitable: Awaitable[T]) -> T:
    """Await it. For compiled classes: `inspect.iscoroutine` is False for the coroutines of their own methods."""
    return await awaitable
