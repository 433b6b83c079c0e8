"""`CudaDriver`: all methods of the protocol. There is one driver per process."""

from __future__ import annotations

from typing import ClassVar

from ._core import ANY_DEVICE
from ._devices import CudaDevices
from ._notify import CudaNotify
from ._recorded import CudaRecorded

__all__ = ["CudaDriver"]


class CudaDriver(CudaDevices, CudaNotify, CudaRecorded):
    """`aiocuda.driver.protocol.Driver` over libcuda.

    `get` returns the one driver of the process: a CUDA fault affects the whole process, too. Creating it is cheap.
    The first `device_count` or `device_open` loads and initialises libcuda; it may block, and may be offloaded.

    The base classes implement one part of the protocol each, and share the state of `Core`::

        Core ─┬─ CudaDevices
              ├─ CudaMemory ─────────────────┐
              ├─ CudaCode ──────┐            │
              └─ CudaStreams ─┬─┴─ CudaGraphs┴─ CudaRecorded   (a launch or a copy, and an event after it)
                              └─── CudaNotify                  (a notifier has a side stream)

    A graph has kernels, and is launched on streams. `CudaStreams` has the base `CudaNative`, for functions in C.

    Raises
    ------
    InvalidArgumentError
        ``AIOCUDA_GIL`` has an unknown value.
    """

    _made: ClassVar[dict[str, CudaDriver]] = {}

    @classmethod
    def get(cls) -> CudaDriver:
        """Return the process's CUDA driver."""
        # No lock: a fork could leave it locked. `setdefault` is one step. A driver that another thread's driver has
        # forestalled is discarded; it has not called CUDA.
        return cls._made.get("cuda") or cls._made.setdefault("cuda", cls())

    def statistics(self) -> dict[str, int]:
        """Return counts by name, as in `aiocuda.driver.protocol.Devices.statistics`.

        In addition, ``imported`` counts streams that another library created, and default streams; ``notifiers``
        counts notifiers with their side streams. Streams that `stream_reserve` creates and destroys do not count.
        """
        infos = list(self.streams.values())
        ours = sum(info.owned for info in infos)
        return {
            "streams": ours,
            "imported": sum(not info.owned and info.device != ANY_DEVICE for info in infos),
            "streams_created": self._streams_created,
            "streams_kept": len(self._kept),
            "events": sum(info.owned for info in list(self.events.values())),
            "graphs": len(self._graphs),
            "notifiers": self._notifiers,
            "threads": self._workers.alive,
            "calls": self.call_count + self.native.calls.value,
        }

    def __repr__(self) -> str:
        state = "faulted" if self.fault else f"{len(self.open_devices)} devices open"
        return f"<CUDA driver, {state}>"
