"""The simulated driver: virtual time, and a seed that decides what CUDA leaves open.

Files
    `driver`   `SimulatedDriver`, put together from `aiocuda.driver.software` and what follows
    `core`     the machine moved by a clock
    `notify`   the verbs about clocks, threads and descriptors
    `order`    what is ordered before what
    `chance`   what the seed decides
    `upset`    what is to go wrong, by plan or by seed
"""

from __future__ import annotations

from .._clock import Clock
from ._driver import SimulatedDriver
from ._upset import Upset

__all__ = ["Clock", "SimulatedDriver", "Upset"]
