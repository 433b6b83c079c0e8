"""The host driver."""

from __future__ import annotations

from ..software import Code, Devices, Graphs, Memory, Model, Streams
from ..software._model import BANDWIDTH, LATENCY, MEMORY
from ._notify import Notify

__all__ = ["HostDriver"]


class HostDriver(Notify, Devices, Streams, Graphs, Memory, Code):
    """A driver without a GPU: CUDA's rules of order, kept by a state machine, carried out by threads.

    Transfers take the time that ``latency`` and ``bandwidth`` give, spent asleep, so that copies and kernels overlap
    even on two cores. Kernels run as their NumPy twins. No verb waits for the device, except those that may block.
    Threads are started when there is work for them, and end with `close` or when the driver is collected.

    A command that touches memory which is not there, or a twin that raises, latches a `DeviceFault`, as on a GPU;
    unlike there, a new driver opens at once.

    Parameters
    ----------
    devices
        How many devices to have, 1 to 64.
    memory
        Bytes of each device. Default 4 GiB; pages are taken from the machine when they are touched.
    bandwidth
        Bytes per second of each copy engine; a device has one up and one down. Default 2 GB/s.
    latency
        Seconds that a transfer takes before its first byte. Default 10 µs.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        A figure is out of range, or no number.
    """

    def __init__(
        self, devices: int = 1, memory: int = MEMORY, bandwidth: float = BANDWIDTH, latency: float = LATENCY
    ) -> None:
        super().__init__(Model(devices, memory, bandwidth, latency))

    def __repr__(self) -> str:
        return f"HostDriver({', '.join(f'{name}={value:g}' for name, value in self.describe().items())})"
