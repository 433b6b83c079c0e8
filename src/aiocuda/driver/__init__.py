"""The drivers: the only way from this library to a device. See README.md in this directory."""

from __future__ import annotations

from ._names import DriverName, driver_name

__all__ = ["DriverName", "driver_name"]
