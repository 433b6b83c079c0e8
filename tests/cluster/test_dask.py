"""The engine "dask": actors on the workers of a Dask cluster, lost workers, and the clusters that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocuda import CleanupWarning, ClosedError, DeviceFault, InvalidArgumentError, InvalidTypeError
from aiocuda._base._extras import install
from aiocuda.cluster import RemoteError, ReplicaHandle, ReplicaLostError, open_cluster
from aiocuda.cluster._messages import Create, Packet, Request, Run, pack
from tests.cluster.dask_things import Service
from tests.helpers import quickly, until
from tests.project.tree import ROOT

distributed = pytest.importorskip("distributed", reason="the engine 'dask' needs distributed")

from aiocuda.cluster._dask import DaskEngine  # noqa: E402 - after the check
from aiocuda.cluster._dask._dask_engine import check_address, workers_of  # noqa: E402

CLIENT = """
import asyncio, sys
import distributed
from aiocuda.cluster import open_cluster
from tests.cluster.dask_things import Service

class OfMain:
    async def number(self):
        return 7

async def main():
    async with distributed.Client(sys.argv[1], asynchronous=True) as client:
        async with open_cluster("dask", replicas=1, client=client) as cluster:
            assert await (await cluster.spawn(OfMain)).call("number") == 7
            handle = await cluster.spawn(Service, sys.argv[2])
            await handle.call("wait", "client")

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def dask(workers: int = 2, **options: Any) -> AsyncIterator[Any]:
    """A client of a Dask cluster with worker processes on this machine."""
    async with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=2, processes=True, asynchronous=True, dashboard_address="127.0.0.1:0",
            host="127.0.0.1", silence_logs=logging.CRITICAL,
        ) as cluster,
        distributed.Client(cluster, asynchronous=True, **options) as client,
    ):  # fmt: skip
        yield client


@contextlib.asynccontextmanager
async def scheduler(**options: Any) -> AsyncIterator[Any]:
    """A scheduler in this process."""
    async with distributed.Scheduler(dashboard=False, port=0, **options) as opened:
        yield opened


async def processes_of(handle: ReplicaHandle, replicas: int = 2) -> list[int]:
    """The process of each replica."""
    found: set[int] = set()

    async def ask() -> bool:
        found.update(await asyncio.gather(*(handle.call("process", retry=True) for _ in range(replicas))))
        return len(found) >= replicas

    async def ask_all() -> None:
        while not await ask():
            pass

    await quickly(ask_all())
    return sorted(found)


def files(folder: Path, start: str) -> list[int]:
    """The processes that have written a file."""
    return sorted(int(each.name.rpartition("-")[2]) for each in folder.glob(f"{start}-*"))


async def until_released(client: Any) -> None:
    """Ask the workers until none has an actor."""

    async def ask() -> None:
        while any((await client.run(lambda dask_worker: list(dask_worker.state.actors))).values()):
            pass

    await quickly(ask())


# -- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["tls://10.0.0.1:8786", "tcp://127.0.0.1:8786", "tcp://127.8.0.1:80", "tcp://[::1]:8786"]
)
def test_addresses_of_tls_and_of_this_machine_are_trusted(address: str) -> None:
    check_address(address, "the scheduler")


@pytest.mark.parametrize(
    "address",
    ["tcp://10.0.0.1:8786", "tcp://0.0.0.0:8786", "tcp://localhost:1", "ws://127.0.0.1:1", "tcp://[fe80::1]:1", ""],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"distributed\.security\.Security") as caught:
        check_address(address, "the scheduler")
    assert address in str(caught.value)


def test_a_scheduler_in_this_process_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="processes=True"):
        check_address("inproc://10.0.0.1/123/1", "the scheduler")


# -- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_client_that_is_none_is_refused() -> None:
    opening: Any = open_cluster("dask", replicas=1, client="tcp://127.0.0.1:1")  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"distributed\.Client"):
        async with opening:
            pass


@pytest.mark.asyncio
@pytest.mark.slow
async def test_the_client_is_asynchronous_and_open() -> None:
    async with scheduler(host="127.0.0.1") as opened:
        sync = await asyncio.to_thread(distributed.Client, opened.address, set_as_default=False)
        try:
            with pytest.raises(InvalidArgumentError, match="asynchronous=True"):
                DaskEngine(sync)
        finally:
            await asyncio.to_thread(sync.close)
        async with distributed.Client(opened.address, asynchronous=True) as client:
            DaskEngine(client)
        with pytest.raises(ClosedError, match="closed"):
            DaskEngine(client)


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_scheduler_that_others_can_reach_is_refused_before_it_gets_anything() -> None:
    address = distributed.utils.get_ip()
    if address.startswith("127."):
        pytest.skip("this machine has only loopback addresses")
    async with (
        scheduler(host=address) as opened,
        distributed.Client(opened.address, asynchronous=True) as client,
    ):
        with pytest.raises(InvalidArgumentError, match="Security"):
            async with open_cluster("dask", replicas=1, client=client):
                pass
        assert not opened.tasks


