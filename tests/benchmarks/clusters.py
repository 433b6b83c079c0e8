"""Rows about calls to the replicas of a cluster.

Each row alternates our calls with a bound: a request and its reply over a socket pair to a process by hand, or the call
of a plain actor of `distributed`. The process has one replica, so that both ways use the same two processors.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import pickle
import socket
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from aiocuda.cluster import open_cluster

from .figures import Measured, percentile
from .setting import Setting

ARGUMENT = bytes(1024)


class Echo:
    """The class of the replicas."""

    async def echo(self, value: Any) -> Any:
        return value

    async def nbytes(self, array: npt.NDArray[np.uint8]) -> int:
        return array.nbytes


async def cluster_local(setting: Setting) -> Measured:
    """Calls with 1 KB to a process of this machine."""
    result = Measured([])
    async with open_cluster("local", replicas=1) as cluster, by_hand() as hand:
        echo = await cluster.spawn(Echo)
        await _alternate(setting, result, lambda: echo.call("echo", ARGUMENT), lambda: hand(ARGUMENT))
        array = np.ones(setting.count("nbytes"), np.uint8)
        there, back = await _rates(setting, lambda: echo.call("nbytes", array), lambda: echo.call("echo", array))
        result.figures |= {
            "array_gb_s": array.nbytes / there / 1e9,
            "array_both_ways_gb_s": 2 * array.nbytes / back / 1e9,
        }
    return result


async def cluster_dask(setting: Setting) -> Measured:
    """Calls with 1 KB through Dask's scheduler, and without it."""
    distributed: Any = importlib.import_module("distributed")  # has no types
    result = Measured([])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Dask's own modules
        async with (
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, asynchronous=True, dashboard_address="127.0.0.1:0", host="127.0.0.1"
            ) as workers,
            distributed.Client(workers, asynchronous=True) as client,
            open_cluster("dask", replicas=1, client=client) as cluster,
        ):
            echo = await cluster.spawn(Echo)
            actor = await client.submit(Echo, actor=True)
            await _alternate(setting, result, lambda: echo.call("echo", ARGUMENT), lambda: actor.echo(ARGUMENT))
        async with (
            distributed.LocalCluster(
                n_workers=1, threads_per_worker=1, asynchronous=True, dashboard_address="127.0.0.1:0", host="127.0.0.1"
            ) as workers,
            distributed.Client(workers, asynchronous=True, direct_to_workers=True) as client,
            open_cluster("dask", replicas=1, client=client) as cluster,
        ):
            echo = await cluster.spawn(Echo)
            direct = Measured([])
            await _alternate(setting, direct, lambda: echo.call("echo", ARGUMENT), lambda: asyncio.sleep(0))
            result.figures["direct_ms"] = percentile(direct.samples, 50)
    return result


async def _alternate(
    setting: Setting, result: Measured, ours: Callable[[], Awaitable[Any]], bound: Callable[[], Awaitable[Any]]
) -> None:
    """Measure milliseconds of both, one after the other."""
    for number in range(setting.count("warmup") + setting.count("repeats")):
        for way, samples in ((ours, result.samples), (bound, result.baseline)):
            began = perf_counter()
            await way()
            if number >= setting.count("warmup"):
                samples.append(1e3 * (perf_counter() - began))


async def _rates(setting: Setting, *ways: Callable[[], Awaitable[Any]]) -> list[float]:
    """Return the median seconds of each way."""
    medians = []
    for way in ways:
        seconds = []
        for _ in range(setting.count("copies")):
            began = perf_counter()
            await way()
            seconds.append(perf_counter() - began)
        medians.append(percentile(seconds, 50))
    return medians


@contextlib.asynccontextmanager
async def by_hand() -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
    """A process that echoes pickles over a socket pair, and a function that sends one and waits for its reply."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=_echo, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    reader, writer = await asyncio.open_unix_connection(sock=ours)

    async def call(value: bytes) -> bytes:
        data = pickle.dumps(value)
        writer.write(len(data).to_bytes(8, "little") + data)
        size = int.from_bytes(await reader.readexactly(8), "little")
        answer: bytes = pickle.loads(await reader.readexactly(size))
        return answer

    try:
        yield call
    finally:
        writer.close()
        await writer.wait_closed()
        await asyncio.to_thread(process.join)


def _echo(pipe: socket.socket) -> None:
    asyncio.run(_serve(pipe))


async def _serve(pipe: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=pipe)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            size = int.from_bytes(await reader.readexactly(8), "little")
            value = pickle.loads(await reader.readexactly(size))
            data = pickle.dumps(value)
            writer.write(len(data).to_bytes(8, "little") + data)
    writer.close()
