"""The host driver: streams, copies and kernels without a GPU.

Files
    `driver`   `HostDriver`, put together from `aiocuda.driver.software` and what follows
    `core`     threads as engines: who moves the machine, and who waits for it
    `notify`   the verbs about clocks, threads and descriptors
    `runner`   a thread that does what engines do
"""

from __future__ import annotations

from ._driver import HostDriver

__all__ = ["HostDriver"]
