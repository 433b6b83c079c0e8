"""Words shared by every floor: priorities, extents, and what a device says of itself."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn, Self, TypeAlias

from .errors import InvalidTypeError

__all__ = ["DeviceProperties", "Dim3", "Place", "Priority", "ProcessLocal", "Span", "caller"]

Priority: TypeAlias = Literal["high", "normal", "low"]

Dim3: TypeAlias = tuple[int, int, int]


class ProcessLocal:
    """What belongs to this process: a copy of it, here or elsewhere, would mean nothing."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} belongs to this process: it cannot be pickled or copied")


class Span(NamedTuple):
    """A range of device memory as an array: where it is, and how to read it."""

    address: int
    shape: tuple[int, ...]
    dtype: Any  #: a `numpy.dtype`, or its type string; that alone would lose a structure's fields, and bfloat16's name


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
    managed_memory: bool  #: `Device.unified`
    concurrent_managed_access: bool  #: host and device may touch it at one time; prefetch, and advice for devices
    unified_addressing: bool  #: one address space for the host and all devices
    memory_pools: bool = True  #: stream-ordered allocation; a GPU without it is refused when it is opened


def caller(depth: int) -> str:
    """Where the user's code stands, as ``file:line``, for warnings about what was left open."""
    frame = sys._getframe(depth)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Place(NamedTuple):
    """A line of the user's program, for warnings about what was done there."""

    file: str
    line: int
    module: str
    registry: dict[Any, Any]  #: of what that module has been warned of already

    @classmethod
    def of_caller(cls) -> Self:
        """The innermost line on the stack that is neither ours nor asyncio's, however deep our own calls are."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame = frame.f_back
        if frame is None:
            return cls("<sys>", 0, "sys", {})  # as `warnings.warn` has it
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<string>"), registry)

    def warn(self, message: str, category: type[Warning], source: object = None) -> None:
        """Warn of this line."""
        warnings.warn_explicit(
            message, category, self.file, self.line, module=self.module, registry=self.registry, source=source
        )

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


#: Files between the user's line and a warning about it: Python 3.12's ``skip_file_prefixes``, and 3.11 has none.
_NOT_THE_USERS = (
    os.path.dirname(__file__) + os.sep,
    os.path.join(os.path.dirname(os.__file__), "asyncio") + os.sep,
    os.path.join(os.path.dirname(os.__file__), "contextlib.py"),
)
