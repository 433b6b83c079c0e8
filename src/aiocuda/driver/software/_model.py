"""The figures of a driver without a GPU, and their defaults."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from ..._base._types import DeviceProperties
from ...errors import InvalidArgumentError, InvalidTypeError
from .rules._memory import MAX_DEVICES

__all__ = ["BANDWIDTH", "COMPUTE_SLOTS", "HARDWARE_QUEUES", "LATENCY", "MEMORY", "NOTIFIERS", "PRIORITIES", "Model"]

#: Bytes per second of each copy engine. A transfer sleeps and then moves its bytes, so this must be well below the
#: speed of one core: 7 to 20 GB/s on a machine with two (median 14). At 2 GB/s, moving the bytes takes at most a third
#: of the modelled time, also when both directions move simultaneously. For the rest of it the core is free for kernels.
BANDWIDTH: Final = 2e9

#: Seconds before the first byte of a transfer: the time of a small copy over PCIe. A thread sleeps at least 60–90 µs.
LATENCY: Final = 10e-6

#: Bytes of each device. This is a limit: the host allocates pages when they are first used.
MEMORY: Final = 4 << 30

#: Kernels, fills and copies within the device that run simultaneously on each device: one for each hardware queue. Each
#: needs a thread while it runs.
COMPUTE_SLOTS: Final = 32

#: The hardware queues of a GPU with ``CUDA_DEVICE_MAX_CONNECTIONS=32``.
HARDWARE_QUEUES: Final = 32

#: Notifiers that may be armed simultaneously, as on a GPU with 32 hardware queues.
NOTIFIERS: Final = 24

#: (least, greatest) stream priority; a smaller number has precedence.
PRIORITIES: Final = (0, -5)


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """The figures of one driver. Sizes in bytes, times in seconds."""

    devices: int = 1
    memory: int = MEMORY  #: of each device
    bandwidth: float = BANDWIDTH  #: of each copy engine, bytes per second; `math.inf` takes the latency only
    latency: float = LATENCY  #: of each transfer
    compute_slots: int = COMPUTE_SLOTS
    hardware_queues: int = HARDWARE_QUEUES

    def __post_init__(self) -> None:
        for name in ("devices", "memory"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidTypeError(f"{name}={value!r} must be an int", argument=name)
        for name in ("bandwidth", "latency"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise InvalidTypeError(f"{name}={value!r} must be a number", argument=name)
        if not 1 <= self.devices <= MAX_DEVICES:
            raise InvalidArgumentError(f"devices={self.devices} must be 1 to {MAX_DEVICES}", argument="devices")
        if self.memory < 1:
            raise InvalidArgumentError(f"memory={self.memory} must be at least 1 byte", argument="memory")
        if not self.bandwidth > 0:
            raise InvalidArgumentError(f"bandwidth={self.bandwidth} must be more than 0 bytes/s", argument="bandwidth")
        if not 0 <= self.latency < math.inf:
            raise InvalidArgumentError(f"latency={self.latency} must be 0 s or more, and finite", argument="latency")

    def transfer_seconds(self, nbytes: int) -> float:
        """Return the time that a copy engine needs for a number of bytes."""
        return self.latency + nbytes / self.bandwidth

    def properties(self, driver: str, device: int) -> DeviceProperties:
        """Return the properties that `device_open` returns for a device of this model.

        The limits are those of a current GPU, so a launch that the model accepts is valid on such a GPU.
        """
        return DeviceProperties(
            name=f"{driver} {device}",
            compute_capability=(0, 0),
            total_memory=self.memory,
            multiprocessors=self.compute_slots,
            max_grid=(2**31 - 1, 65_535, 65_535),
            max_block=(1024, 1024, 64),
            max_threads_per_block=1024,
            max_shared_bytes=232_448,
            default_shared_bytes=49_152,
            copy_engines=2,
            hardware_queues=self.hardware_queues,
            managed_memory=True,
            concurrent_managed_access=True,
            unified_addressing=True,
        )
