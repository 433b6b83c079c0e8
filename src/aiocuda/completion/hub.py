"""Hub: what the event loops of one device share."""

from __future__ import annotations

from ..driver.protocol import Driver
from ..instrument import Instrument
from ..types import DeviceProperties
from .bells import Rack
from .leases import EventLeases
from .policy import CompletionPolicy
from .predict import Predictor

__all__ = ["Hub"]

#: Entries of one hardware queue that we allow ourselves. The 1 021st blocks its caller (measured).
QUEUE_ENTRIES = 900


class Hub:
    """One device's event leases, predictions, bell tokens and submission limit.

    All that is shared between threads is changed by single list or integer operations.
    """

    __slots__ = (
        "device",
        "driver",
        "instrument",
        "leases",
        "limit",
        "max_in_flight",
        "policy",
        "predictor",
        "properties",
        "streams",
        "tokens",
    )

    def __init__(
        self,
        driver: Driver,
        device: int,
        properties: DeviceProperties,
        policy: CompletionPolicy,
        max_in_flight: int,
    ) -> None:
        self.driver = driver
        self.device = device
        self.properties = properties
        self.policy = policy
        self.max_in_flight = max_in_flight
        self.leases = EventLeases(driver, device)
        self.predictor = Predictor()
        self.instrument: Instrument | None = None
        #: One token per bell that may be armed. More would make streams alias on the hardware queues (measured:
        #: 24 armed of 32 queues keep 128 streams at 32 ms, 32 armed cost 41).
        self.tokens = list(range(driver.bell_limit(device)))
        self.streams = 0
        self.limit = max_in_flight

    def dismiss(self) -> None:
        """The driver is about to be closed: its ports serve others."""
        Rack.dismiss(self.driver)

    def stream_opened(self, count: int) -> None:
        """``count`` streams more, or fewer: they share the hardware queues, so the limit of each one changes."""
        self.streams += count
        room = QUEUE_ENTRIES * self.properties.hardware_queues // max(1, self.streams)
        self.limit = max(2, min(self.max_in_flight, room))
