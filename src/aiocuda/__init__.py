"""Every CUDA stream operation is an awaitable.

Importing this package does nothing else: no CUDA, no probe, no thread, no change to the environment. What stands
behind a name is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
    UnsupportedError,
    WrongDeviceError,
    WrongLoopError,
)

__version__ = "0.1.0"

__all__ = [
    "AiocudaError",
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
    "HostDriverWarning",
    "InvalidArgumentError",
    "InvalidTypeError",
    "Kernel",
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
    "Stream",
    "TripleBuffer",
    "UnifiedBuffer",
    "UnsupportedError",
    "WrongDeviceError",
    "WrongLoopError",
    "__version__",
    "gather",
    "open_device",
]

# A public name stands in three places, and tests/project/test_names.py holds them together: `__all__`, the import
# that a type checker reads, and the module that it comes from when the program runs.
if TYPE_CHECKING:
    from .completion.gather import gather
    from .completion.operation import Operation
    from .completion.policy import CompletionPolicy
    from .device import Device
    from .event import Event
    from .kernel import Kernel
    from .memory.buffer import DeviceBuffer, UnifiedBuffer
    from .memory.pinned import PinnedBuffer
    from .opening import open_device
    from .pipeline import Pipeline, PipelineStats, Slot, Stage, TripleBuffer
    from .pool import EventPool
    from .stream import Stream
else:  # out of a type checker's sight: it would take every unknown name for one that exists
    _HOME = {
        "CompletionPolicy": "completion.policy",
        "Device": "device",
        "DeviceBuffer": "memory.buffer",
        "Event": "event",
        "EventPool": "pool",
        "Kernel": "kernel",
        "Operation": "completion.operation",
        "PinnedBuffer": "memory.pinned",
        "Pipeline": "pipeline",
        "PipelineStats": "pipeline",
        "Slot": "pipeline",
        "Stage": "pipeline",
        "Stream": "stream",
        "TripleBuffer": "pipeline",
        "UnifiedBuffer": "memory.buffer",
        "gather": "completion.gather",
        "open_device": "opening",
    }

    def __getattr__(name):
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=__import__(__name__))
        value = globals()[name] = getattr(importlib.import_module(f".{home}", __name__), name)
        return value

    def __dir__():
        return sorted({*globals(), *_HOME})
