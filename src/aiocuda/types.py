"""Words shared by every floor: priorities, extents, and what a device says of itself."""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["DeviceProperties", "Dim3", "Priority", "Span", "caller"]

Priority: TypeAlias = Literal["high", "normal", "low"]

Dim3: TypeAlias = tuple[int, int, int]


class Span(NamedTuple):
    """A range of device memory as an array: where it is, and how to read it."""

    address: int
    shape: tuple[int, ...]
    dtype: str  #: NumPy's type string, ``dtype.str``


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a driver says of one of its devices. Sizes are in bytes."""

    name: str
    compute_capability: tuple[int, int]
    total_memory: int
    multiprocessors: int
    max_grid: Dim3
    max_block: Dim3
    max_threads_per_block: int
    max_shared_bytes: int  #: per block, opted in (``CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN``)
    default_shared_bytes: int  #: per block, without opting in
    copy_engines: int
    hardware_queues: int  #: what ``CUDA_DEVICE_MAX_CONNECTIONS`` gave
    managed_memory: bool
    concurrent_managed_access: bool
    unified_addressing: bool


def caller(depth: int) -> str:
    """Where the user's code stands, as ``file:line``, for warnings about what was left open."""
    frame = sys._getframe(depth)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
