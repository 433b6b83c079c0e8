"""The kernels of `sources`, as aiocuda's users make them."""

from __future__ import annotations

from functools import cache

import aiocuda

from .sources import EMPTY, SPIN


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


@cache
def empty() -> aiocuda.Kernel:
    """Nothing at all."""
    return aiocuda.Kernel("empty", source=EMPTY, host=lambda: None)


@cache
def spin(seconds: float) -> aiocuda.Kernel:
    """A kernel to launch with `nanoseconds` of the same time. On the host driver the engine sleeps that long."""
    return aiocuda.Kernel("spin", source=SPIN, host=lambda nanoseconds: None, host_seconds=seconds)
