"""Devices: opening one, its streams, events and graphs, and everything that they share.

README.md in this directory describes the modules.
"""

from __future__ import annotations

from ._device import Device
from ._event import Event
from ._open import DriverName, open_device

__all__ = ["Device", "DriverName", "Event", "open_device"]
