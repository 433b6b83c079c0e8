"""The data of ``aiocuda info``: driver, devices and versions."""

from __future__ import annotations

import dataclasses
import platform
import warnings
from typing import Any

import numpy as np

from .. import __version__
from .._device import Device
from .._open import DriverName, open_device
from ..driver.cuda import _probe
from ..errors import HostDriverWarning

__all__ = ["collect", "opened"]


async def opened(driver: DriverName) -> tuple[Device, str | None]:
    """Open a device. Return it, and the reason if the host driver is used because no GPU was found."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HostDriverWarning)
        device = await open_device(driver=driver)
    fell_back = False
    for each in caught:
        if issubclass(each.category, HostDriverWarning):
            fell_back = True
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    reason = await device.offload(_probe.find) if fell_back else None
    return device, reason


async def collect(driver: DriverName = "auto") -> dict[str, Any]:
    """Return driver, devices, features and versions as a dict for JSON. Opens the first device."""
    device, reason = await opened(driver)
    try:
        chosen = device.driver
        count = chosen.device_count()
        devices = [dataclasses.asdict(device.properties) | {"index": device.index}]
        for index in range(1, count):
            properties = await device.offload(chosen.device_open, index)
            devices.append(dataclasses.asdict(properties) | {"index": index})
        properties = device.properties
        return {
            "driver": chosen.name,
            "devices": devices,
            "features": {
                "managed_memory": properties.managed_memory,
                "concurrent_managed_access": properties.concurrent_managed_access,
                "unified_addressing": properties.unified_addressing,
                "memory_pools": properties.memory_pools,
                "copy_engines": properties.copy_engines,
                "kernels": "CUDA C++" if chosen.wants_image else "NumPy twins",
                "bells": chosen.notifier_limit(device.index),
            },
            "versions": {
                "aiocuda": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                **chosen.versions(),
            },
            "hardware_queues": device.hardware_queues,
            "fallback_reason": reason,
        }
    finally:
        await device.aclose()
