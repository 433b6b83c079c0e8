"""CUDA's ordering rules as a state machine, without clock, threads, input or output.

The machine handles the order of commands, and neither their data nor their duration. A driver passes the current time
to `Machine.step` and carries out the commands that it returns: the host driver with threads, the simulated driver with
a virtual clock and a seed. The package also has the memory of the devices that do not exist.

`README.md` of the drivers lists the files.
"""

from __future__ import annotations

from ._machine import Chooser, Machine, Step
from ._memory import Block, DeviceMemory, IllegalAddressError
from ._pages import HostPages, PageKind
from ._stream import Command, Engine, EngineKind, Event, Kind, State, Stream

__all__ = [
    "Block",
    "Chooser",
    "Command",
    "DeviceMemory",
    "Engine",
    "EngineKind",
    "Event",
    "HostPages",
    "IllegalAddressError",
    "Kind",
    "Machine",
    "PageKind",
    "State",
    "Step",
    "Stream",
]
