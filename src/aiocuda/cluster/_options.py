"""Checks of the arguments of `open_cluster`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from .._base._checks import as_count
from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["EngineName", "checked"]

#: The most replicas of a cluster: each has a process and a task.
MOST_REPLICAS = 1024

EngineName: TypeAlias = Literal["local", "dask"]


def checked(engine: Any, replicas: Any, restarts: Any, client: Any) -> tuple[EngineName, int, int]:
    """Check the arguments of `open_cluster`, and return the first three."""
    if not isinstance(engine, str):
        raise InvalidTypeError(f"engine is 'local' or 'dask', not {engine!r}")
    if engine not in get_args(EngineName):
        raise InvalidArgumentError(f"no engine is called {engine!r}; there are 'local' and 'dask'", engine=engine)
    if engine == "local" and client is not None:
        raise InvalidArgumentError("client= is for the engine 'dask'; the engine 'local' starts processes by itself")
    if engine == "dask" and client is None:
        raise InvalidArgumentError(
            "the engine 'dask' needs client=: `async with distributed.Client(address, asynchronous=True) as client`"
        )
    count = as_count(replicas, "replicas")
    if count > MOST_REPLICAS:
        raise InvalidArgumentError(f"replicas is at most {MOST_REPLICAS}, not {count}", argument="replicas")
    return ("local" if engine == "local" else "dask"), count, as_count(restarts, "restarts", 0)
