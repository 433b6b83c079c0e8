"""A conformance suite for drivers, at the level of the narrow waist.

Whoever writes a driver subclasses it and says how to get one::

    from aiocuda.testing.conformance import DriverConformance

    class TestMyDriver(DriverConformance):
        @pytest.fixture
        def driver(self):
            driver = MyDriver()
            yield driver
            driver.close()

A driver is asked for what it must *not* do as much as for what it must: while a kernel holds its stream, nothing behind
it may be visible, done or notified, and nothing beside it may wait. Kernels are held and released, never timed;
the few times that are compared come from one run, and no bound is below 250 ms.
"""

from __future__ import annotations

from .base import Conformance
from .code import CodeConformance
from .devices import DeviceConformance
from .events import EventConformance
from .faults import FaultConformance
from .graphs import GraphConformance
from .memory import MemoryConformance
from .notify import NotifyConformance
from .overlap import OverlapConformance
from .peers import PeerConformance
from .rig import Rig
from .streams import StreamConformance

__all__ = [
    "CodeConformance",
    "Conformance",
    "DeviceConformance",
    "DriverConformance",
    "EventConformance",
    "FaultConformance",
    "GraphConformance",
    "MemoryConformance",
    "NotifyConformance",
    "OverlapConformance",
    "PeerConformance",
    "Rig",
    "StreamConformance",
]


class DriverConformance(
    StreamConformance,
    EventConformance,
    MemoryConformance,
    CodeConformance,
    GraphConformance,
    NotifyConformance,
    OverlapConformance,
    DeviceConformance,
):
    """Everything that can be asked of one device of a driver that lives on.

    `FaultConformance` ruins drivers, and `PeerConformance` needs two devices: both stand apart.
    """
