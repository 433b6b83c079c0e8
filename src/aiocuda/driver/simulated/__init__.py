"""The simulated driver: virtual time, and a seed that decides everything that CUDA leaves open.

===========  =====================================================================================
``driver``   `SimulatedDriver`: the methods of `aiocuda.driver.software`, executed by a virtual clock
``choices``  the decisions of the seed: durations, and the order of unordered commands
``order``    detection of missing waits between streams
``upset``    injected failures, by plan or by seed
===========  =====================================================================================
"""

from __future__ import annotations

from ..._base._clock import Clock
from ._driver import SimulatedDriver
from ._upset import Upset

__all__ = ["Clock", "SimulatedDriver", "Upset"]
