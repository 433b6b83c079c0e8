"""ProcessTracer: a timeline for every device that the process opens, for ``aiocuda trace``."""

from __future__ import annotations

import threading

from ..device import Device
from ..errors import AiocudaError
from ..lowlevel import OPEN_DEVICES
from ._recording import Recording
from ._timeline import Timeline

__all__ = ["ProcessTracer"]


class ProcessTracer:
    """Records the devices that are opened from `start` to `finish`, in all loops and threads, until they are closed."""

    def __init__(self) -> None:
        self.problems: list[str] = []  #: why devices are not recorded
        self._open: dict[Device, Timeline] = {}
        self._finished: list[Recording] = []
        self._changing = threading.Lock()

    def start(self) -> None:
        """Begin with the next device that is opened."""
        OPEN_DEVICES.add_observer(self)

    @property
    def is_recording(self) -> bool:
        """True if a device is open."""
        return bool(self._open)

    async def opened(self, device: Device) -> None:
        """Begin to record a device."""
        timeline = Timeline(device)
        try:
            await timeline.__aenter__()
        except AiocudaError as error:  # the program goes on without it
            self.problems.append(f"{device.name} is not recorded: {error}")
            return
        with self._changing:
            self._open[device] = timeline

    def closing(self, device: Device) -> None:
        """End the recording of a device."""
        with self._changing:
            timeline = self._open.pop(device, None)
        if timeline is not None:
            timeline.stop()
            self._finished.append(timeline.recording())

    def finish(self) -> list[Recording]:
        """End. Return all recordings, in the order in which they began. Those of open devices end now."""
        OPEN_DEVICES.remove_observer(self)
        for device in tuple(self._open):
            self.closing(device)
        return sorted(self._finished, key=lambda each: each.host_zero)