@pytest.mark.asyncio
@pytest.mark.slow
async def test_workers_need_a_nanny_and_there_are_enough() -> None:
    async with (
        scheduler(host="127.0.0.1") as opened,
        distributed.Client(opened.address, asynchronous=True) as client,
    ):
        with pytest.raises(InvalidArgumentError, match="replicas=2, but the Dask cluster has 0"):
            async with open_cluster("dask", replicas=2, client=client):
                pass
        async with distributed.Worker(opened.address, host="127.0.0.1", dashboard=False):
            with pytest.raises(InvalidArgumentError, match="nanny"):
                async with open_cluster("dask", replicas=1, client=client):
                    pass
        assert not opened.tasks


@pytest.mark.slow
def test_without_distributed_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['distributed'] = None; import aiocuda.cluster; import aiocuda.cluster._dask"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.stderr.rstrip().endswith(install("cluster"))


# -- calls -------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.heavy
@pytest.mark.parametrize("direct", [False, True])
async def test_calls_of_replicas(tmp_path: Path, direct: bool) -> None:
    async with dask(direct_to_workers=direct) as client:
        async with open_cluster("dask", replicas=2, client=client) as cluster:
            handle = await cluster.spawn(Service, str(tmp_path))
            processes = await processes_of(handle)
            assert os.getpid() not in processes
            assert {await handle.call("visible") for _ in range(4)} == {"0", "1"}
            assert {(await handle.call("info")).index for _ in range(4)} == {0, 1}

            large = np.arange(1 << 20, dtype=np.float64)
            for values in (large, large.reshape(1024, 1024).T, large[:0], large[::2]):
                doubled = await handle.call("double", values)
                assert np.array_equal(doubled, 2 * values)
                doubled += 1  # it can be written
            assert np.array_equal(large, np.arange(1 << 20))

            class Local:
                """Belongs to no module that a worker could import."""

                def __init__(self) -> None:
                    self.number = 7

            with pytest.raises(ValueError, match="wrong") as caught:
                await handle.call("fail", "wrong")
            assert "in fail" in "".join(caught.value.__notes__)
            with pytest.raises(RemoteError, match="Gone"):
                await handle.call("exit")
            with pytest.raises(RemoteError, match="cannot be pickled"):
                await handle.call("unpicklable")
            assert (await handle.call("echo", Local())).number == 7

            waiting = asyncio.create_task(handle.call("wait", "cancelled"))
            await until(lambda: files(tmp_path, "cancelled-began"))
            waiting.cancel()
            await until(lambda: files(tmp_path, "cancelled-ended"))
            # More calls than the pools of Dask have connections: probes do not wait for them.
            numbers = await asyncio.gather(*(handle.call("echo", number) for number in range(1000)))
            assert numbers == list(range(1000))
            assert sorted(await processes_of(handle)) == processes
            assert all(each.restarts == 0 for each in cluster.statistics().replicas)
            assert cluster.healthy
        assert files(tmp_path, "left") == processes  # before the block has ended
        await until_released(client)
        assert sorted((await client.run(os.getpid)).values()) == processes  # the workers go on

        async with open_cluster("dask", replicas=1, client=client) as cluster:
            handle = await cluster.spawn(Service, str(tmp_path))
            assert await handle.call("echo", 1) == 1


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_a_request_that_arrives_twice_runs_once(tmp_path: Path) -> None:
    async with dask(1) as client:
        engine = DaskEngine(client)
        await engine.start(1, lambda *_: None)
        await engine.spawn(0, 1)
        program, buffers = pack((Service, (str(tmp_path),)), engine.dumps)
        assert (await engine.call(0, Packet(Request(1, Create(1, program)), buffers))).message.accepted

        def count(number: int) -> asyncio.Future[Packet]:
            return engine.call(0, Packet(Request(1, Run(number, 1, "count", pack(("x",))[0]))))

        first, second = await quickly(asyncio.gather(count(1), count(1)))
        assert first.load(first.message.result) == second.load(second.message.result) == 1
        third = await quickly(count(2))
        assert third.load(third.message.result) == 2

        late = engine.call(0, Packet(Request(1, Run(3, 1, "wait", pack(("late",))[0]))))
        await until(lambda: files(tmp_path, "late-began"))
        await engine.close()
        with pytest.raises(ConnectionResetError):
            await quickly(late)
        with pytest.raises(ConnectionResetError):
            await engine.call(0, Packet(Request(1, Run(4, 1, "process", pack(())[0]))))
        await until(lambda: files(tmp_path, "late-ended"))  # without a `Leave`: the lease was released
        await until(lambda: files(tmp_path, "left"))


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_workers_of_another_cluster_are_refused(tmp_path: Path) -> None:
    """Also through another client. The first cluster goes on."""
    async with dask(2) as client, distributed.Client(client.scheduler.address, asynchronous=True) as second:
        async with open_cluster("dask", replicas=2, client=client) as cluster:
            handle = await cluster.spawn(Service, str(tmp_path))
            processes = await processes_of(handle)
            for other in (client, second):
                with pytest.raises(InvalidArgumentError, match=r"only 0 of the 2 workers .* close that cluster first"):
                    async with open_cluster("dask", replicas=1, client=other):
                        pass
            assert await processes_of(handle) == processes
            assert all(each.restarts == 0 for each in cluster.statistics().replicas)
        async with open_cluster("dask", replicas=2, client=second) as cluster:
            assert await processes_of(await cluster.spawn(Service, str(tmp_path))) == processes


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_a_worker_that_is_away_is_not_for_another_cluster(tmp_path: Path) -> None:
    async with dask(1) as client, open_cluster("dask", replicas=1, client=client) as cluster:
        handle = await cluster.spawn(Service, str(tmp_path))
        before = await handle.call("process")
        os.kill(before, signal.SIGKILL)
        await until(lambda: cluster.statistics().replicas[0].state == "restarting")
        with pytest.raises(InvalidArgumentError, match=r"close that cluster first|has 0 running workers"):
            async with open_cluster("dask", replicas=1, client=client):
                pass
        assert await quickly(handle.call("process")) != before


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_of_clusters_that_are_opened_at_once_one_gets_the_worker(tmp_path: Path) -> None:
    async def opened(client: Any) -> str:
        async with open_cluster("dask", replicas=1, client=client) as cluster:
            handle = await cluster.spawn(Service, str(tmp_path))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            return str(await handle.call("echo", "served"))

    async with dask(1) as client:
        tasks = [asyncio.create_task(opened(client)) for _ in range(2)]
        outcomes = await quickly(asyncio.gather(*tasks, return_exceptions=True))
    (error,) = (each for each in outcomes if isinstance(each, InvalidArgumentError))
    assert "close that cluster first" in str(error)
    assert [each for each in outcomes if each is not error] == ["served"]


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_a_second_cluster_gets_the_workers_and_gpus_that_the_first_leaves(tmp_path: Path) -> None:
    async with (
        dask(3) as client,
        open_cluster("dask", replicas=2, client=client) as one,
        open_cluster("dask", replicas=1, client=client) as two,
    ):
        first, second = await one.spawn(Service, str(tmp_path)), await two.spawn(Service, str(tmp_path))
        assert {await first.call("visible") for _ in range(4)} == {"0", "1"}
        assert await second.call("visible") == "2"
        os.kill(await second.call("process"), signal.SIGKILL)
        assert await quickly(second.call("visible", retry=True)) == "2"
        assert not {await second.call("process")} & set(await processes_of(first))


