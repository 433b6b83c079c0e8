"""Mistakes of newcomers with services and clusters, with the error of each and words of its cure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

import aiocuda
from aiocuda import BusyError, InvalidArgumentError, InvalidTypeError
from aiocuda.cluster import Cluster, ClusterStatistics, ReplicaHandle, ReplicaStatistics, open_cluster
from aiocuda.serving import BatchError, MicroBatcher, OverloadedError, asgi

__all__ = ["MISTAKES", "At"]

AIOCUDA: Any = aiocuda  # untyped, as all that follows, because a type checker refuses the mistakes
ASGI: Any = asgi
BATCHER: Any = MicroBatcher
CLUSTER: Any = Cluster
HANDLE: Any = ReplicaHandle
OPEN: Any = aiocuda.open_device
OPEN_CLUSTER: Any = open_cluster
OVERLOADED: Any = OverloadedError
REPLICA: Any = ReplicaStatistics(0, "running", 1, 0, 0, 0, 0, 0, 0.0, 0.0, 0, None)
REPLICAS: Any = ClusterStatistics((REPLICA,), 0, 0)


class At:
    """The objects for the mistakes."""

    def __init__(self, device: Any, stream: Any) -> None:
        self.device = device
        self.stream = stream
        self.handle = HANDLE(None, 0, "Model")


async def items(batch: Any) -> Any:
    return batch.items


async def served(at: At, function: Callable[[Any], Any], **options: Any) -> Any:
    """Return the result of a request whose function is a plain one."""

    async def infer(batch: Any) -> Any:
        return function(batch)

    async with BATCHER(infer, max_batch_size=4, device=at.device) as batcher:
        return await batcher.submit(1, **options)


async def closes(at: At) -> Any:
    async def infer(batch: Any) -> Any:
        async with batch.stream:
            raise AssertionError("it was entered")

    async with BATCHER(infer, max_batch_size=4, device=at.device) as batcher:
        return await batcher.submit(1)


def assign(batch: Any) -> None:
    batch.results = [1]


async def with_batcher(function: Callable[[Any], Any]) -> Any:
    async with BATCHER(items, max_batch_size=4) as batcher:
        result = function(batcher)
        return await result if asyncio.iscoroutine(result) else result


async def with_pool(at: At, function: Callable[[Any], Any]) -> Any:
    async with AIOCUDA.StreamPool(at.device) as pool:
        return function(pool)


async def endpoint(request: Any) -> Any: ...


class Application:
    """As one of Starlette."""

    router = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


FIGURES = "has attributes and no items: statistics."
PINNED = "slot.pinned('x', shape, dtype)"

#: (the mistake, the class of the error, words of the cure)
MISTAKES: dict[str, tuple[Callable[[At], object], type[BaseException], str]] = {
    # statistics
    "statistics()['batches']": (
        lambda at: with_batcher(lambda batcher: batcher.statistics()["batches"]),
        InvalidTypeError,
        f"BatcherStatistics {FIGURES}batches, and dataclasses.asdict(statistics) is a dict of all",
    ),
    "statistics()._asdict()": (
        lambda at: with_batcher(lambda batcher: batcher.statistics()._asdict()),
        AttributeError,
        "BatcherStatistics has no '_asdict': dataclasses.asdict(statistics) is a dict of its attributes",
    ),
    "statistics().latency_p50": (
        lambda at: with_batcher(lambda batcher: batcher.statistics().latency_p50),
        AttributeError,
        "BatcherStatistics has no 'latency_p50': wait_p50_s and wait_p99_s are waits for a batch",
    ),
    "statistics().mean_batch_size": (
        lambda at: with_batcher(lambda batcher: batcher.statistics().mean_batch_size),
        AttributeError,
        "sizes has the number of batches of each size",
    ),
    "statistics().batch": (
        lambda at: with_batcher(lambda batcher: batcher.statistics().batch),
        AttributeError,
        "BatcherStatistics has no 'batch': it has batches, ",
    ),
    "pool.statistics().lease": (
        lambda at: with_pool(at, lambda pool: pool.statistics().lease),
        AttributeError,
        "StreamPoolStatistics has no 'lease': it has leases, leased, ",
    ),
    "pool.statistics()['leases']": (
        lambda at: with_pool(at, lambda pool: pool.statistics()["leases"]),
        InvalidTypeError,
        f"StreamPoolStatistics {FIGURES}leases, and statistics._asdict() is a dict of all",
    ),
    "pool.statistics().as_dict()": (
        lambda at: with_pool(at, lambda pool: pool.statistics().as_dict()),
        AttributeError,
        "statistics._asdict() is a dict of its attributes",
    ),
    "memory.statistics().peak": (
        lambda at: at.device.memory.statistics().peak,
        AttributeError,
        "MemoryStatistics has no 'peak': it has peak_bytes, ",
    ),
    "device.statistics()['x']": (lambda at: at.device.statistics()["x"], InvalidTypeError, f"{FIGURES}in_flight, and "),
    "cluster.statistics().alive": (lambda at: REPLICAS.alive, AttributeError, "each entry of replicas has its state"),
    "cluster.statistics().restarts": (lambda at: REPLICAS.restarts, AttributeError, "each entry of replicas has it"),
    "cluster.statistics()['replicas']": (lambda at: REPLICAS["replicas"], InvalidTypeError, f"{FIGURES}replicas"),
    "replicas[0].status": (lambda at: REPLICA.status, AttributeError, "it is called state"),
    # batchers
    "batcher.queue_depth": (
        lambda at: with_batcher(lambda batcher: batcher.queue_depth),
        AttributeError,
        "batcher.statistics().queued is the number of requests that wait",
    ),
    "batcher.reset_statistics()": (
        lambda at: with_batcher(lambda batcher: batcher.reset_statistics()),
        AttributeError,
        "subtract those of an earlier batcher.statistics()",
    ),
    "batcher.is_healthy": (
        lambda at: with_batcher(lambda batcher: batcher.is_healthy),
        AttributeError,
        "it is called healthy",
    ),
    "batcher.closed": (
        lambda at: with_batcher(lambda batcher: batcher.closed),
        AttributeError,
        "batcher.submit(item) raises a ClosedError when it is closed",
    ),
    "MicroBatcher(name=)": (
        lambda at: BATCHER(items, max_batch_size=4, name="x"),
        InvalidTypeError,
        "a batcher has no name: `with aiocuda.label('name')`",
    ),
    "MicroBatcher(handle.call)": (
        lambda at: BATCHER(at.handle.call, max_batch_size=4),
        InvalidTypeError,
        "`async def infer(batch): …`, not <bound method ReplicaHandle.call of <ReplicaHandle of Model>>: "
        "`await batch.stream.download(y)`, `await handle.call('predict', batch.items)` or ",
    ),
    "submit(1, weight=2)": (
        lambda at: served(at, list, weight=2),
        InvalidTypeError,
        "no parameter 'weight': it belongs to the batcher, MicroBatcher(infer, max_batch_size=64, weight=len)",
    ),
    "submit(1, deadline_s=nan)": (
        lambda at: served(at, list, deadline_s=float("nan")),
        InvalidArgumentError,
        "deadline_s is a number of seconds from now, and this is nan",
    ),
    # functions of batches
    "return [ValueError]": (
        lambda at: served(at, lambda batch: [ValueError]),
        BatchError,
        "result 0 of the batch is the class ValueError, and no exception: return an object of it, ValueError(message)",
    ),
    "async with batch.stream": (closes, BusyError, "use it without `async with` and aclose()"),
    "batch.results = …": (
        lambda at: served(at, assign),
        AttributeError,
        "has no 'results': the function returns one result, or one exception, for each item of batch.items",
    ),
    "batch.futures": (lambda at: served(at, lambda batch: batch.futures), AttributeError, "`return results`"),
    "batch.slot['x']": (
        lambda at: served(at, lambda batch: batch.slot["x"]),
        InvalidTypeError,
        "has no items: slot.buffer(name, shape, dtype) is memory of the device",
    ),
    "slot.unified()": (
        lambda at: served(at, lambda batch: batch.slot.unified("x", 3)),
        AttributeError,
        "a slot has memory of the device, slot.buffer(name, shape, dtype)",
    ),
    "slot.empty()": (
        lambda at: served(at, lambda batch: batch.slot.empty("x", (4, 3))),
        AttributeError,
        "slot.buffer(name, shape, dtype) is memory that stays with the slot",
    ),
    "slot.pinned((4, 3), dtype)": (
        lambda at: served(at, lambda batch: batch.slot.pinned((4, 3), np.float32)),
        InvalidTypeError,
        f"a slot's buffer has a string as its name, not (4, 3): slot.buffer('x', shape, dtype), or {PINNED}",
    ),
    # devices, streams and pools
    "device.memory_pool": (lambda at: at.device.memory_pool, AttributeError, "it is device.memory: "),
    "device.mem_get_info()": (
        lambda at: at.device.mem_get_info(),
        AttributeError,
        "device.memory.statistics() has the figures",
    ),
    "device.pool": (lambda at: at.device.pool, AttributeError, "aiocuda.StreamPool(device) is a pool of streams"),
    "device.memory.used": (lambda at: at.device.memory.used, AttributeError, "statistics().live_bytes"),
    "device.memory.limit": (lambda at: at.device.memory.limit, AttributeError, "it has no limit of its own"),
    "aiocuda.kernel": (lambda at: AIOCUDA.kernel, AttributeError, "aiocuda.Kernel(name, source=…, host=function)"),
    "aiocuda.MemoryPool": (lambda at: AIOCUDA.MemoryPool, AttributeError, "each device has one, device.memory"),
    "open_device(0, 'cpu')": (lambda at: OPEN(0, "cpu"), InvalidTypeError, "open_device(0, driver='host')"),
    "open_device(driver='cpu')": (
        lambda at: OPEN(driver="cpu"),
        InvalidArgumentError,
        "there are auto, cuda, host, simulated: use 'host'",
    ),
    "open_device(memory_limit=)": (
        lambda at: OPEN(memory_limit=1),
        InvalidTypeError,
        "LimitResource(upstream, nbytes)) limits the memory",
    ),
    "device.stream('mine')": (
        lambda at: at.device.stream("mine"),
        InvalidArgumentError,
        "not 'mine': device.stream(name='mine') gives it a name",
    ),
    "device.pinned('x', 3)": (
        lambda at: at.device.pinned("x", 3),
        InvalidTypeError,
        "a shape must be an integer or a tuple of integers, not 'x'",
    ),
    "buffer[::2]": (
        lambda at: at.stream.empty(4)[::2],
        InvalidArgumentError,
        "A kernel takes other items, or `(await stream.download(buffer))[index]`",
    ),
    "buffer.reshape(5)": (
        lambda at: at.stream.empty(4).reshape(5),
        InvalidArgumentError,
        "give one of as many items, or -1 for one extent",
    ),
    "pool.submit()": (
        lambda at: with_pool(at, lambda pool: pool.submit(len)),
        AttributeError,
        "`async with pool.stream() as stream` leases a stream",
    ),
    "pool.stream(timeout=1)": (
        lambda at: with_pool(at, lambda pool: pool.stream(timeout=1)),
        InvalidTypeError,
        "StreamPool.stream has no parameter 'timeout': use `async with asyncio.timeout(seconds):` around the wait",
    ),
    "StreamPool(maximum=4)": (
        lambda at: AIOCUDA.StreamPool(maximum=4),
        InvalidTypeError,
        "missing a required argument: 'device': StreamPool(device, minimum, maximum)",
    ),
    # web services
    "@error_responses": (
        lambda at: ASGI.error_responses(endpoint),
        InvalidTypeError,
        "endpoint is an endpoint: for all endpoints `app.add_middleware(error_responses)`, and for one "
        "`@cancel_on_disconnect`",
    ),
    "@CancelOnDisconnect": (
        lambda at: ASGI.CancelOnDisconnect(endpoint),
        InvalidTypeError,
        "for one `@cancel_on_disconnect`",
    ),
    "lifespan=lifespan": (
        lambda at: ASGI.lifespan(Application()),
        InvalidTypeError,
        "lifespan was given the application: Starlette(lifespan=lifespan(setup))",
    ),
    "OverloadedError.retry_after": (lambda at: OVERLOADED("full").retry_after, AttributeError, "called retry_after_s"),
    # clusters
    "open_cluster(replicas=2)": (
        lambda at: OPEN_CLUSTER(replicas=2),
        InvalidTypeError,
        "missing a required argument: 'engine': open_cluster('local', replicas=2)",
    ),
    "open_cluster(2)": (lambda at: OPEN_CLUSTER(2), InvalidTypeError, "'replicas': open_cluster('local', replicas=2)"),
    "open_cluster('local', 2)": (
        lambda at: OPEN_CLUSTER("local", 2),
        InvalidTypeError,
        "too many positional arguments: open_cluster('local', replicas=2)",
    ),
    "open_cluster(workers=)": (
        lambda at: OPEN_CLUSTER("local", workers=2),
        InvalidTypeError,
        "open_cluster has no parameter 'workers': use replicas=",
    ),
    "open_cluster(devices=)": (
        lambda at: OPEN_CLUSTER("local", replicas=2, devices=[0, 1]),
        InvalidTypeError,
        "replica i gets GPU i of its machine, the i-th entry of CUDA_VISIBLE_DEVICES",
    ),
    "Cluster(2)": (
        lambda at: CLUSTER(2),
        InvalidTypeError,
        "a cluster is opened by `async with open_cluster('local', replicas=2) as cluster`",
    ),
    "cluster.replicas": (
        lambda at: CLUSTER.replicas,
        AttributeError,
        "cluster.statistics().replicas has one entry for each",
    ),
    "call(retry=2)": (
        lambda at: at.handle.call("run", retry=2),
        InvalidTypeError,
        "retry is True or False, not 2: with True, at most two more replicas run it",
    ),
    "call(replica=1)": (
        lambda at: at.handle.call("run", replica=1),
        InvalidTypeError,
        "the replica with the least predicted work runs the call",
    ),
    "call('_private')": (
        lambda at: at.handle.call("_private"),
        InvalidArgumentError,
        "Give the class a method without it, which calls this one",
    ),
    "handle.map()": (
        lambda at: at.handle.map("run"),
        AttributeError,
        "ReplicaHandle has no 'map': `await handle.call('method', …)`, and several by `await asyncio.gather(*calls)`",
    ),
    "handle.call_all()": (lambda at: at.handle.call_all("run"), AttributeError, "each call goes to one replica"),
    "handle.remote()": (lambda at: at.handle.remote("run"), AttributeError, "has no 'remote': `await handle.call('met"),
    "handle.aclose()": (lambda at: at.handle.aclose(), AttributeError, "the cluster has aclose(), healthy and stati"),
}
