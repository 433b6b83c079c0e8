"""Calls, failures and the end of a cluster, on each engine."""

from __future__ import annotations

import asyncio
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocuda import ClosedError, InvalidArgumentError, InvalidTypeError
from aiocuda.cluster import Cluster, DeadlineError, RemoteError, ReplicaHandle, ReplicaLostError
from tests.cluster.conftest import Opener
from tests.cluster.things import Failing, Kept, Model, NeedsAnotherCluster, Service, Uncopyable, Unloadable
from tests.helpers import PATIENCE, quickly, until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


async def places(handle: ReplicaHandle, replicas: int) -> dict[int, tuple[int, int]]:
    """Return epoch and process id of each replica. While no other call runs, calls go to the replicas in turn."""
    found: dict[int, tuple[int, int]] = {}
    for _ in range(100):
        index, epoch, pid = await handle.call("where", retry=True)
        found[index] = epoch, pid
        if len(found) == replicas:
            return found
    raise AssertionError(f"100 calls have reached only the replicas {sorted(found)}")


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


async def test_calls(opened: Opener, tmp_path: Path) -> None:
    """Results, exceptions, deadlines and cancellations of two replicas, which stay the same."""
    log = tmp_path / "log"
    async with opened(2) as cluster:
        handle = await cluster.spawn(Service, log)
        assert lines(log) == ["entered"] * 2
        before = await places(handle, 2)
        assert {epoch for epoch, _ in before.values()} == {1}
        assert len({pid for _, pid in before.values()}) == 2
        await results(handle)
        await exceptions(handle)
        await deadlines_and_cancellations(handle, log)
        assert await places(handle, 2) == before
        figures = cluster.statistics()
        assert cluster.healthy
        assert (figures.waiting, figures.retries) == (0, 0)
        for each in figures.replicas:
            assert (each.state, each.restarts, each.last_loss, each.in_flight) == ("running", 0, None, 0)
            assert each.answered > 0
            assert 0 < each.latency_p50_s <= each.latency_p99_s < 10
        assert sum(each.failed for each in figures.replicas) == 11
    assert lines(log).count("left") == 2
    assert not cluster.healthy
    with pytest.raises(ClosedError, match="this cluster has been closed: open another one"):
        await handle.call("echo", 1)
    with pytest.raises(ClosedError, match="this cluster has been closed: open another one"):
        await cluster.spawn(Service)


@pytest.mark.parametrize("method", ["plain", "coroutine"])
async def test_an_array_that_the_object_writes_again_is_not_in_an_earlier_result(opened: Opener, method: str) -> None:
    async with opened(1) as cluster:
        handle = await cluster.spawn(Kept)
        returned = await asyncio.gather(*(handle.call(method, number) for number in range(100)))
        assert [each.tolist() for each in returned] == [[number] * 20_000 for number in range(100)]
        assert all(each.flags.writeable for each in returned)


async def results(handle: ReplicaHandle) -> None:
    assert await handle.call("echo", {"a": [1, "é", None]}) == {"a": [1, "é", None]}
    assert {(await handle.call("plain", 7))[1:] for _ in range(4)} == {(0, True), (1, True)}
    array = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    returned = await handle.call("echo", {"x": array, "y": array[::2]})
    assert (returned["x"] == array).all()
    assert (returned["y"] == array[::2]).all()
    assert returned["x"].flags.writeable
    assert await handle.call("total", np.ones(10)) == (10.0, True)
    values = await asyncio.gather(*(handle.call("echo", value) for value in range(300)))
    assert values == list(range(300))


