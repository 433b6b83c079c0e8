"""Data loading: batches of samples on a device, read, decoded and uploaded ahead. See its README.md in the repository.

Each name is imported when it is first used: worker processes import modules of this package without the rest of the
library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..errors import WorkerLostError
    from ._advice import LoaderAdvice
    from ._batch import Batch
    from ._loader import DataLoader, EpochBatches
    from ._sharing import SharedMemoryError
    from ._sources import Shuffle
    from ._statistics import DeviceBatchesStats, LoaderStats
    from ._sync import SyncBatches, SyncDeviceBatches, SyncEpoch, sync_loader, sync_to_device
    from ._sync_batch import SyncArray, SyncBatch
    from ._tensor_batch import TensorBatch
    from ._to_device import DeviceBatches, to_device

__all__ = [
    "Batch",
    "DataLoader",
    "DeviceBatches",
    "DeviceBatchesStats",
    "EpochBatches",
    "LoaderAdvice",
    "LoaderStats",
    "SharedMemoryError",
    "Shuffle",
    "SyncArray",
    "SyncBatch",
    "SyncBatches",
    "SyncDeviceBatches",
    "SyncEpoch",
    "TensorBatch",
    "WorkerLostError",
    "sync_loader",
    "sync_to_device",
    "to_device",
]

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept misspelt names
    _MODULES = {
        "Batch": "._batch",
        "DataLoader": "._loader",
        "DeviceBatches": "._to_device",
        "DeviceBatchesStats": "._statistics",
        "EpochBatches": "._loader",
        "LoaderAdvice": "._advice",
        "LoaderStats": "._statistics",
        "SharedMemoryError": "._sharing",
        "Shuffle": "._sources",
        "SyncArray": "._sync_batch",
        "SyncBatch": "._sync_batch",
        "SyncBatches": "._sync",
        "SyncDeviceBatches": "._sync",
        "SyncEpoch": "._sync",
        "TensorBatch": "._tensor_batch",
        "WorkerLostError": "..errors",
        "sync_loader": "._sync",
        "sync_to_device": "._sync",
        "to_device": "._to_device",
    }

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(module, __name__), name)
        return value