# -- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.heavy
@pytest.mark.parametrize("direct", [False, True])
async def test_a_killed_worker_is_noticed_and_served_again(tmp_path: Path, direct: bool) -> None:
    async with dask(1, direct_to_workers=direct) as client, open_cluster("dask", replicas=1, client=client) as cluster:
        handle = await cluster.spawn(Service, str(tmp_path))
        before = await client.scheduler.identity(n_workers=-1)
        call = asyncio.create_task(handle.call("wait", "killed"))
        await until(lambda: files(tmp_path, "killed-began"))
        (process,) = await processes_of(handle, 1)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(ReplicaLostError, match="cannot be reached") as caught:  # without a probe
            await quickly(call)
        assert (caught.value.replica, caught.value.epoch) == (0, 1)
        assert await quickly(handle.call("process")) != process  # waits for the restart
        after = await client.scheduler.identity(n_workers=-1)
        nannies = [{each["nanny"] for each in info["workers"].values()} for info in (before, after)]
        assert nannies[0] == nannies[1]
        assert cluster.healthy
        assert cluster.statistics().replicas[0].restarts == 1
        assert cluster.statistics().replicas[0].epoch == 2


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_a_second_cluster_waits_for_a_worker_that_was_lost(tmp_path: Path) -> None:
    """It does not wait for a nanny that has ended."""
    async with dask() as client:
        async with open_cluster("dask", replicas=2, client=client) as cluster:
            processes = await processes_of(await cluster.spawn(Service, str(tmp_path)))
        os.kill(processes[0], signal.SIGKILL)
        while len(await workers_of(client)) == 2:
            await asyncio.sleep(0)
        async with open_cluster("dask", replicas=2, client=client) as cluster:
            after = await processes_of(await cluster.spawn(Service, str(tmp_path)))
            assert (processes[0] in after, processes[1] in after) == (False, True)
        await next(nanny for nanny in client.cluster.workers.values() if nanny.pid == processes[1]).close()
        while len(await workers_of(client)) == 2:
            await asyncio.sleep(0)
        opening = open_cluster("dask", replicas=2, client=client)
        with pytest.raises(InvalidArgumentError, match="replicas=2, but the Dask cluster has 1 running workers"):
            await quickly(opening.__aenter__())


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_faults_ends_and_stops_of_workers(tmp_path: Path) -> None:
    async with dask() as client, open_cluster("dask", replicas=2, client=client, restarts=9) as cluster:
        handle = await cluster.spawn(Service, str(tmp_path))
        assert await quickly(handle.call("once", "first", retry=True)) > 0  # the first call has ended its process
        assert sum(each.lost for each in cluster.statistics().replicas) == 1

        with pytest.raises(ReplicaLostError, match="device has faulted") as caught:
            await quickly(handle.call("trap"))
        assert isinstance(caught.value.__cause__, DeviceFault)
        processes = await processes_of(handle)
        assert cluster.healthy

        for each in processes:
            os.kill(each, signal.SIGSTOP)
        with pytest.raises(ReplicaLostError, match="no probe"):
            await quickly(handle.call("process"))
        await processes_of(handle)
        for each in processes:
            with pytest.raises(ProcessLookupError):
                os.kill(each, 0)


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_an_unused_worker_takes_the_place_of_one_whose_nanny_has_ended(tmp_path: Path) -> None:
    async with dask() as client, open_cluster("dask", replicas=1, client=client) as cluster:
        handle = await cluster.spawn(Service, str(tmp_path))
        (process,) = await processes_of(handle, 1)
        nannies = list(client.cluster.workers.values())
        assert len(nannies) == 2
        await next(nanny for nanny in nannies if nanny.pid == process).close()
        (spare,) = [nanny.pid for nanny in nannies if nanny.pid is not None]
        assert await quickly(handle.call("process", retry=True)) == spare
        assert await handle.call("visible") == "0"


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_a_closed_client_ends_the_replicas(tmp_path: Path) -> None:
    async with (
        dask(1) as client,
        distributed.Client(client.scheduler.address, asynchronous=True) as second,
        open_cluster("dask", replicas=1, client=second) as cluster,
    ):
        handle = await cluster.spawn(Service, str(tmp_path))
        await second.close()
        with pytest.raises(ReplicaLostError, match="client of Dask is closed"):
            while True:
                await quickly(handle.call("process", retry=True))
        assert not cluster.healthy


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_a_worker_that_does_not_leave_its_objects_is_killed(tmp_path: Path) -> None:
    async with dask(1) as client:
        with pytest.warns(CleanupWarning, match="have not left their objects"):
            async with open_cluster("dask", replicas=1, client=client) as cluster:
                handle = await cluster.spawn(Service, str(tmp_path))
                (process,) = await processes_of(handle, 1)
                os.kill(process, signal.SIGSTOP)
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.asyncio
@pytest.mark.heavy
async def test_objects_are_left_when_the_client_is_killed(tmp_path: Path) -> None:
    async with dask(1) as client:
        address = client.scheduler.address
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, address, str(tmp_path), env={**os.environ, "PYTHONPATH": path}
        )
        try:
            await until(lambda: files(tmp_path, "client-began") or program.returncode is not None)
            assert program.returncode is None
        finally:
            program.kill()
            await program.wait()
        await until(lambda: files(tmp_path, "client-ended") and files(tmp_path, "left"))
        await until_released(client)
