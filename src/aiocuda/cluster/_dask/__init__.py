"""The engine ``"dask"``: an actor on one worker of a Dask cluster for each replica."""

from __future__ import annotations

try:
    import distributed  # noqa: F401 - to name the cure before a module below fails
except ImportError as error:
    raise ImportError(
        'the engine "dask" needs distributed, which is not installed: pip install "aiocuda[cluster]"'
    ) from error

from ._dask_engine import DaskEngine

__all__ = ["DaskEngine"]
