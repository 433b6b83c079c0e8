"""The narrow waist: what CUDA offers and no more.

Everything above talks to a GPU, or to the host standing in for one, through `Driver`. Handles are plain
integers: a hot path costs one call and no object. Three seams keep clocks and threads out of what stands
above: `Driver.now`, `Driver.offload` and `Driver.open_port`.

Rules that every driver keeps
    * A verb marked **may block** waits for the device, a disk or a compiler, and is only ever called through
      `Driver.offload`. Every other verb returns at once.
    * Verbs are called from any thread. Afterwards the thread's current CUDA context is what it was.
    * What goes wrong is raised as an `aiocuda.errors.AiocudaError`, translated there and nowhere else. A
      fault sets `Driver.fault` before it is raised, and no verb touches the device from then on.
    * An unknown, destroyed or stale handle raises `StaleHandleError`. Handles are never 0, save for streams:
      0 is the default stream of the device whose context is current.
"""

from __future__ import annotations

from typing import Protocol

from ..._types import Span
from ._code import Code, CudaSource, Program
from ._device import Devices
from ._graphs import CopyNode, EmptyNode, FillNode, Graphs, KernelNode
from ._memory import Advice, Allocation, ManagedAttributes, Memory
from ._notify import Notifier, Notify, Port
from ._streams import Streams

__all__ = [
    "Advice",
    "Allocation",
    "Code",
    "CopyNode",
    "CudaSource",
    "Devices",
    "Driver",
    "EmptyNode",
    "FillNode",
    "Graphs",
    "KernelNode",
    "ManagedAttributes",
    "Memory",
    "Notifier",
    "Notify",
    "Port",
    "Program",
    "Span",
    "Streams",
]


class Driver(Devices, Streams, Memory, Code, Graphs, Notify, Protocol):
    """Everything that a driver must offer."""
