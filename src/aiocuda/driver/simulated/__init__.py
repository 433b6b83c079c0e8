"""The simulated driver: virtual time, and a seed that decides everything that CUDA leaves open.

`README.md` of the folder above lists the files.
"""

from __future__ import annotations

from ..._base._clock import Clock
from ._driver import SimulatedDriver
from ._upset import Upset

__all__ = ["Clock", "SimulatedDriver", "Upset"]
