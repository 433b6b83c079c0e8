"""The engine ``"dask"``: an actor on one worker of a Dask cluster for each replica."""

from __future__ import annotations

try:
    from ._dask_engine import DaskEngine
except ModuleNotFoundError as error:
    if error.name != "distributed":
        raise
    from ..._base._extras import install

    text = f'the engine "dask" needs distributed, which is not installed: {install("cluster")}'
    raise ModuleNotFoundError(text, name=error.name) from error

__all__ = ["DaskEngine"]
