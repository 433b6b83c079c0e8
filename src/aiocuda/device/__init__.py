"""Devices: opening one, its streams, events and graphs, and everything that they share.

Its README.md in the repository describes the modules.
"""

from __future__ import annotations

from ._device import Device
from ._event import Event
from ._open import open_device

__all__ = ["Device", "Event", "open_device"]
