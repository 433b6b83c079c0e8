"""Programs that misbehave, on the engine "local"."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import gc
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, NoReturn

import pytest

from aiocuda.cluster import Cluster, RemoteError, ReplicaInfo, ReplicaLostError, open_cluster
from aiocuda.cluster._local_engine import ReplicaProcess
from tests.cluster.processes import psutil
from tests.helpers import PATIENCE, quickly, turns, until


class RaisesWhenPickled(Exception):  # noqa: N818 - raised on purpose
    def __reduce__(self) -> Any:
        raise GeneratorExit


class CancelsWhenPickled(Exception):  # noqa: N818 - raised on purpose
    def __reduce__(self) -> Any:
        raise asyncio.CancelledError


class RaisesAsText(Exception):  # noqa: N818 - raised on purpose
    def __str__(self) -> str:
        raise GeneratorExit


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818 - raised on purpose
    """Refuses notes, as all other attributes."""


class WrongNotes(Exception):  # noqa: N818 - raised on purpose
    def __init__(self) -> None:
        super().__init__()
        self.__notes__ = "no list"  # type: ignore[assignment]


class Hostile:
    """Its methods do what a program should not do."""

    async def pid(self) -> int:
        return os.getpid()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until_exists(self, file: Path) -> None:
        while not file.exists():  # noqa: ASYNC240
            await asyncio.sleep(0.001)

    async def exit_in_task(self) -> None:
        """Let another task end the loop."""

        async def leave() -> NoReturn:
            sys.stderr = None
            raise SystemExit(4)

        self._task = asyncio.create_task(leave())
        await asyncio.Event().wait()

    async def cancel_all(self) -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.Event().wait()

    async def end_with_child(self, seconds: float) -> None:
        """Start a program that inherits all descriptors, and a fork; then end. They end after some seconds."""
        subprocess.Popen(["sleep", str(seconds)], close_fds=False)  # noqa: ASYNC220
        if not os.fork():
            time.sleep(seconds)  # noqa: TID251, ASYNC251
            os._exit(0)
        os._exit(7)

    async def fail(self, error: type[Exception]) -> NoReturn:
        raise error


@pytest.mark.asyncio
@pytest.mark.slow
async def test_exceptions_whose_own_methods_raise_reach_the_caller() -> None:
    async with open_cluster("local", replicas=1) as cluster:
        handle = await cluster.spawn(Hostile)
        for kind in (RaisesWhenPickled, CancelsWhenPickled):
            with pytest.raises(RemoteError, match=kind.__name__):
                await quickly(handle.call("fail", kind))
        for other in (RaisesAsText, Frozen, WrongNotes):
            with pytest.raises(other):
                await quickly(handle.call("fail", other))


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("method", ["exit_in_task", "cancel_all"])
async def test_calls_are_lost_when_the_program_ends_the_loop_of_its_replica(method: str, tmp_path: Path) -> None:
    async with open_cluster("local", replicas=1) as cluster:
        handle = await cluster.spawn(Hostile)
        pid = await handle.call("pid")
        other = asyncio.create_task(handle.call("until_exists", tmp_path / "file", retry=True))
        await until(lambda: cluster.statistics().replicas[0].in_flight == 1)
        with pytest.raises(ReplicaLostError, match="its process has ended"):
            await quickly(handle.call(method))
        (tmp_path / "file").touch()
        assert await quickly(other) is None
        assert cluster.statistics().retries == 1
        assert await handle.call("pid") != pid


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.heavy
async def test_processes_that_a_replica_has_started_do_not_hide_its_end() -> None:
    async with open_cluster("local", replicas=1) as cluster:
        handle = await cluster.spawn(Hostile)
        with pytest.raises(ReplicaLostError, match="ended with exit code 7"):
            await handle.call("end_with_child", 5.0)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.heavy
async def test_program_that_ignores_the_end_of_its_children() -> None:
    """The kernel reaps them, and their exit code is unknown."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        async with open_cluster("local", replicas=1) as cluster:
            handle = await cluster.spawn(Hostile)
            pid = await handle.call("pid")
            os.kill(pid, signal.SIGKILL)
            await until(lambda: cluster.statistics().replicas[0].state == "restarting")
            assert cluster.statistics().replicas[0].last_loss == "its process has ended"
            assert await quickly(handle.call("pid")) != pid
            await quickly(cluster.aclose())
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.heavy
async def test_fork_of_the_program_that_ends_kills_no_replica() -> None:
    async with open_cluster("local", replicas=1) as cluster:
        handle = await cluster.spawn(Hostile)
        pid = await handle.call("pid")
        fork = os.fork()
        if not fork:
            try:
                os.closerange(0, 3)
                atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.waitpid(fork, 0)  # noqa: ASYNC222
        assert await quickly(handle.call("pid")) == pid
        await turns()
        assert cluster.statistics().replicas[0].last_loss is None


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.heavy
async def test_thousands_of_cancelled_calls_lose_no_replica() -> None:
    """It answers probes meanwhile."""
    async with open_cluster("local", replicas=1) as cluster:
        handle = await cluster.spawn(Hostile)
        calls = [asyncio.create_task(handle.call("sleep", 300.0)) for _ in range(20_000)]
        await handle.call("pid")
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await handle.call("sleep", 2.5)
        assert cluster.statistics().replicas[0].last_loss is None


async def left_open() -> tuple[Cluster, int]:
    """Open a cluster that is never closed, and return it and the process of its replica."""
    cluster = await open_cluster("local", replicas=1).__aenter__()
    handle = await cluster.spawn(Hostile)
    return cluster, await handle.call("pid")


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_cluster_that_is_collected_leaves_no_process() -> None:
    cluster, pid = asyncio.run(left_open())
    replica = psutil.Process(pid)
    assert replica.is_running()
    collected = weakref.ref(cluster)
    with pytest.warns(ResourceWarning, match="unclosed cluster, opened at"):
        del cluster
        gc.collect()
    assert collected() is None
    replica.wait(PATIENCE)


@pytest.mark.asyncio
async def test_process_for_which_there_are_too_few_descriptors_leaves_none_open() -> None:
    files: list[int] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        last = max(int(name) for name in os.listdir("/dev/fd"))
        while not files or files[-1] < last:  # no gaps are left
            files.append(os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[-1] + 4, limits[1]))  # three more
        with pytest.raises(OSError, match="Too many open files"):
            ReplicaProcess(ReplicaInfo(0, 1, 1), "")
        files += [os.dup(0) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in files:
            os.close(file)
