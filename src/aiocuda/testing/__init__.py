"""Tools for tests of code that uses aiocuda, and for tests of drivers.

`Latch`
    Holds a stream until the test releases it.
`SimulatedLoop`, `SimulatedDriver`, `Upset`
    An event loop and a device in virtual time, and the faults to inject.
`LostWakeupError`
    Raised by a `SimulatedLoop` when all tasks wait and nothing will wake any of them.
`DriverConformance`, `FaultConformance`, `PeerConformance`
    Test classes with the rules that every driver keeps; see `aiocuda.testing.conformance`.
`aiocuda.testing.plugin`
    The pytest plugin: a mark, options and fixtures.

Importing this package imports nothing else: pytest loads the plugin, and so this package, in every run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "DriverConformance",
    "FaultConformance",
    "Latch",
    "LostWakeupError",
    "PeerConformance",
    "SimulatedDriver",
    "SimulatedLoop",
    "Upset",
]

if TYPE_CHECKING:
    from ..driver.simulated import SimulatedDriver, Upset
    from ._latch import Latch
    from ._loop import LostWakeupError, SimulatedLoop
    from .conformance import DriverConformance, FaultConformance, PeerConformance
else:  # hidden from type checkers: with a module `__getattr__` they would accept every name
    _MODULES = {
        "Latch": "aiocuda.testing._latch",
        "LostWakeupError": "aiocuda.testing._loop",
        "SimulatedDriver": "aiocuda.driver.simulated",
        "SimulatedLoop": "aiocuda.testing._loop",
        "Upset": "aiocuda.driver.simulated",
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        module = importlib.import_module(_MODULES.get(name, "aiocuda.testing.conformance"))
        value = globals()[name] = getattr(module, name)
        return value