async def exceptions(handle: ReplicaHandle) -> None:
    with pytest.raises(KeyError, match="key") as key:
        await handle.call("fail", "key")
    assert any("raise KeyError(kind)" in note for note in key.value.__notes__)
    with pytest.raises(ExceptionGroup, match="two"):
        await handle.call("fail", "group")
    with pytest.raises(TimeoutError, match="of the method") as late:
        await handle.call("fail", "timeout", deadline_s=60)
    assert not isinstance(late.value, DeadlineError)
    for kind, name in (("unpicklable", "Unpicklable"), ("uncopyable", Uncopyable.__name__), ("exit", "SystemExit")):
        with pytest.raises(RemoteError, match=name) as remote:
            await handle.call("fail", kind)
        assert remote.value.type_name.endswith(name)
        assert "in fail" in remote.value.traceback
        assert str(pickle.loads(pickle.dumps(remote.value))) == str(remote.value)
    with pytest.raises(RemoteError, match="CancelledError"):
        await handle.call("fail", "cancelled")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await handle.call("stop")
    with pytest.raises(RemoteError, match="result of 'lock', of type lock, cannot be pickled"):
        await handle.call("lock")
    with pytest.raises(RemoteError, match=r"result of Service.unloadable\(\).* cannot be loaded"):
        await handle.call("unloadable")
    with pytest.raises(ValueError, match="no number"):
        await handle.call("echo", Unloadable())
    with pytest.raises(AttributeError, match="no_such"):
        await handle.call("no_such")
    with pytest.raises(InvalidTypeError, match="the arguments of 'echo' cannot be pickled"):
        await handle.call("echo", threading.Lock())


async def deadlines_and_cancellations(handle: ReplicaHandle, log: Path) -> None:
    other = asyncio.create_task(handle.call("sleep", 0.2, "slept"))
    seconds = 0.05
    while "late begun" not in lines(log):  # a replica that is slow to begin gets twice as long the next time
        with pytest.raises(DeadlineError, match=rf"Service.hold\(\) has not returned within {seconds:g} s") as late:
            await handle.call("hold", "late", deadline_s=seconds)
        assert (late.value.deadline_s, late.value.predicted_s) == (seconds, None)
        seconds *= 2
        assert seconds < PATIENCE
    held = asyncio.create_task(handle.call("hold", "cancelled"))
    await until(lambda: "cancelled begun" in lines(log))
    assert "cancelled ended" not in lines(log)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    await until(lambda: {"late ended", "cancelled ended"} <= set(lines(log)))
    assert await other == "slept"
    with pytest.raises(DeadlineError):
        await handle.call("block", 0.1, deadline_s=0)


async def test_methods_of_one_replica(opened: Opener, tmp_path: Path) -> None:
    """Coroutine methods run at the same time; plain ones one after the other, beside the loop."""
    async with opened(1) as cluster:
        service, other = await cluster.spawn(Service), await cluster.spawn(Service)
        waiting = [asyncio.create_task(service.call("wait")) for _ in range(3)]
        blocking = asyncio.create_task(other.call("block_until_exists", tmp_path / "file"))
        assert await service.call("echo", 1) == 1
        assert await other.call("echo", 2) == 2
        await service.call("open")
        assert await asyncio.gather(*waiting) == ["opened"] * 3
        assert not blocking.done()
        (tmp_path / "file").touch()
        await blocking


async def test_replica_with_the_least_predicted_work_gets_a_call(opened: Opener) -> None:
    async with opened(2) as cluster:
        handle = await cluster.spawn(Service)
        for _ in range(4):
            await handle.call("sleep", 0.02)
            await handle.call("where")
        long = asyncio.create_task(handle.call("sleep", 600.0))
        await asyncio.sleep(0)
        indices = [(await handle.call("where"))[0] for _ in range(6)]
        assert len(set(indices)) == 1
        assert not long.done()
        long.cancel()


async def test_class_that_fails_is_not_spawned(opened: Opener) -> None:
    async with opened(2) as cluster:
        with pytest.raises(ValueError, match="replica 1") as error:
            await cluster.spawn(Failing, 1)
        assert any("Failing() of replica 1" in note for note in error.value.__notes__)
        with pytest.raises(ValueError, match="replica"):
            await cluster.spawn(Failing, None)
        handle = await cluster.spawn(Failing, 7)
        assert "Failing" in repr(handle)
        assert cluster.healthy
        assert repr(cluster) == "<Cluster 2 of 2 replicas running, 0 calls in flight>"


async def test_replica_that_another_cluster_has_lost_is_no_loss_of_this_one(opened: Opener, tmp_path: Path) -> None:
    """A method or a constructor that raises `ReplicaLostError` runs once, also with retry=True."""
    log = tmp_path / "log"
    async with opened(1) as cluster:
        handle = await cluster.spawn(Service, log)
        with pytest.raises(ReplicaLostError, match="of another cluster"):
            await handle.call("fail", "lost", retry=True)
        assert lines(log).count("lost") == 1
        with pytest.raises(ReplicaLostError, match="of another cluster"):
            await quickly(cluster.spawn(NeedsAnotherCluster))
        figures = cluster.statistics()
        assert (figures.retries, figures.replicas[0].lost, figures.replicas[0].failed) == (0, 0, 1)
        assert cluster.healthy


