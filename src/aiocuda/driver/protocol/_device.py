"""Devices: what there is, what it can do, and whether it has faulted."""

from __future__ import annotations

from typing import Any, Protocol

from ..._types import DeviceProperties
from ...errors import DeviceFault


class Devices(Protocol):
    """Verbs about devices as a whole."""

    @property
    def name(self) -> str:
        """``"cuda"``, ``"host"`` or ``"simulated"``."""

    @property
    def fault(self) -> DeviceFault | None:
        """The latch: the first fault of any device of this driver, for good.

        A fault on one device is a fault of the process (measured on two H200s), so there is one latch.
        """

    @property
    def registry(self) -> dict[Any, Any]:
        """What those above keep for as long as the driver lives: one dictionary, empty at first.

        A table of their own would keep the driver alive, since what they keep holds it.
        """

    def blame(self, operation: str) -> None:
        """Name the operation that saw the fault first. Later names are ignored."""

    def device_count(self) -> int:
        """How many devices there are. ``cuDeviceGetCount``."""

    def device_open(self, device: int) -> DeviceProperties:
        """Make a device ready for use; idempotent. **May block.** ``cuDevicePrimaryCtxRetain``.

        A driver never releases the primary context of an open device: other libraries may know streams of it.
        """

    def versions(self) -> dict[str, str]:
        """Versions of the driver and of the packages that it rests on."""

    def statistics(self) -> dict[str, int]:
        """Counts, taken where things happen.

        ``streams``, ``events`` and ``graphs`` made and not destroyed, ``streams_created`` in all, ``streams_kept``
        without an owner because other libraries know them, ``threads`` of ours alive, and ``calls``: verbs that reached
        the device. A kept stream does not count under ``streams``; one that serves again does not count as created.
        """

    def close(self) -> None:
        """End the threads; every verb then raises `ClosedError`. Idempotent. Nothing to do for CUDA."""
