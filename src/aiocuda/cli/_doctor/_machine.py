"""`Machine`: what the driver and its device answer."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Final, Self, cast

import numpy as np

from ..._base._off_loop import off_loop
from ..._base._types import DeviceProperties
from ...device import Device, open_device
from ...driver import DriverName, driver_name
from ...driver.cuda import QUEUES, find

__all__ = ["PINNED_BYTES", "Machine"]

#: Seconds that the driver and its device may take to answer. ``cuInit`` takes several seconds with many GPUs.
DRIVER_SECONDS: Final = 30.0

#: Bytes of pinned memory that are allocated for the check.
PINNED_BYTES: Final = 64 << 20

#: Where the NVIDIA driver shows its GPUs, on Linux and in WSL.
_GPU_FILES: Final = (("/dev", "nvidia[0-9]*"), ("/dev", "dxg"), ("/proc/driver/nvidia/gpus", "*"))


@dataclasses.dataclass(slots=True)
class Machine:
    """What the driver and its device answered. An error of one is kept for the check of it."""

    asked: str  #: the driver that is asked for: the option, or else ``AIOCUDA_DRIVER``
    #: The value of ``CUDA_DEVICE_MAX_CONNECTIONS`` before the library sets it.
    queues_wanted: str | None
    gpu_files: tuple[str, ...] = ()  #: files that a GPU has in this system
    used: str = ""  #: the driver of the device that was opened; "" if none was
    reason: str | None = None  #: why CUDA cannot be used
    error: Exception | None = None  #: the error of the driver, or of its first device
    properties: DeviceProperties | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    ping_seconds: float = 0.0
    pinned_error: Exception | None = None

    @classmethod
    async def look(cls, driver: DriverName) -> Self:
        """Open a device of the driver, ask it, and close it."""
        machine = cls(driver, os.environ.get(QUEUES), _gpu_files())
        await machine._look(driver)
        return machine

    @property
    def needs_cuda(self) -> bool:
        """True if programs on this machine are expected to use CUDA."""
        return self.asked == "cuda" or self.used == "cuda" or (self.asked == "auto" and self.has_usable_gpu)

    @property
    def has_usable_gpu(self) -> bool:
        """True if the system has a GPU, and ``CUDA_VISIBLE_DEVICES`` does not hide it."""
        return bool(self.gpu_files) and not self.hides_gpus

    @property
    def hides_gpus(self) -> bool:
        """True if ``CUDA_VISIBLE_DEVICES`` names no GPU: it is empty, or begins with -1."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return visible is not None and visible.strip().partition(",")[0] in ("", "-1", "NoDevFiles")

    async def _look(self, driver: DriverName) -> None:
        try:
            self.asked = driver_name(driver)
            async with asyncio.timeout(DRIVER_SECONDS) as limit:
                await self._ask()
        except Exception as error:  # noqa: BLE001 - the finding `driver` shows it
            self.error = error
            if isinstance(error, TimeoutError) and limit.expired():
                self.error = TimeoutError(f"no answer within {DRIVER_SECONDS:g} s")

    async def _ask(self) -> None:
        chosen = self.asked
        if chosen in ("auto", "cuda"):
            self.reason = await off_loop(find)
            if self.reason is not None and chosen == "cuda":
                return
            chosen = "cuda" if self.reason is None else "host"
        async with open_device(driver=cast("DriverName", chosen), check=False) as device:
            self.used, self.properties = chosen, device.properties
            self.versions = await device.offload(device.driver.versions)
            self.ping_seconds = await device.ping(DRIVER_SECONDS)
            await self._pin(device)

    async def _pin(self, device: Device) -> None:
        try:
            buffer = device.pinned(PINNED_BYTES, np.uint8)
            await buffer
            buffer.free()
        except Exception as error:  # noqa: BLE001 - the finding `pinned_limit` shows it
            self.pinned_error = error


def _gpu_files() -> tuple[str, ...]:
    return tuple(str(path) for folder, names in _GPU_FILES for path in sorted(Path(folder).glob(names)))
