"""Every CUDA stream operation is an awaitable.

Importing it loads NumPy, and does nothing else: no CUDA, no probe, no thread, no change to the environment.
"""

from __future__ import annotations

from .completion.gather import gather
from .completion.operation import Operation
from .completion.policy import CompletionPolicy
from .context import ManagedContext, StepConfig
from .coordination import AsyncCoordinator, StreamBarrier, StreamGroup
from .device import Device
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
    QueueFullError,
    SkippedError,
    StaleHandleError,
    UnorderedAccessWarning,
    UnsupportedError,
    WrongDeviceError,
    WrongLoopError,
)
from .event import Event
from .graph import Graph
from .kernel import Kernel
from .memory.buffer import DeviceBuffer
from .memory.pinned import PinnedBuffer
from .memory.unified import UnifiedBuffer
from .opening import open_device
from .pipeline import Pipeline, PipelineStats, Slot, Stage, TripleBuffer
from .pool import EventPool, StreamPool
from .stream import Stream

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


def __dir__() -> list[str]:
    """For completion: the public names, without the modules that they come from."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
