"""Every CUDA stream operation is an awaitable.

``import aiocuda`` loads no CUDA library and none of the modules below: a name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._device import Device as Device
    from ._event import Event as Event
    from ._open import open_device as open_device
    from ._statistics import (
        DeviceStatistics as DeviceStatistics,
    )
    from ._statistics import (
        MemoryStatistics as MemoryStatistics,
    )
    from ._statistics import (
        StreamStatistics as StreamStatistics,
    )
    from ._types import DeviceProperties as DeviceProperties
    from .completion._gather import gather as gather
    from .completion._operation import Operation as Operation
    from .completion._policy import CompletionPolicy as CompletionPolicy
    from .context import (
        ManagedContext as ManagedContext,
    )
    from .context import (
        StepConfig as StepConfig,
    )
    from .coordination import (
        AsyncCoordinator as AsyncCoordinator,
    )
    from .coordination import (
        StreamBarrier as StreamBarrier,
    )
    from .coordination import (
        StreamGroup as StreamGroup,
    )
    from .errors import (
        AiocudaError as AiocudaError,
    )
    from .errors import (
        BrokenBarrierError as BrokenBarrierError,
    )
    from .errors import (
        BusyError as BusyError,
    )
    from .errors import (
        CleanupWarning as CleanupWarning,
    )
    from .errors import (
        ClosedError as ClosedError,
    )
    from .errors import (
        CompileError as CompileError,
    )
    from .errors import (
        CompilerNotFoundError as CompilerNotFoundError,
    )
    from .errors import (
        CycleError as CycleError,
    )
    from .errors import (
        DeadlockError as DeadlockError,
    )
    from .errors import (
        DeviceFault as DeviceFault,
    )
    from .errors import (
        DeviceOutOfMemory as DeviceOutOfMemory,
    )
    from .errors import (
        DrainTimeoutWarning as DrainTimeoutWarning,
    )
    from .errors import (
        DriverError as DriverError,
    )
    from .errors import (
        DriverNotAvailableError as DriverNotAvailableError,
    )
    from .errors import (
        ForkedProcessError as ForkedProcessError,
    )
    from .errors import (
        HostDriverWarning as HostDriverWarning,
    )
    from .errors import (
        InvalidArgumentError as InvalidArgumentError,
    )
    from .errors import (
        InvalidTypeError as InvalidTypeError,
    )
    from .errors import (
        NoEventLoopError as NoEventLoopError,
    )
    from .errors import (
        QueueFullError as QueueFullError,
    )
    from .errors import (
        SkippedError as SkippedError,
    )
    from .errors import (
        StaleHandleError as StaleHandleError,
    )
    from .errors import (
        UnorderedAccessWarning as UnorderedAccessWarning,
    )
    from .errors import (
        UnsupportedError as UnsupportedError,
    )
    from .errors import (
        WrongDeviceError as WrongDeviceError,
    )
    from .errors import (
        WrongLoopError as WrongLoopError,
    )
    from .graph import Graph as Graph
    from .kernels import Kernel as Kernel
    from .memory._buffer import DeviceBuffer as DeviceBuffer
    from .memory._pinned import PinnedBuffer as PinnedBuffer
    from .memory._unified import UnifiedBuffer as UnifiedBuffer
    from .pipeline import (
        Pipeline as Pipeline,
    )
    from .pipeline import (
        PipelineStats as PipelineStats,
    )
    from .pipeline import (
        Slot as Slot,
    )
    from .pipeline import (
        Stage as Stage,
    )
    from .pipeline import (
        TripleBuffer as TripleBuffer,
    )
    from .pool import (
        EventPool as EventPool,
    )
    from .pool import (
        StreamPool as StreamPool,
    )
    from .stream import Stream as Stream

__version__ = "0.1.0"

__all__ = [
    "AiocudaError",
    "AsyncCoordinator",
    "BrokenBarrierError",
    "BusyError",
    "CleanupWarning",
    "ClosedError",
    "CompileError",
    "CompilerNotFoundError",
    "CompletionPolicy",
    "CycleError",
    "DeadlockError",
    "Device",
    "DeviceBuffer",
    "DeviceFault",
    "DeviceOutOfMemory",
    "DeviceProperties",
    "DeviceStatistics",
    "DrainTimeoutWarning",
    "DriverError",
    "DriverNotAvailableError",
    "Event",
    "EventPool",
    "ForkedProcessError",
    "Graph",
    "HostDriverWarning",
    "InvalidArgumentError",
    "InvalidTypeError",
    "Kernel",
    "ManagedContext",
    "MemoryStatistics",
    "NoEventLoopError",
    "Operation",
    "PinnedBuffer",
    "Pipeline",
    "PipelineStats",
    "QueueFullError",
    "SkippedError",
    "Slot",
    "Stage",
    "StaleHandleError",
    "StepConfig",
    "Stream",
    "StreamBarrier",
    "StreamGroup",
    "StreamPool",
    "StreamStatistics",
    "TripleBuffer",
    "UnifiedBuffer",
    "UnorderedAccessWarning",
    "UnsupportedError",
    "WrongDeviceError",
    "WrongLoopError",
    "__version__",
    "gather",
    "open_device",
]

if not TYPE_CHECKING:  # a type checker would take `__getattr__` for any name, also for a misspelt one
    #: Name → the module that defines it.
    _HOMES = {
        "AiocudaError": ".errors",
        "AsyncCoordinator": ".coordination",
        "BrokenBarrierError": ".errors",
        "BusyError": ".errors",
        "CleanupWarning": ".errors",
        "ClosedError": ".errors",
        "CompileError": ".errors",
        "CompilerNotFoundError": ".errors",
        "CompletionPolicy": ".completion._policy",
        "CycleError": ".errors",
        "DeadlockError": ".errors",
        "Device": "._device",
        "DeviceBuffer": ".memory._buffer",
        "DeviceFault": ".errors",
        "DeviceOutOfMemory": ".errors",
        "DeviceProperties": "._types",
        "DeviceStatistics": "._statistics",
        "DrainTimeoutWarning": ".errors",
        "DriverError": ".errors",
        "DriverNotAvailableError": ".errors",
        "Event": "._event",
        "EventPool": ".pool",
        "ForkedProcessError": ".errors",
        "Graph": ".graph",
        "HostDriverWarning": ".errors",
        "InvalidArgumentError": ".errors",
        "InvalidTypeError": ".errors",
        "Kernel": ".kernels",
        "ManagedContext": ".context",
        "MemoryStatistics": "._statistics",
        "NoEventLoopError": ".errors",
        "Operation": ".completion._operation",
        "PinnedBuffer": ".memory._pinned",
        "Pipeline": ".pipeline",
        "PipelineStats": ".pipeline",
        "QueueFullError": ".errors",
        "SkippedError": ".errors",
        "Slot": ".pipeline",
        "Stage": ".pipeline",
        "StaleHandleError": ".errors",
        "StepConfig": ".context",
        "Stream": ".stream",
        "StreamBarrier": ".coordination",
        "StreamGroup": ".coordination",
        "StreamPool": ".pool",
        "StreamStatistics": "._statistics",
        "TripleBuffer": ".pipeline",
        "UnifiedBuffer": ".memory._unified",
        "UnorderedAccessWarning": ".errors",
        "UnsupportedError": ".errors",
        "WrongDeviceError": ".errors",
        "WrongLoopError": ".errors",
        "gather": ".completion._gather",
        "open_device": "._open",
    }

    #: Subpackages and modules that are attributes of `aiocuda` without an import of their own.
    _PACKAGES = frozenset((
        *("completion", "context", "coordination", "driver", "errors", "graph", "kernels", "memory", "observe"),
        *("pipeline", "pool", "stream"),
    ))  # fmt: skip

    def __getattr__(name: str) -> object:
        """Import a public name, or a subpackage, when it is first used."""
        if name in _PACKAGES:
            return importlib.import_module(f".{name}", __name__)
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home, __name__), name)
        if home != ".errors":
            value.__module__ = __name__  # its public place, in `repr`, in pickles and in the documentation
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, without modules."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
