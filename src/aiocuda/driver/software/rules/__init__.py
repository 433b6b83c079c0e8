"""Streams, events and engines as a state machine without clock, thread or input and output.

The machine knows CUDA's rules of order and nothing of bytes or time: whoever drives it says what time it is and
carries out what it is told. The host driver does so with threads, the simulated one with a virtual clock and a seeded
chooser. Beside it stands what such drivers share: the memory of devices that are not there, and the latch.

Files
    `command`   one entry of a stream, and the states it goes through
    `stream`    a first-in-first-out queue of commands
    `event`     the last record, and whether it is done
    `engine`    what runs commands that take time: two copy engines and a compute engine per device
    `machine`   the rules: ``step(now)`` → what starts, what ends, when next
    `memory`    device memory with addresses that are never used twice
    `pages`     host memory that a device can reach: pinned, registered, managed
    `latch`     the first fault, for good
"""

from __future__ import annotations

from ._command import Command, Kind, State
from ._engine import Engine, EngineKind
from ._event import Event
from ._latch import Latch
from ._machine import Chooser, Machine, Step
from ._memory import Block, DeviceMemory, IllegalAddressError
from ._pages import HostPages, PageKind
from ._stream import Stream

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
    "Latch",
    "Machine",
    "PageKind",
    "State",
    "Step",
    "Stream",
]
