"""The host driver: streams, copies and kernels without a GPU.

Files
    `driver`     `HostDriver`, put together from the verbs
    `devices`, `streams`, `memory`, `code`, `notify`   the verbs, by noun, as in `aiocuda.driver.protocol`
    `core`       what they share: the machine, its lock, and who moves it
    `runner`     a thread that does what engines do
    `work`       what an engine does for one command
    `model`      the figures: bandwidth, latency, memory
"""

from __future__ import annotations

from .driver import HostDriver
from .model import HostModel

__all__ = ["HostDriver", "HostModel"]
