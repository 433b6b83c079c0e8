"""Budget: the limits of a device that all its openings, and all waits without an opening, share."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

from ..driver.protocol import Driver

if TYPE_CHECKING:
    from ._device_state import DeviceState

__all__ = ["Budget"]


class Budget:
    """The limits of a device that all its openings share.

    Attributes
    ----------
    tokens : list of int
        One per notifier that may be armed. With more, streams would share hardware queues with notifiers (measured: 24
        armed of 32 queues keep 128 streams at 32 ms, 32 armed cost 41 ms).
    streams : int
        The streams of all openings.
    default_streams : int
        The `Stream` objects that represent the device's default stream, which is one.
    device_states : dict of weak references
        The openings. Each reference removes itself when its opening is collected.
    """

    __slots__ = ("default_streams", "device_states", "streams", "tokens")

    def __init__(self, notifiers: int) -> None:
        self.tokens = list(range(notifiers))
        self.streams = 0
        self.default_streams = 0
        self.device_states: dict[weakref.ref[DeviceState], None] = {}

    @classmethod
    def of(cls, driver: Driver, device: int) -> Budget:
        """Return the budget of a device."""
        key = ("budget", device)
        known = driver.registry.get(key)
        if known is None:
            known = driver.registry.setdefault(key, cls(driver.notifier_limit(device)))
        return cast("Budget", known)
