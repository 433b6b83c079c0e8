"""Replicas with a GPU."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from aiocuda import DeviceFault, InvalidArgumentError
from aiocuda.cluster import Cluster, ReplicaLostError, open_cluster
from aiocuda.driver.cuda import CudaDriver
from tests.cluster.test_cluster import places
from tests.cluster.things import Model
from tests.helpers import PATIENCE

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.gpu]


async def epochs(cluster: Cluster, expected: dict[int, int]) -> None:
    """Wait until replicas run in these epochs. To open a GPU beside faults of other processes takes up to 10 s."""
    async with asyncio.timeout(PATIENCE):
        while any(
            (each.epoch, each.state) != (expected[each.index], "running")
            for each in cluster.statistics().replicas
            if each.index in expected
        ):
            await asyncio.sleep(0.01)


async def test_faults_and_kills_of_replicas_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the first GPU. A fault ends CUDA in the process of one of them only."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    async with open_cluster("local", replicas=2) as cluster:
        handle = await cluster.spawn(Model, "cuda")
        before = await places(handle, 2)
        rows = np.ones((64, 64), np.float32)
        answers = await asyncio.gather(*(handle.call("double", rows) for _ in range(20)))
        assert all((answer == 2).all() for answer in answers)
        with pytest.raises(ReplicaLostError, match="its device has faulted") as error:
            await handle.call("fault")
        assert isinstance(error.value.__cause__, DeviceFault)
        assert error.value.__cause__.code > 0
        index = error.value.replica
        assert index is not None
        assert (await handle.call("double", rows) == 2).all()
        await epochs(cluster, {index: 2})
        assert (await places(handle, 2))[1 - index] == before[1 - index]
        os.kill(before[1 - index][1], signal.SIGKILL)
        assert (await handle.call("double", rows, retry=True) == 2).all()
        await epochs(cluster, {0: 2, 1: 2})
        assert cluster.healthy


async def test_more_replicas_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them computes on the host by mistake."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("AIOCUDA_DRIVER", raising=False)
    count = CudaDriver.get().device_count()
    with pytest.raises(InvalidArgumentError, match="has no GPU, and others have one: use fewer replicas"):
        async with open_cluster("local", replicas=count + 1):
            pass


@pytest.mark.heavy
async def test_worker_of_dask_with_a_gpu() -> None:
    distributed = pytest.importorskip("distributed")
    async with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, asynchronous=True, dashboard_address="127.0.0.1:0", host="127.0.0.1"
        ) as workers,
        distributed.Client(workers, asynchronous=True) as client,
        open_cluster("dask", replicas=1, client=client) as cluster,
    ):
        handle = await cluster.spawn(Model, "cuda")
        rows = np.ones((64, 64), np.float32)
        assert (await handle.call("double", rows) == 2).all()
        with pytest.raises(ReplicaLostError, match="its device has faulted"):
            await handle.call("fault")
        assert (await handle.call("double", rows) == 2).all()
        assert cluster.statistics().replicas[0].epoch == 2
