"""Types that all layers share: priorities, extents, properties of a device, and lines of the user's program."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import warnings
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn, Self, TypeAlias

from ..errors import InvalidTypeError

__all__ = ["DeviceProperties", "Dim3", "Priority", "ProcessLocal", "SourceLine", "Span"]

Priority: TypeAlias = Literal["high", "normal", "low"]

Dim3: TypeAlias = tuple[int, int, int]


class ProcessLocal:
    """Mixin for objects that are bound to this process: they cannot be pickled or copied."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} belongs to this process: it cannot be pickled or copied")


class Span(NamedTuple):
    """A range of device memory, seen as an array."""

    address: int
    shape: tuple[int, ...]
    dtype: Any  #: a `numpy.dtype`, or a type string, which lacks the fields of structures and the name of bfloat16


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of a device, as its driver reports them. Sizes are in bytes."""

    name: str
    compute_capability: tuple[int, int]
    total_memory: int
    multiprocessors: int
    max_grid: Dim3
    max_block: Dim3
    max_threads_per_block: int
    max_shared_bytes: int  #: per block, with opt-in (``CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN``)
    default_shared_bytes: int  #: per block, without opt-in
    copy_engines: int
    hardware_queues: int  #: the value of ``CUDA_DEVICE_MAX_CONNECTIONS``
    managed_memory: bool  #: memory for `Device.unified`
    concurrent_managed_access: bool  #: host and device may use managed memory at once; for prefetch and advice
    unified_addressing: bool  #: the host and all devices share one address space
    memory_pools: bool = True  #: stream-ordered allocation; `open_device` refuses a GPU without it


@functools.cache
def _folders_of(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the beginnings of the paths of all files in these packages of aiocuda."""
    return tuple(os.path.join(_PACKAGE, *package.split("/")) + os.sep for package in packages)


class SourceLine(NamedTuple):
    """A line of the user's program that a warning is about."""

    file: str
    line: int
    module: str
    registry: dict[Any, Any]  #: the module's ``__warningregistry__``, which prevents repeated warnings

    @classmethod
    def of_caller(cls) -> Self:
        """Return the innermost line on the stack that is outside this package, asyncio and contextlib."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame = frame.f_back
        if frame is None:
            return cls("<sys>", 0, "sys", {})  # as in `warnings.warn`
        return cls.of_frame(frame)

    @classmethod
    def of_direct_caller(cls, *packages: str) -> Self | None:
        """Return the line of the program that has called these packages of aiocuda; None if another package has."""
        frame: FrameType | None = sys._getframe(1)
        ours = _folders_of(packages)
        while frame is not None and frame.f_code.co_filename.startswith(ours):
            frame = frame.f_back
        return None if frame is None or frame.f_code.co_filename.startswith(_NOT_THE_USERS) else cls.of_frame(frame)

    @classmethod
    def of_frame(cls, frame: FrameType) -> Self:
        """Return the line that a frame executes."""
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<string>"), registry)

    @classmethod
    def parse(cls, place: str) -> Self:
        """Return the line of a text that ``str(line)`` has returned."""
        file, _, line = place.rpartition(":")
        return cls(file, int(line), "<string>", {})

    def warn(self, message: str, category: type[Warning], source: object = None) -> None:
        """Issue a warning for this line."""
        warnings.warn_explicit(
            message, category, self.file, self.line, module=self.module, registry=self.registry, source=source
        )

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


#: The folder of aiocuda.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))

#: Files that are skipped. Python 3.12 has ``skip_file_prefixes`` for this; Python 3.11 does not.
_NOT_THE_USERS = (
    _PACKAGE + os.sep,
    os.path.join(os.path.dirname(os.__file__), "asyncio") + os.sep,
    os.path.join(os.path.dirname(os.__file__), "contextlib.py"),
)
