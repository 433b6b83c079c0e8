"""A conformance suite for drivers: test classes with the rules of `aiocuda.driver.protocol`.

The author of a driver subclasses them and defines a fixture that returns the driver::

    from aiocuda.testing.conformance import DriverConformance

    class TestMyDriver(DriverConformance):
        @pytest.fixture
        def driver(self):
            driver = MyDriver()
            yield driver
            driver.close()

The docstring of each test is the rule that it checks. The suite also checks what a driver must *not* do: while a kernel
holds a stream, later work of that stream must not be visible, done or notified, and other streams must not wait.
Kernels are held and released, and not timed. Only the overlap tests compare times, of one run, and no bound is below
250 ms.
"""

from __future__ import annotations

from ._base import Conformance
from ._code import CodeConformance
from ._devices import DeviceConformance, PeerConformance
from ._events import EventConformance
from ._faults import FaultConformance
from ._graphs import GraphConformance
from ._memory import MemoryConformance
from ._notify import NotifyConformance
from ._rig import Rig
from ._streams import OverlapConformance, StreamConformance

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
    """All rules for one device of a driver.

    `FaultConformance` is separate because its tests leave the driver unusable, and `PeerConformance` because it needs
    two devices.
    """
