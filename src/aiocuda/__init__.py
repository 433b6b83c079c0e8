"""Every CUDA stream operation is an awaitable.

``import aiocuda`` loads neither a CUDA library nor the modules below: each public name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._base._label import label
    from ._base._statistics import DeviceStatistics as DeviceStatistics
    from ._base._statistics import MemoryStatistics as MemoryStatistics
    from ._base._statistics import StreamStatistics as StreamStatistics
    from ._base._types import DeviceProperties as DeviceProperties
    from ._core import Operation, gather
    from .completion._wait import wait
    from .completion._wait_rule import CompletionPolicy as CompletionPolicy
    from .context import ManagedContext, StepConfig
    from .coordination import AsyncCoordinator, StreamBarrier, StreamGroup
    from .device._as_completed import as_completed
    from .device._device import Device
    from .device._event import Event
    from .device._open import open_device
    from .errors import (
        AiocudaError,
        BusyError,
        ClosedError,
        CompileError,
        DeadlockError,
        DeviceFault,
        DeviceOutOfMemory,
        HostDriverWarning,
        InvalidArgumentError,
        InvalidTypeError,
        PerformanceWarning,
        QueueFullError,
        SkippedError,
        UnsupportedError,
    )
    from .errors import BrokenBarrierError as BrokenBarrierError
    from .errors import CleanupWarning as CleanupWarning
    from .errors import CompilerNotFoundError as CompilerNotFoundError
    from .errors import CycleError as CycleError
    from .errors import DrainTimeoutWarning as DrainTimeoutWarning
    from .errors import DriverError as DriverError
    from .errors import DriverNotAvailableError as DriverNotAvailableError
    from .errors import ForkedProcessError as ForkedProcessError
    from .errors import NoEventLoopError as NoEventLoopError
    from .errors import StaleHandleError as StaleHandleError
    from .errors import UnorderedAccessWarning as UnorderedAccessWarning
    from .errors import WrongDeviceError as WrongDeviceError
    from .errors import WrongLoopError as WrongLoopError
    from .graph import Graph
    from .kernels import Kernel
    from .memory._buffer import DeviceBuffer
    from .memory._pinned import PinnedBuffer
    from .memory._unified import UnifiedBuffer
    from .pipeline import Pipeline, Slot, Stage, TripleBuffer
    from .pipeline import PipelineStats as PipelineStats
    from .pool import EventPool, StreamPool
    from .stream import Stream

__version__ = "0.3.0.dev0"

#: `aiocuda.X` is there, too, for the other errors, `CompletionPolicy`, `DeviceProperties` and the statistics.
__all__ = [
    "AiocudaError", "AsyncCoordinator", "BusyError", "ClosedError", "CompileError", "DeadlockError", "Device",
    "DeviceBuffer", "DeviceFault", "DeviceOutOfMemory", "Event", "EventPool", "Graph", "HostDriverWarning",
    "InvalidArgumentError", "InvalidTypeError", "Kernel", "ManagedContext", "Operation", "PerformanceWarning",
    "PinnedBuffer", "Pipeline", "QueueFullError", "SkippedError", "Slot", "Stage", "StepConfig", "Stream",
    "StreamBarrier", "StreamGroup", "StreamPool", "TripleBuffer", "UnifiedBuffer", "UnsupportedError", "__version__",
    "as_completed", "gather", "label", "open_device", "wait",
]  # fmt: skip

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept misspelt names
    #: The module that defines each name. All other names are errors.
    _MODULES = {
        "AsyncCoordinator": ".coordination",
        "CompletionPolicy": ".completion._wait_rule",
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
        "wait": ".completion._wait",
    }

    #: Subpackages and modules that are imported when they are first used as attributes of `aiocuda`.
    _PACKAGES = frozenset((
        *("completion", "context", "coordination", "driver", "errors", "graph", "kernels", "memory", "observe"),
        *("pipeline", "pool", "stream"),
    ))  # fmt: skip

    #: Names that programs look for here: the modules that have them.
    _ELSEWHERE = {
        **dict.fromkeys(("cluster", "data", "integrations", "serving", "testing"), "aiocuda"),
        **dict.fromkeys(("DataLoader", "Shuffle", "SyncBatch", "SyncBatches", "TensorBatch"), "aiocuda.data"),
        **dict.fromkeys(("sync_loader", "sync_to_device", "to_device"), "aiocuda.data"),
        "HostDriver": "aiocuda.driver.host",
        "SimulatedDriver": "aiocuda.driver.simulated",
        **dict.fromkeys(("MicroBatcher", "OverloadedError", "DeadlineError"), "aiocuda.serving"),
        **dict.fromkeys(("error_responses", "health", "lifespan", "ready"), "aiocuda.serving.asgi"),
        **dict.fromkeys(("ReplicaLostError", "open_cluster"), "aiocuda.cluster"),
        **dict.fromkeys(("cuda_core", "cupy", "numba", "torch"), "aiocuda.integrations"),
        **dict.fromkeys(("StreamProfiler", "Timeline"), "aiocuda.observe"),
        "Latch": "aiocuda.testing",
    }

    def __getattr__(name: str) -> object:
        """Import a public name, or a subpackage, when it is first used."""
        if name in _PACKAGES:
            return importlib.import_module(f".{name}", __name__)
        module = importlib.import_module(_MODULES.get(name, ".errors"), __name__)
        if name not in _MODULES and name not in module.__all__:
            if name in _ELSEWHERE:
                cure = f"`from {_ELSEWHERE[name]} import {name}`"
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {cure}")
            importlib.import_module("._base._mistakes", __name__).lacking(__name__, name)
        value = getattr(module, name)
        if name in _MODULES:
            value.__module__ = __name__  # the public name, for `repr`, pickles and the documentation
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, without modules."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
