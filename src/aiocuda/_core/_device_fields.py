"""DeviceFields: the attributes of a `DeviceState` that the core reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..completion._listeners import Listeners
    from ..driver.protocol import Driver
    from ._lease import Lease

__all__ = ["DeviceFields"]


class DeviceFields:
    """The attributes of `aiocuda.completion._device_state.DeviceState` that the core reads for each operation.

    Attributes
    ----------
    driver : Driver
    listeners : Listeners or None
        Their hooks get the submission and the end of each operation; None without a listener.
    starts : dict of int to Lease
        The timing event before each operation, by its id, while a listener wants timing.
    limit : int
        The present limit for each stream, with regard to the hardware queues.
    guarded : bool
        True if another library may be capturing a stream. Queries then take 0.8 µs more per pass.
    linger : float
        `CompletionPolicy.linger`.
    """

    __slots__ = ("driver", "guarded", "limit", "linger", "listeners", "starts")

    def __init__(self, driver: Driver, limit: int, linger: float) -> None:
        self.driver = driver
        self.limit = limit
        self.linger = linger
        self.guarded = False
        self.listeners: Listeners | None = None
        self.starts: dict[int, Lease] = {}
