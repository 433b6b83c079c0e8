"""CUDA's ordering rules as a state machine, without clock, threads, input or output.

The machine handles the order of commands, and neither their data nor their duration. A driver passes the current time
to `Machine.step` and carries out the commands that it returns: the host driver with threads, the simulated driver with
a virtual clock and a seed. The package also has the memory of the devices that do not exist.

===========  =============================================================================================
``stream``   streams, their commands and states, events, engines
``machine``  the rules: ``step(now)`` returns the commands that start, those that end, and the next time
``memory``   device memory with addresses that are never used twice
``pages``    host memory that a device can access: pinned, registered, managed
===========  =============================================================================================
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
