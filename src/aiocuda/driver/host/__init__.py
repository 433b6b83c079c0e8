"""The host driver: streams, copies and kernels without a GPU.

===========  =============================================================
``driver``   `HostDriver`: the methods of `aiocuda.driver.software`, executed by threads
``runner``   a thread that executes the commands of engines
===========  =============================================================
"""

from __future__ import annotations

from ._driver import HostDriver

__all__ = ["HostDriver"]
