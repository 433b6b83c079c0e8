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

from ._base import Conformance
from ._code import CodeConformance
from ._devices import DeviceConformance
from ._events import EventConformance
from ._faults import FaultConformance
from ._graphs import GraphConformance
from ._memory import MemoryConformance
from ._notify import NotifyConformance
from ._overlap import OverlapConformance
from ._peers import PeerConformance
from ._rig import Rig
from ._streams import StreamConformance

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
