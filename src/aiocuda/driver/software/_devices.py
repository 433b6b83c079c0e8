"""Verbs about devices as a whole."""

from __future__ import annotations

import dataclasses
import platform

import numpy as np

from ..._types import DeviceProperties
from ._core import Core

__all__ = ["Devices"]


class Devices(Core):
    """`aiocuda.driver.protocol._device.Devices` without a GPU."""

    def describe(self) -> dict[str, float]:
        """The model's figures by name: bytes, seconds, bytes per second."""
        return dataclasses.asdict(self.model)

    def device_count(self) -> int:
        """How many devices this driver was made with."""
        self._enter()
        return self.model.devices

    def device_open(self, device: int) -> DeviceProperties:
        """What the device can do. Nothing has to be made ready."""
        self._enter()
        return self.model.properties(self.name, self._device(device))

    def versions(self) -> dict[str, str]:
        """NumPy's and Python's."""
        return {"numpy": np.__version__, "python": platform.python_version()}

    def statistics(self) -> dict[str, int]:
        """What there is, and what was done. Side streams of notifiers and graphs, and default streams, do not count."""
        return {
            "streams": sum(stream.name == name for name, stream in list(self._machine.streams.items())),
            "events": len(self._machine.events),
            "graphs": len(self._graphs),
            "streams_created": self._machine.streams_created,
            "streams_kept": len(self._machine.kept),
            "threads": self._threads(),
            "calls": self._calls,
        }
