"""A driver without a GPU, all but its engines: the verbs over the machine.

The host driver and the simulated one are made of this. They differ in what carries commands out, threads or a virtual
clock, and in what a clock, a notifier and a worker are.

Files
    `core`    what the verbs share: the machine, the memory, the latch, and why a verb is refused
    `devices`, `streams`, `memory`, `code`, `graphs`   the verbs, by noun, as in `aiocuda.driver.protocol`
    `work`    what an engine does for one command
    `replay`  a graph's nodes on the machine
    `model`   the figures: bandwidth, latency, memory
"""

from __future__ import annotations

from ._code import Code
from ._core import Core
from ._devices import Devices
from ._graphs import Graphs
from ._memory import Memory
from ._model import Model
from ._streams import Streams

__all__ = ["Code", "Core", "Devices", "Graphs", "Memory", "Model", "Streams"]
