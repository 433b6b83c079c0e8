"""Every CUDA stream operation is an awaitable.

``import aiocuda`` loads neither a CUDA library nor the modules below: each public name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._base._label import label
    from ._base._statistics import DeviceStatistics, MemoryStatistics, StreamStatistics
    from ._base._types import DeviceProperties
    from ._core import Operation, gather
    from .completion._policy import CompletionPolicy
    from .context import ManagedContext, StepConfig
    from .coordination import AsyncCoordinator, StreamBarrier, StreamGroup
    from .device._as_completed import as_completed
    from .device._device import Device
    from .device._event import Event
    from .device._open import open_device
    from .errors import (
        AiocudaError,
        BrokenBarrierError,
        BusyError,
        CleanupWarning,
        ClosedError,
        CompileError,
        CompilerNotFoundError,
        CycleError,
        DeadlockError,
        DeviceFault,
        DeviceOutOfMemory,
        DrainTimeoutWarning,
        DriverError,
        DriverNotAvailableError,
        ForkedProcessError,
        HostDriverWarning,
        InvalidArgumentError,
        InvalidTypeError,
        NoEventLoopError,
        PerformanceWarning,
        QueueFullError,
        SkippedError,
        StaleHandleError,
        UnorderedAccessWarning,
        UnsupportedError,
        WrongDeviceError,
        WrongLoopError,
    )
    from .graph import Graph
    from .kernels import Kernel
    from .memory._buffer import DeviceBuffer
    from .memory._pinned import PinnedBuffer
    from .memory._unified import UnifiedBuffer
    from .pipeline import Pipeline, PipelineStats, Slot, Stage, TripleBuffer
    from .pool import EventPool, StreamPool
    from .stream import Stream

__version__ = "0.3.0.dev0"

__all__ = [
    "AiocudaError", "AsyncCoordinator", "BrokenBarrierError", "BusyError", "CleanupWarning", "ClosedError",
    "CompileError", "CompilerNotFoundError", "CompletionPolicy", "CycleError", "DeadlockError", "Device",
    "DeviceBuffer", "DeviceFault", "DeviceOutOfMemory", "DeviceProperties", "DeviceStatistics", "DrainTimeoutWarning",
    "DriverError", "DriverNotAvailableError", "Event", "EventPool", "ForkedProcessError", "Graph", "HostDriverWarning",
    "InvalidArgumentError", "InvalidTypeError", "Kernel", "ManagedContext", "MemoryStatistics", "NoEventLoopError",
    "Operation", "PerformanceWarning", "PinnedBuffer", "Pipeline", "PipelineStats", "QueueFullError", "SkippedError",
    "Slot", "Stage", "StaleHandleError", "StepConfig", "Stream", "StreamBarrier", "StreamGroup", "StreamPool",
    "StreamStatistics", "TripleBuffer", "UnifiedBuffer", "UnorderedAccessWarning", "UnsupportedError",
    "WrongDeviceError", "WrongLoopError", "__version__", "as_completed", "gather", "label", "open_device",
]  # fmt: skip

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept misspelt names
    #: The module that defines each public name. All other public names are errors.
    _MODULES = {
        "AsyncCoordinator": ".coordination",
        "CompletionPolicy": ".completion._policy",
        "Device": ".device._device",
        "DeviceBuffer": ".memory._buffer",
        "DeviceProperties": "._base._types",
        "DeviceStatistics": "._base._statistics",
        "Event": ".device._event",
        "EventPool": ".pool",
        "Graph": ".graph",
        "Kernel": ".kernels",
        "ManagedContext": ".context",
        "MemoryStatistics": "._base._statistics",
        "Operation": "._core",
        "PinnedBuffer": ".memory._pinned",
        "Pipeline": ".pipeline",
        "PipelineStats": ".pipeline",
        "Slot": ".pipeline",
        "Stage": ".pipeline",
        "StepConfig": ".context",
        "Stream": ".stream",
        "StreamBarrier": ".coordination",
        "StreamGroup": ".coordination",
        "StreamPool": ".pool",
        "StreamStatistics": "._base._statistics",
        "TripleBuffer": ".pipeline",
        "UnifiedBuffer": ".memory._unified",
        "as_completed": ".device._as_completed",
        "gather": "._core",
        "label": "._base._label",
        "open_device": ".device._open",
    }

    #: Subpackages and modules that are imported when they are first used as attributes of `aiocuda`.
    _PACKAGES = frozenset((
        *("completion", "context", "coordination", "driver", "errors", "graph", "kernels", "memory", "observe"),
        *("pipeline", "pool", "stream"),
    ))  # fmt: skip

    #: Names that programs look for here: the modules that have them.
    _ELSEWHERE = {
        **dict.fromkeys(("cluster", "data", "integrations", "serving", "testing"), "aiocuda"),
        **dict.fromkeys(("DataLoader", "Shuffle", "sync_loader", "sync_to_device", "to_device"), "aiocuda.data"),
        **dict.fromkeys(("MicroBatcher", "OverloadedError", "DeadlineError"), "aiocuda.serving"),
        **dict.fromkeys(("ReplicaLostError", "open_cluster"), "aiocuda.cluster"),
        **dict.fromkeys(("cuda_core", "cupy", "numba", "torch"), "aiocuda.integrations"),
        **dict.fromkeys(("StreamProfiler", "Timeline"), "aiocuda.observe"),
    }

    def __getattr__(name: str) -> object:
        """Import a public name, or a subpackage, when it is first used."""
        if name in _PACKAGES:
            return importlib.import_module(f".{name}", __name__)
        if name not in __all__:
            cure = f": `from {_ELSEWHERE[name]} import {name}`" if name in _ELSEWHERE else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{cure}")
        module = _MODULES.get(name, ".errors")
        value = getattr(importlib.import_module(module, __name__), name)
        if module != ".errors":
            value.__module__ = __name__  # the public name, for `repr`, pickles and the documentation
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, without modules."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