async def test_device_of_each_replica(opened: Opener) -> None:
    async with opened(2) as cluster:
        handle = await cluster.spawn(Model)
        rows = np.ones((4, 8), np.float32)
        answers = await asyncio.gather(*(handle.call("double", rows) for _ in range(20)))
        assert all((answer == 2).all() for answer in answers)


async def test_closing_waits_for_accepted_calls_and_then_leaves_them(opened: Opener, tmp_path: Path) -> None:
    async with opened(2) as cluster:
        handle = await cluster.spawn(Service)
        file = tmp_path / "file"
        accepted = [asyncio.create_task(handle.call("until_exists", file, str(number))) for number in range(4)]
        await until(lambda: sum(each.in_flight for each in cluster.statistics().replicas) == 4)
        closing = asyncio.create_task(cluster.aclose())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            await handle.call("echo", 1)
        file.touch()
        assert await asyncio.gather(*accepted) == ["0", "1", "2", "3"]
        await closing
        await cluster.aclose()
    async with opened(1) as cluster:
        handle = await cluster.spawn(Service)
        held = asyncio.create_task(handle.call("hold", ""))
        await until(lambda: cluster.statistics().replicas[0].in_flight)
        await quickly(cluster.aclose(timeout_s=0.05))
        with pytest.raises(ReplicaLostError, match="the cluster was closed"):
            await held


WRONG_CALLS: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((7,), {}, InvalidTypeError, "a method is given by its name, not 7"),
    (("_note", "text"), {}, InvalidArgumentError, "'_note' is no public method"),
    (("__init__",), {}, InvalidArgumentError, "'__init__' is no public method"),
    (
        ("echo", 1),
        {"deadline_s": -1},
        DeadlineError,
        "Service.echo() was not called: its deadline had passed 1 s before",
    ),
    (("echo", 1), {"deadline_s": float("nan")}, InvalidArgumentError, "nan"),
    (("echo", 1), {"deadline_s": "soon"}, InvalidTypeError, "deadline_s is a number of seconds, not 'soon'"),
    (("echo", 1), {"retry": np.ones(2)}, InvalidTypeError, "retry is True or False"),
]


async def test_wrong_arguments_of_spawn_and_call(opened: Opener) -> None:
    """They are refused before anything is sent to a replica."""
    async with opened(1) as cluster:
        handle = await cluster.spawn(Service)
        for args, options, error, text in WRONG_CALLS:
            with pytest.raises(error, match=re.escape(text)):
                await handle.call(*args, **options)
        for thing in (Service(), "Service", None, len):
            with pytest.raises(InvalidTypeError, match="spawn takes a class and its arguments"):
                await cluster.spawn(thing)  # type: ignore[arg-type]
        with pytest.raises(InvalidTypeError, match="Service and its arguments cannot be pickled"):
            await cluster.spawn(Service, threading.Lock())
        for timeout in (-1, float("nan"), "soon"):
            with pytest.raises((InvalidArgumentError, InvalidTypeError), match="timeout_s"):
                await cluster.aclose(timeout)  # type: ignore[arg-type]
        assert await handle.call("echo", 1, deadline_s=float("inf")) == 1
        assert cluster.statistics().replicas[0].calls == 1


async def test_cluster_and_handle_cannot_be_pickled(opened: Opener) -> None:
    async with opened(1) as cluster:
        handle = await cluster.spawn(Service)
        for thing in (cluster, handle):
            with pytest.raises(InvalidTypeError, match="belongs to this process"):
                pickle.dumps(thing)
        await other_loop(handle, cluster)


async def other_loop(handle: ReplicaHandle, cluster: Cluster) -> None:
    async def call() -> Any:
        return await handle.call("echo", 1)

    def elsewhere() -> str:
        with pytest.raises(RuntimeError, match="belongs to another event loop") as error:
            asyncio.run(call())
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            asyncio.run(cluster.aclose())
        return type(error.value).__name__

    assert await asyncio.to_thread(elsewhere) == "WrongLoopError"
