"""Things of every kind, and everything public that they can be thrown at."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

import aiocuda
from aiocuda import context, coordination, memory, observe, pipeline, pool
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Driver
from aiocuda.serving import Batch, MicroBatcher
from aiocuda.testing import SimulatedDriver, Upset

__all__ = ["TARGETS", "THINGS", "Setting", "Target", "ThrownError", "set_up"]

_SOURCE = "__global__ void scale(float* x, int n, float by) { int i = threadIdx.x; if (i < n) x[i] *= by; }"


class ThrownError(Exception):
    """Raised by a function that is passed as an argument. It must reach the caller unchanged."""


def _scale(x: Any, n: Any, by: Any) -> None:
    with np.errstate(all="ignore"):
        x *= by


def _raises(*args: object, **keywords: object) -> object:
    raise ThrownError


async def _items(batch: Batch[Any]) -> list[Any]:
    return batch.items


async def _coroutine(*args: object) -> int:
    return 7


class _Anything:
    def __init__(self, *args: object, **keywords: object) -> None: ...


class _Liar:
    """An object with wrong values for many protocols."""

    shape = (2, -1)
    dtype = "no dtype"
    __cuda_stream__ = (7, "x")
    __dlpack_device__ = 3
    operation = 5

    @property
    def __cuda_array_interface__(self) -> object:
        return {"shape": "x", "version": 3}

    def __index__(self) -> int:
        return -(10**40)

    def __len__(self) -> int:
        return 10**6


class Setting:
    """A device with one or more objects of each kind, all usable."""

    def __init__(
        self, device: aiocuda.Device, context: aiocuda.ManagedContext, batcher: MicroBatcher[Any, Any]
    ) -> None:
        self.device = device
        self.context = context
        self.batcher = batcher
        self.stream = device.stream(name="left")
        self.other = device.stream(name="right")
        self.buffer = self.stream.empty((4, 4))
        self.unified = device.unified(16)
        self.pinned = device.pinned(16)
        self.operation: Any = self.stream.fill(self.buffer, 1)
        self.event = self.stream.record(timing=True)
        self.kernel = aiocuda.Kernel("scale", source=_SOURCE, host=_scale)
        self.pool = aiocuda.StreamPool(device)
        self.events = aiocuda.EventPool(device, 4)
        self.group = aiocuda.StreamGroup(device, ("a", "b"))
        self.barrier = aiocuda.StreamBarrier(1)
        self.coordinator = aiocuda.AsyncCoordinator(device)
        self.node = self.coordinator.upload(np.zeros((4, 4), np.float32))
        self.ring = aiocuda.TripleBuffer()
        self.owner = aiocuda.TripleBuffer(buffers={"x": (4, np.float32)}, device=device)
        self.stage = aiocuda.Stage("stage", lambda slot: None)
        self.pipeline = aiocuda.Pipeline(device, [self.stage])
        with self.other.capture() as self.graph:
            self.captured = self.other.fill(self.buffer, 2)
        self.resource = memory.PoolResource(device.driver, device.index)
        self.freed = self.stream.empty(4)
        self.freed.free()


@contextlib.asynccontextmanager
async def set_up(driver: Driver) -> AsyncIterator[Setting]:
    """Open a setting on a device of a driver. Its objects may be broken by a test."""
    try:
        async with aiocuda.open_device(driver=driver) as device:
            async with (
                aiocuda.ManagedContext(driver=driver) as context,
                MicroBatcher(_items, max_batch_size=1) as batcher,
            ):
                yield Setting(device, context, batcher)
                raise ThrownError  # leave without waiting
    except ThrownError:
        pass


#: Functions that return an object. Objects that a call may use up are created each time.
THINGS: dict[str, Callable[[Setting], Any]] = {
    "None": lambda _: None,
    "True": lambda _: True,
    "0": lambda _: 0,
    "1": lambda _: 1,
    "3": lambda _: 3,
    "-1": lambda _: -1,
    "2**31": lambda _: 2**31,
    "2**64": lambda _: 2**64,
    "10**400": lambda _: 10**400,
    "0.5": lambda _: 0.5,
    "-2.5": lambda _: -2.5,
    "nan": lambda _: math.nan,
    "inf": lambda _: math.inf,
    "1j": lambda _: 1j,
    "fraction": lambda _: Fraction(1, 3),
    "empty str": lambda _: "",
    "str": lambda _: "abc",
    "high": lambda _: "high",
    "device's name": lambda _: "host",
    "float32": lambda _: "float32",
    "surrogate": lambda _: "\ud800",
    "source": lambda _: _SOURCE,
    "bytes": lambda _: b"abc",
    "bytearray": lambda _: bytearray(64),
    "object": lambda _: object(),
    "type": lambda _: _Anything,
    "()": lambda _: (),
    "(2, 3)": lambda _: (2, 3),
    "(-1,)": lambda _: (-1,),
    "list": lambda _: [1, "2", None],
    "deep list": lambda _: [[[[]]]],
    "set": lambda _: {3},
    "dict": lambda _: {"a": 1},
    "slice": lambda _: slice(1, 3),
    "ellipsis": lambda _: ...,
    "generator": lambda _: (number for number in (1, 2)),
    "function": lambda _: lambda *args: None,
    "function that raises": lambda _: _raises,
    "coroutine function": lambda _: _coroutine,
    "liar": lambda _: _Liar(),
    "float32 array": lambda _: np.zeros((4, 4), np.float32),
    "int array": lambda _: np.arange(16),
    "0-d array": lambda _: np.array(3.5),
    "no items": lambda _: np.empty((0, 3), np.float32),
    "strided": lambda _: np.zeros((4, 8), np.float32)[:, ::2],
    "object array": lambda _: np.array([None, "x"]),
    "big-endian": lambda _: np.zeros(3, ">f4"),
    "structure": lambda _: np.zeros(3, [("a", "i4"), ("b", "f8")]),
    "times": lambda _: np.zeros(3, "M8[s]"),
    "scalar": lambda _: np.float32(2.5),
    "read-only": lambda _: np.broadcast_to(np.float32(1), (4, 4)),
    "device": lambda s: s.device,
    "stream": lambda s: s.stream,
    "other": lambda s: s.other,
    "buffer": lambda s: s.buffer,
    "slice of it": lambda s: s.buffer[1:],
    "unified": lambda s: s.unified,
    "pinned": lambda s: s.pinned,
    "operation": lambda s: s.operation,
    "event": lambda s: s.event,
    "kernel": lambda s: s.kernel,
    "node": lambda s: s.node,
    "captured": lambda s: s.captured,
    "graph": lambda s: s.graph,
    "stage": lambda s: s.stage,
    "stages": lambda s: [s.stage],
    "pool": lambda s: s.pool,
    "event of a pool": lambda s: s.events.acquire_nowait(),
    "group": lambda s: s.group,
    "stream of a group": lambda s: s.group["a"],
    "freed buffer": lambda s: s.freed,
    "resource": lambda s: s.resource,
    "driver": lambda s: s.device.driver,
}


class Target(NamedTuple):
    """A public function or method."""

    name: str
    find: Callable[[Setting], Callable[..., Any]]
    parameters: tuple[inspect.Parameter, ...]


#: Methods that are not tried: they close objects, or are for drivers, listeners or other internal callers.
_LEFT_OUT = frozenset(
    {"aclose", "carried_by", "seen_from", "free_buffers", "plan", "on_submit"}
    | {"on_resolve", "stamp", "wait_for_all", "acting_for", "access", "deallocate", "release_stream", "clear"}
)

_INSTANCES: dict[str, Callable[[Setting], Any]] = {
    name: THINGS[name]
    for name in ("device", "stream", "buffer", "unified", "pinned", "operation", "event", "node", "graph", "pool")
} | {
    "events": lambda s: s.events,
    "group": lambda s: s.group,
    "member": lambda s: s.group["a"],
    "barrier": lambda s: s.barrier,
    "coordinator": lambda s: s.coordinator,
    "ring": lambda s: s.ring,
    "owner": lambda s: s.owner,
    "pipeline": lambda s: s.pipeline,
    "context": lambda s: s.context,
}

_CALLABLES: tuple[Callable[..., Any], ...] = (
    aiocuda.open_device,
    aiocuda.gather,
    aiocuda.as_completed,
    aiocuda.Kernel,
    aiocuda.StreamPool,
    aiocuda.EventPool,
    aiocuda.StreamGroup,
    aiocuda.StreamBarrier,
    aiocuda.AsyncCoordinator,
    aiocuda.TripleBuffer,
    aiocuda.Stage,
    aiocuda.Pipeline,
    aiocuda.CompletionPolicy.named,
    aiocuda.Stream.from_handle,
    memory.LimitResource,
    memory.SizeClassResource,
    memory.StatisticsResource,
    memory.ScrubbingResource,
    memory.TrackingResource,
    memory.FailingResource,
    observe.Timeline,
    observe.StreamProfiler,
    aiocuda.ManagedContext,
    context.StepConfig,
    pipeline.Launch,
    pipeline.SlotBuffer,
    pool.classify,
    HostDriver,
    SimulatedDriver,
    Upset,
)


def _parameters(function: Callable[..., Any], bound: bool) -> tuple[inspect.Parameter, ...]:
    found = tuple(inspect.signature(function).parameters.values())
    return found[1:] if bound else found


def _itself(function: Callable[..., Any]) -> Callable[[Setting], Callable[..., Any]]:
    return lambda _: function


def _bound(name: str, method: str) -> Callable[[Setting], Callable[..., Any]]:
    return lambda setting: getattr(_INSTANCES[name](setting), method)


def _targets(setting_type: dict[str, type]) -> Iterator[Target]:
    for function in _CALLABLES:
        yield Target(function.__qualname__, _itself(function), _parameters(function, False))
    for name, kind in setting_type.items():
        for base in kind.__mro__:
            if not base.__module__.startswith("aiocuda"):
                continue
            for method, value in vars(base).items():
                if not inspect.isfunction(value) or method in _LEFT_OUT:
                    continue
                if method.startswith("_") and method != "__getitem__":
                    continue
                yield Target(f"{name}.{method}", _bound(name, method), _parameters(value, True))


TARGETS = tuple(
    _targets(
        {
            "device": aiocuda.Device,
            "stream": aiocuda.Stream,
            "buffer": aiocuda.DeviceBuffer,
            "unified": aiocuda.UnifiedBuffer,
            "pinned": aiocuda.PinnedBuffer,
            "operation": aiocuda.Operation,
            "event": aiocuda.Event,
            "node": coordination.Node,
            "graph": aiocuda.Graph,
            "pool": aiocuda.StreamPool,
            "events": aiocuda.EventPool,
            "group": aiocuda.StreamGroup,
            "member": coordination.GroupStream,
            "barrier": aiocuda.StreamBarrier,
            "coordinator": aiocuda.AsyncCoordinator,
            "ring": aiocuda.TripleBuffer,
            "owner": aiocuda.TripleBuffer,
            "pipeline": aiocuda.Pipeline,
            "context": aiocuda.ManagedContext,
        }
    )
)
