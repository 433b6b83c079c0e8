"""For whoever tests with aiocuda, or tests a driver of his own.

`Latch`
    holds a stream until the test lets it go.
`SimulatedLoop`, `SimulatedDriver`, `Upset`
    an event loop and a device in virtual time, and what is to go wrong there.
`DriverConformance`, `FaultConformance`, `PeerConformance`
    what every driver must do, as test classes to subclass; see `aiocuda.testing.conformance`.
`aiocuda.testing.plugin`
    the pytest plugin: markers, options and fixtures.

Importing this package imports nothing else: pytest loads the plugin, and so this, in every run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "DriverConformance",
    "FaultConformance",
    "Latch",
    "PeerConformance",
    "SimulatedDriver",
    "SimulatedLoop",
    "Upset",
]

if TYPE_CHECKING:
    from ..driver.simulated import SimulatedDriver, Upset
    from ._latch import Latch
    from .conformance import DriverConformance, FaultConformance, PeerConformance
    from .simulation.loop import SimulatedLoop
else:  # out of a type checker's sight: it would take every unknown name for one that exists
    _HOMES = {
        "Latch": "aiocuda.testing._latch",
        "SimulatedDriver": "aiocuda.driver.simulated",
        "SimulatedLoop": "aiocuda.testing.simulation.loop",
        "Upset": "aiocuda.driver.simulated",
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        home = importlib.import_module(_HOMES.get(name, "aiocuda.testing.conformance"))
        value = globals()[name] = getattr(home, name)
        return value
