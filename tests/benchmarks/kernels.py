"""The kernels of `sources`, as aiocuda's users make them."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np

import aiocuda

from .sources import EMPTY, READ, SPIN


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


@cache
def any_spin() -> aiocuda.Kernel:
    """A kernel to launch with `nanoseconds` of any time: one kernel for all durations."""
    return aiocuda.Kernel("spin", source=SPIN, host=_sleep)


def _sleep(nanoseconds: int) -> None:
    # The engine of the host driver computes nothing meanwhile, as a GPU.
    time.sleep(int(nanoseconds) / 1e9)  # noqa: TID251


@cache
def read() -> aiocuda.Kernel:
    """Adds up words, so that each of them has been read."""
    return aiocuda.Kernel("read", source=READ, host=_add_up)


def _add_up(words: Any, total: Any, count: int) -> None:
    total[0] += words[: int(count)].sum(dtype=np.uint32)
