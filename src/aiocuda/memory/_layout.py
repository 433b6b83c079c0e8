"""Layout: where the items of somebody else's array lie, before any of its bytes are believed to be there."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgumentError

__all__ = ["check_contiguous", "reach"]


def reach(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """(lowest, highest + 1) byte of an array, from its first item on. Strides are in bytes."""
    if 0 in shape:
        return 0, 0
    steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + itemsize


def check_contiguous(what: str, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Raise unless the items lie in C order without gaps. A dimension of one item may have any stride."""
    if 0 in shape:
        return
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            raise InvalidArgumentError(
                f"{what} of shape {tuple(shape)} is not C-contiguous, its strides are {tuple(strides)} bytes: pass "
                "x.contiguous() (PyTorch) or cupy.ascontiguousarray(x)",
                strides=tuple(strides),
            )
        expected *= extent
