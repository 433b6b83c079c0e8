"""Lost replicas, on each engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path

import pytest

from aiocuda import DeviceFault
from aiocuda.cluster import Cluster, DeadlineError, ReplicaHandle, ReplicaLostError
from tests.cluster.conftest import Opener
from tests.cluster.test_cluster import lines, places
from tests.cluster.things import Ending, Model, Service
from tests.helpers import until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.heavy]


async def running(cluster: Cluster) -> None:
    """Wait until all replicas run."""
    await until(lambda: all(each.state == "running" for each in cluster.statistics().replicas), "a restart")


async def holding(cluster: Cluster, handle: ReplicaHandle, calls: int, **options: bool) -> list[asyncio.Task[str]]:
    """Begin calls that last until they are cancelled."""
    held = [asyncio.create_task(handle.call("hold", str(number), **options)) for number in range(calls)]
    await until(lambda: sum(each.in_flight for each in cluster.statistics().replicas) == calls)
    return held


async def test_killed_replica(opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its calls fail, or go to another replica; it serves again, with its objects, in the next epoch."""
    caplog.set_level(logging.INFO, "aiocuda")
    log = tmp_path / "log"
    async with opened(2) as cluster:
        handle, model = await cluster.spawn(Service, log), await cluster.spawn(Model)
        index, (epoch, pid) = next(iter((await places(handle, 2)).items()))
        held = await holding(cluster, handle, 2)
        file = tmp_path / "file"
        again = [asyncio.create_task(handle.call("until_exists", file, str(number), retry=True)) for number in range(2)]
        await until(lambda: all(each.in_flight == 2 for each in cluster.statistics().replicas))
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        file.touch()
        (lost,) = [task for task in held if task.done()]
        error = lost.exception()
        assert isinstance(error, ReplicaLostError)
        assert (error.replica, error.epoch) == (index, epoch)
        assert "probe" not in str(error)  # it is lost when its process ends, and not only 2 s later
        assert await asyncio.gather(*again) == ["0", "1"]
        await running(cluster)
        for task in held:
            task.cancel()
        await until(lambda: not any(each.in_flight for each in cluster.statistics().replicas))
        after = await places(handle, 2)
        assert after[index][0] == epoch + 1
        assert after[index][1] != pid
        assert await asyncio.gather(*(model.call("where") for _ in range(4)))
        figures = cluster.statistics()
        assert figures.retries == 1
        assert figures.replicas[index].restarts == 1
        assert figures.replicas[index].lost == 2
        assert figures.replicas[index].last_loss
        assert cluster.healthy
    assert lines(log).count("entered") == 3
    assert sorted(line for line in lines(log) if line in ("0", "1")) == ["0", "1"]
    logged = [record.message.split()[0] for record in caplog.records if record.name == "aiocuda"]
    assert logged == ["replica_lost", "replica_restarted", "cluster_closed"]


async def test_replica_that_is_stopped(opened: Opener) -> None:
    """It answers no probe for 2 s; then it is killed and started again. A call waits for it, or misses its deadline."""
    async with opened(1) as cluster:
        handle = await cluster.spawn(Service)
        _, epoch, pid = await handle.call("where")
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError):
            await handle.call("echo", 1, deadline_s=0.3)
        with pytest.raises(ReplicaLostError, match="it has answered no probe for 2 s"):
            await handle.call("echo", 1)
        assert cluster.statistics().replicas[0].state == "restarting"
        with pytest.raises(DeadlineError):
            await handle.call("echo", 1, deadline_s=0.001)
        assert (await handle.call("where"))[1] == epoch + 1
        assert cluster.statistics().waiting == 0


async def test_replica_whose_device_faults(opened: Opener) -> None:
    async with opened(2) as cluster:
        handle = await cluster.spawn(Model)
        before = await places(handle, 2)
        with pytest.raises(ReplicaLostError, match="its device has faulted") as error:
            await handle.call("fault")
        assert isinstance(error.value.__cause__, DeviceFault)
        index = error.value.replica
        assert index is not None
        await running(cluster)
        after = await places(handle, 2)
        assert after[index][0] == 2
        assert after[1 - index] == before[1 - index]


