"""The CUDA driver: all verbs together, one of them per process."""

from __future__ import annotations

from typing import ClassVar

from ._core import ANY_DEVICE
from ._devices import CudaDevices
from ._graphs import CudaGraphs
from ._memory import CudaMemory
from ._notify import CudaNotify

__all__ = ["CudaDriver"]


class CudaDriver(CudaDevices, CudaNotify, CudaGraphs, CudaMemory):
    """`aiocuda.driver.protocol.Driver` over libcuda.

    There is one per process, from `get`, because a CUDA fault is one per process. Making it is cheap: libcuda is
    loaded and initialised by the first `device_count` or `device_open`, which may block, and may be offloaded.

    Raises
    ------
    InvalidArgumentError
        ``AIOCUDA_GIL`` has a value that it cannot have.
    """

    _made: ClassVar[dict[str, CudaDriver]] = {}

    @classmethod
    def get(cls) -> CudaDriver:
        """The process's CUDA driver."""
        # No lock: a fork could leave it locked. `setdefault` is one step, and a driver that lost the race did nothing.
        return cls._made.get("cuda") or cls._made.setdefault("cuda", cls())

    def statistics(self) -> dict[str, int]:
        """What there is, and what was done.

        ``streams`` and ``streams_created`` are about `stream_create`; ``streams_kept`` have no owner, and are not
        destroyed because other libraries know them. A notifier's own stream counts under ``notifiers``. A stream that
        another library made, or a default stream, counts under ``imported``. Streams that are made and given back when
        a device is opened do not count.
        """
        infos = list(self.streams.values())
        ours = sum(info.owned for info in infos)
        return {
            "streams": ours,
            "imported": sum(not info.owned and info.device != ANY_DEVICE for info in infos),
            "streams_created": self._streams_created,
            "streams_kept": len(self._kept),
            "events": len(self.events),
            "graphs": len(self._graphs),
            "notifiers": self._notifiers,
            "threads": self._workers.alive,
            "calls": self.call_count,
        }

    def __repr__(self) -> str:
        state = "faulted" if self.fault else f"{len(self.open_devices)} devices open"
        return f"<CUDA driver, {state}>"
