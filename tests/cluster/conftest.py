"""A fixture that opens clusters on each engine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import pytest

from aiocuda.cluster import Cluster, open_cluster

__all__ = ["Opener", "opened"]

Opener: TypeAlias = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]


@contextlib.asynccontextmanager
async def on_dask(replicas: int, **options: Any) -> AsyncIterator[Cluster]:
    """Open a Dask cluster on this machine with a worker for each replica, and a cluster on it."""
    distributed = pytest.importorskip("distributed")
    dask = pytest.importorskip("dask")
    # By default a LocalCluster closes a nanny if its worker is away 15 s after any loss, as when it is lost again then.
    with warnings.catch_warnings(), dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}):
        warnings.simplefilter("ignore")  # those of Dask's own modules
        async with distributed.LocalCluster(
            n_workers=replicas, threads_per_worker=2, processes=True, asynchronous=True,
            dashboard_address="127.0.0.1:0", host="127.0.0.1",
        ) as workers, distributed.Client(workers, asynchronous=True) as client:  # fmt: skip
            async with open_cluster("dask", replicas=replicas, client=client, **options) as cluster:
                yield cluster


@contextlib.asynccontextmanager
async def on_this_machine(replicas: int, **options: Any) -> AsyncIterator[Cluster]:
    async with open_cluster("local", replicas=replicas, **options) as cluster:
        yield cluster


@pytest.fixture(params=["local", pytest.param("dask", marks=pytest.mark.heavy)])
def opened(request: pytest.FixtureRequest) -> Opener:
    """A function that opens a cluster on each engine."""
    return on_dask if request.param == "dask" else on_this_machine