async def test_call_that_ends_every_replica_is_not_sent_for_ever(opened: Opener) -> None:
    async with opened(2) as cluster:
        handle = await cluster.spawn(Service)
        with pytest.raises(ReplicaLostError) as error:
            await handle.call("end", 3, retry=True)
        assert any("it may be the reason" in note for note in error.value.__notes__)
        assert sum(each.lost for each in cluster.statistics().replicas) == 3
        await running(cluster)
        assert await handle.call("echo", 1) == 1


async def test_cluster_serves_with_the_rest_at_the_limit_of_restarts(opened: Opener) -> None:
    async with opened(2, restarts=0) as cluster:
        handle = await cluster.spawn(Service)
        pids = await places(handle, 2)
        for index in range(2):
            assert cluster.healthy == (index == 0)
            os.kill(pids[index][1], signal.SIGKILL)
            await until(lambda: cluster.statistics().replicas[index].state == "stopped")  # noqa: B023
            if not index:
                assert {(await handle.call("where"))[0] for _ in range(4)} == {1}
        for retry in (False, True):
            with pytest.raises(ReplicaLostError, match="no replica is left"):
                await handle.call("echo", 1, retry=retry)
        with pytest.raises(ReplicaLostError, match="no replica is left"):
            await cluster.spawn(Service)


async def test_object_that_is_spawned_while_a_replica_restarts(opened: Opener) -> None:
    async with opened(2) as cluster:
        first = await cluster.spawn(Service)
        pids = await places(first, 2)
        os.kill(pids[0][1], signal.SIGKILL)
        await until(lambda: cluster.statistics().replicas[0].state == "restarting")
        second = await cluster.spawn(Service)
        assert (await places(second, 2))[0][0] == 2


@pytest.mark.parametrize("restarts", [0, 3])
async def test_a_class_that_ends_its_processes_leaves_earlier_classes_as_they_were(
    opened: Opener, restarts: int
) -> None:
    """Also if it is tried again and again. The limit of restarts is not used."""
    async with opened(2, restarts=restarts) as cluster:
        first = await cluster.spawn(Service)
        for spawns in range(1, 6 if restarts else 3):
            with pytest.raises(ReplicaLostError, match="Ending was not created: each replica was lost"):
                await cluster.spawn(Ending, None)
            await until(lambda: all(each.state == "running" for each in cluster.statistics().replicas))
            assert {epoch for epoch, _ in (await places(first, 2)).values()} == {spawns + 1}
        assert cluster.healthy
        second = await cluster.spawn(Service)
        assert len(await places(second, 2)) == 2


async def test_a_class_that_ends_one_process_is_created_there_again(opened: Opener) -> None:
    async with opened(2, restarts=1) as cluster:
        handle = await cluster.spawn(Ending, 0, 2)
        assert {await handle.call("where") for _ in range(4)} == {0, 1}
        assert [each.restarts for each in cluster.statistics().replicas] == [2, 0]  # the first one does not count


async def test_a_class_that_ends_one_replica_each_time_is_served_by_the_others(opened: Opener) -> None:
    async with opened(2, restarts=1) as cluster:
        first = await cluster.spawn(Service)
        handle = await cluster.spawn(Ending, 0)
        assert {await handle.call("where") for _ in range(4)} == {1}
        assert (await first.call("where"))[0] == 1
        assert [each.state for each in cluster.statistics().replicas] == ["stopped", "running"]


async def test_method_that_blocks_its_loop_loses_its_replica(opened: Opener) -> None:
    async with opened(1) as cluster:
        handle = await cluster.spawn(Service)
        with pytest.raises(ReplicaLostError, match="it has answered no probe for 2 s"):
            await handle.call("block_loop", 30.0)
        assert await handle.call("block", 2.5) == 2.5


async def test_program_that_blocks_its_own_loop_loses_no_replica(opened: Opener) -> None:
    async with opened(2) as cluster:
        handle = await cluster.spawn(Service)
        before = await places(handle, 2)
        time.sleep(3)  # noqa: TID251, ASYNC251 - this is the mistake
        assert await handle.call("sleep", 1.2, "slept") == "slept"
        assert await places(handle, 2) == before
