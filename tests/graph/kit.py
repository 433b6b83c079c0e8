"""What the tests of graphs share."""

from __future__ import annotations

from typing import Any

from aiocuda import Stream
from tests.helpers import AFFINE, quickly

__all__ = ["N", "affine", "read"]

N = 64


def affine(stream: Stream, buffer: Any, factor: int, term: int) -> Any:
    """``buffer = buffer * factor + term``."""
    return stream.launch(AFFINE, 1, 32, buffer, N, factor, term)


async def read(stream: Stream, buffer: Any) -> int:
    """The one value that all items have."""
    result = await quickly(stream.download(buffer))
    assert (result == result[0]).all()
    return int(result[0])
