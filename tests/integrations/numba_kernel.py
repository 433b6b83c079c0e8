"""A kernel of Numba. Only imported where Numba is installed."""

from __future__ import annotations

from typing import Any

from numba import cuda


@cuda.jit  # type: ignore[untyped-decorator]
def add(x: Any, value: Any) -> None:
    """Add a value to each item of an array."""
    at = cuda.grid(1)
    if at < x.size:
        x[at] += value
