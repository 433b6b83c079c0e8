"""The drivers: the only way from this library to a device. See its README.md in the repository."""

from __future__ import annotations

from ._names import DriverName, driver_name

__all__ = ["DriverName", "driver_name"]
