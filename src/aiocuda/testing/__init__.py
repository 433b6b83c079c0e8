"""For whoever tests with aiocuda, or tests a driver of his own.

`Latch`
    holds a stream until the test lets it go.
`DriverConformance`, `FaultConformance`, `PeerConformance`
    what every driver must do, as test classes to subclass; see `aiocuda.testing.conformance`.
`aiocuda.testing.plugin`
    the pytest plugin: markers, ``--require-gpu`` and fixtures.

Importing this package imports nothing else: pytest loads the plugin, and so this, in every run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = ["DriverConformance", "FaultConformance", "Latch", "PeerConformance"]

if TYPE_CHECKING:
    from .conformance import DriverConformance, FaultConformance, PeerConformance
    from .latch import Latch
else:  # out of a type checker's sight: it would take every unknown name for one that exists

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        home = importlib.import_module(".latch" if name == "Latch" else ".conformance", __name__)
        value = globals()[name] = getattr(home, name)
        return value
