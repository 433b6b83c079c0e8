"""A row about lost replicas: how long callers wait, and how long a replica is away.

Two replicas, each with a GPU of its own; on a machine with one GPU they share it. In each round the cluster is opened,
32 callers call without a pause, and each replica is lost once: one by an illegal address, the other by SIGKILL. So each
loss is followed by the first restart, after 0.1 s. The free memory of all these GPUs is compared (``cuMemGetInfo``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Self

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda import Kernel
from aiocuda.cluster import Cluster, ReplicaHandle, ReplicaLostError, current_replica, open_cluster

from .figures import Measured
from .setting import Setting

REPLICAS, CALLERS = 2, 32


def _raise() -> None:
    raise ZeroDivisionError("the fault of this row")


POKE = Kernel(
    "poke", source='extern "C" __global__ void poke() { *(volatile int*)8 = 1; }', host=_raise
)  # an illegal address
TWICE = Kernel(
    "twice",
    source='extern "C" __global__ void twice(float* x, int n) '
    "{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= 2; }",
    host=lambda x, n: x.__imul__(2),
)


class Model:
    """The class of the replicas."""

    def __init__(self, driver: str) -> None:
        self._driver = driver

    async def __aenter__(self) -> Self:
        self._device = await aiocuda.open_device(driver=self._driver)  # type: ignore[arg-type]
        self._stream = self._device.stream()
        await self.twice(np.ones(8, np.float32))  # compiles the kernel
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._device.aclose()

    async def twice(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        x = await self._stream.upload(rows)
        self._stream.launch(TWICE, 64, 256, x, rows.size)
        return await self._stream.download(x)

    async def where(self) -> tuple[int, int]:
        replica = current_replica()
        assert replica is not None
        return replica.index, os.getpid()

    async def fault(self) -> None:
        self._stream.launch(POKE, 1, 1)
        await self._stream.synchronize()


class Callers:
    """Tasks that call without a pause."""

    def __init__(self, handle: ReplicaHandle) -> None:
        self._handle = handle
        self._rows = np.ones(16384, np.float32)
        self.calls: list[tuple[float, float]] = []  #: when each began, and when it had its outcome
        self.answered = self.lost = 0
        self.tasks = [asyncio.create_task(self._run(number % 2 == 0)) for number in range(CALLERS)]

    async def _run(self, retry: bool) -> None:
        while True:
            began = perf_counter()
            try:
                assert (await self._handle.call("twice", self._rows, retry=retry)).sum() == 2 * self._rows.size
                self.answered += 1
            except ReplicaLostError:
                self.lost += 1
            self.calls.append((began, perf_counter()))

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


async def cluster_losses(setting: Setting) -> Measured:
    """Seconds from a loss to the first state in which the replica serves again."""
    device = setting.device
    result = Measured([])
    longest, answered, lost = 0.0, 0, 0
    gpus = device.driver.device_count() if device.driver.name == "cuda" else 1
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_visible(gpus if device.driver.name == "cuda" else REPLICAS))
        others = [aiocuda.open_device(number, driver="cuda") for number in range(1, min(gpus, REPLICAS))]
        devices = [device, *[await stack.enter_async_context(other) for other in others]]
        free = None
        for _ in range(setting.count("rounds")):
            began = perf_counter()
            async with open_cluster("local", replicas=REPLICAS) as cluster:
                handle = await cluster.spawn(Model, device.driver.name)
                result.baseline.append(perf_counter() - began)
                processes = await _processes(handle)
                callers = Callers(handle)
                for index in range(REPLICAS):
                    began = perf_counter()
                    lost_one = await _lose(cluster, handle, index, processes)
                    result.samples.append(await _restarted(cluster, lost_one) - began)
                    await asyncio.sleep(0.2)  # calls after the restart count, too
                    longest = max(longest, *(end - max(start, began) for start, end in callers.calls if end > began))
                await callers.stop()
                answered, lost = answered + callers.answered, lost + callers.lost
            if free is None:  # not before the first round: it loads the code of the driver
                free = _free(devices)
        result.figures |= {
            "longest_call_s": longest,
            "memory_lost_mib": max(0.0, (free or 0) - _free(devices)) / (1 << 20),
            "gpus": float(len(devices)),
            "calls_answered": float(answered),
            "calls_lost": float(lost),
        }
    return result


def _free(devices: list[aiocuda.Device]) -> int:
    """Bytes of free memory on all devices."""
    return sum(device.driver.memory_info(device.index)[0] for device in devices)


@contextlib.contextmanager
def _visible(gpus: int) -> Iterator[None]:
    """Give each replica a GPU of its own, or all the first one."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus < REPLICAS and before is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(["0"] * REPLICAS)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)


async def _processes(handle: ReplicaHandle) -> dict[int, int]:
    found: dict[int, int] = {}
    while len(found) < REPLICAS:
        index, pid = await handle.call("where")
        found[index] = pid
    return found


async def _lose(cluster: Cluster, handle: ReplicaHandle, index: int, processes: dict[int, int]) -> int:
    """End a replica: the first time by a fault, then by SIGKILL. Return which one was lost."""
    if index == 0:
        try:
            await handle.call("fault")
        except ReplicaLostError as error:
            lost = error.replica
        assert lost is not None
        processes.pop(lost)
        return lost
    (left,) = processes
    os.kill(processes[left], signal.SIGKILL)
    return left


async def _restarted(cluster: Cluster, index: int) -> float:
    """Wait until a replica runs in its second epoch. Return the time."""

    def figures() -> Any:
        return cluster.statistics().replicas[index]

    while figures().epoch < 2 or figures().state != "running":
        await asyncio.sleep(0.002)
    return perf_counter()
