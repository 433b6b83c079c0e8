"""A process in which another library and aiocuda exchange arrays, and which reports what came of it.

``python -m tests.memory.interchange_child LIBRARY ORDER``: LIBRARY is ``cupy`` or ``torch``; ORDER is ``before`` where
that has used the GPU before aiocuda was asked for a device, ``imported`` where it has only looked how many there are,
``after`` where it comes later. The array that is handed over is written after a held kernel and one that takes a while.
So an edge that is missing shows in the values; and if the host had waited, the held kernel would have ended by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import sys
import warnings
from typing import Any

import numpy as np

import aiocuda
from aiocuda import Device, Operation, Stream
from aiocuda._core import stream_operation
from aiocuda.testing import Latch
from tests.helpers import SPIN

ITEMS = 1 << 20
SPIN_NS = 200_000_000


class Cupy:
    """The operations with CuPy."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        cupy.cuda.runtime.getDeviceCount()  # `cuInit`, and no context

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def default(self) -> Any:
        return self.cupy.cuda.Stream.null

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        used: contextlib.AbstractContextManager[Any] = stream
        return used

    def external(self, handle: int) -> Any:
        return self.cupy.cuda.ExternalStream(handle)

    def full(self, value: int) -> Any:
        return self.cupy.full(ITEMS, value, self.cupy.int32)

    def fill(self, array: Any, value: int) -> None:
        array.fill(value)

    def plus(self, array: Any, value: int) -> Any:
        return array + value

    def take(self, buffer: Any) -> Any:
        return self.cupy.from_dlpack(buffer)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def seen(self, array: Any, stream: Any) -> Any:
        with self.on(stream):
            return self.cupy.asnumpy(array)


class Torch:
    """The operations with PyTorch."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.cuda.device_count()

    def stream(self) -> Any:
        return self.torch.cuda.Stream()

    def default(self) -> Any:
        return self.torch.cuda.default_stream()

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        used: contextlib.AbstractContextManager[Any] = self.torch.cuda.stream(stream)
        return used

    def external(self, handle: int) -> Any:
        return self.torch.cuda.ExternalStream(handle)

    def full(self, value: int) -> Any:
        return self.torch.full((ITEMS,), value, dtype=self.torch.int32, device="cuda")

    def fill(self, array: Any, value: int) -> None:
        array.fill_(value)

    def plus(self, array: Any, value: int) -> Any:
        return array + value

    def take(self, buffer: Any) -> Any:
        return self.torch.from_dlpack(buffer)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def seen(self, array: Any, stream: Any) -> Any:
        with self.on(stream):
            return array.cpu().numpy()


class Interfaced:
    """An array by its ``__cuda_array_interface__`` alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__cuda_array_interface__


class Checks:
    """The attempts, one after the other."""

    def __init__(self, library: Any, device: Device, stream: Stream, latch: Latch) -> None:
        self.library = library
        self.device = device
        self.stream = stream
        self.latch = latch
        self.told: dict[str, Any] = {}

    async def warm(self) -> None:
        """Load all code: that waits for the device, and would hide what is looked for."""
        await self.device.load(SPIN)
        await self.stream.launch(SPIN, 1, 1, 1000)
        self.latch.hold(self.stream)
        await self.latch.held()
        self.latch.release()
        side = self.library.stream()
        with self.library.on(side):
            array = self.library.plus(self.library.full(1), 1)
            self.library.fill(array, 2)
        self.library.seen(array, side)

    def delay(self, stream: Stream) -> Operation[None]:
        """Enqueue a kernel that runs until the latch is released, and one that takes a while; return the second."""
        self.latch.hold(stream)
        return stream.launch(SPIN, 1, 1, SPIN_NS)

    def nobody_waited(self, name: str, operation: Operation[Any]) -> None:
        """Check that an operation behind a held kernel is unfinished, and release the kernel."""
        self.told[f"{name}: nobody waited"] = self.running(operation)
        self.latch.release()

    def running(self, operation: Operation[Any]) -> bool:
        """Query the device. `Operation.done` is the state as last seen by the loop, which has not run since."""
        lease = stream_operation(operation).lease
        return lease is not None and not self.device.driver.event_query(lease.handle)

    def imported(self, stream: Any) -> Stream:
        return Stream.from_handle(self.device, self.library.handle(stream))

    async def ours_to_theirs(self, name: str, consumer: Any) -> None:
        stream, library = self.stream, self.library
        buffer = stream.empty(ITEMS, np.int32)
        await stream.fill(buffer, 1)
        self.delay(stream)
        filled = stream.fill(buffer, 7)
        with library.on(consumer):
            array = library.take(buffer)
            result = library.plus(array, 1)
        self.nobody_waited(name, filled)
        self.told[f"{name}: same memory"] = library.address(array) == buffer.address
        self.told[f"{name}: values"] = bool((library.seen(result, consumer) == 8).all())
        with library.on(consumer):
            library.fill(array, 3)
        stream.wait(self.imported(consumer))
        self.told[f"{name}: we see theirs"] = bool((await stream.download(buffer) == 3).all())

    async def theirs_to_ours(self, name: str, producer: Any, wrap: Any) -> None:
        stream, library = self.stream, self.library
        with library.on(producer):
            array = library.full(1)
            delayed = self.delay(self.imported(producer))
            library.fill(array, 5)
            ours = stream.adopt(wrap(array))
        async with self.device.stream() as third:
            elsewhere = third.download(ours)  # which is first to use it
            here = stream.download(ours)
            self.nobody_waited(name, delayed)
            self.told[f"{name}: same memory"] = library.address(array) == ours.address
            self.told[f"{name}: values"] = bool((await here == 5).all() and (await elsewhere == 5).all())
        await stream.fill(ours, 6)
        self.told[f"{name}: they see ours"] = bool((library.seen(array, producer) == 6).all())

    async def freed_under_them(self) -> None:
        """The pool does not reuse the memory while they hold it, and then only after what they have enqueued."""
        stream, library, memory = self.stream, self.library, self.device.memory
        await stream.synchronize()
        before = memory.statistics().live_bytes
        buffer = stream.empty(ITEMS, np.int32)
        stream.fill(buffer, 1)
        address = buffer.address
        side = library.stream()
        with library.on(side):
            array = library.take(buffer)
        buffer.free()
        canary = stream.empty(ITEMS, np.int32)
        self.told["freed under them: kept for them"] = canary.address != address
        canary.free()
        late = self.delay(self.imported(side))
        with library.on(side):
            library.fill(array, 9)
        del array
        gc.collect()
        for _ in range(2):
            stream.empty(1).free()  # each sweeps
        again = stream.empty(ITEMS, np.int32)
        stream.fill(again, 4)
        self.nobody_waited("freed under them", late)
        self.told["freed under them: canary"] = bool((await stream.download(again) == 4).all())
        await late
        self.told["freed under them: canary later"] = bool((await stream.download(again) == 4).all())
        again.free()
        await stream.synchronize()
        self.told["freed under them: all back"] = memory.statistics().live_bytes == before

    async def dropped_under_us(self) -> None:
        """Their pool has the memory back only when we are done with it."""
        stream, library = self.stream, self.library
        side = library.stream()
        with library.on(side):
            array = library.full(1)
            ours = stream.adopt(array)
        address = library.address(array)
        delayed = self.delay(stream)
        stream.fill(ours, 9)
        ours.free()
        del array, ours
        gc.collect()
        with library.on(side):
            canary = library.full(3)
        self.told["dropped under us: kept for us"] = library.address(canary) != address
        self.nobody_waited("dropped under us", delayed)
        await stream.synchronize()
        self.told["dropped under us: canary"] = bool((library.seen(canary, side) == 3).all())
        self.device.memory.sweep(stream._queue.reactor)
        with library.on(side):
            kept = [library.full(2) for _ in range(4)]
        self.told["dropped under us: goes back"] = address in [library.address(array) for array in kept]

    async def stream_dropped_first(self) -> None:
        """CuPy destroys a stream with its object. Ours is to be the last one, and an event is recorded there."""
        buffer = self.stream.empty(ITEMS, np.int32)
        await self.stream.fill(buffer, 1)
        side = self.library.stream()
        with self.library.on(side):
            array = self.library.take(buffer)
            self.library.fill(array, 2)
        del side
        gc.collect()
        buffer.free()
        del array
        gc.collect()
        for _ in range(2):
            self.stream.empty(1).free()
        await self.stream.synchronize()
        self.told["stream dropped first: alive"] = True

    async def one_stream_for_both(self) -> None:
        stream, library = self.stream, self.library
        buffer = stream.empty(ITEMS, np.int32)
        await stream.fill(buffer, 1)
        async with stream.lend() as handle:
            theirs = library.external(handle)
            stream.launch(SPIN, 1, 1, SPIN_NS // 10)
            stream.fill(buffer, 5)
            with library.on(theirs):
                array = library.take(buffer)
                library.fill(array, 6)
            del array
        self.told["lent: values"] = bool((await stream.download(buffer) == 6).all())
        side = library.stream()
        known = Stream.from_handle(self.device, side if hasattr(side, "__cuda_stream__") else library.handle(side))
        self.told["imported: handle"] = known.__cuda_stream__()[1] == library.handle(side)

    async def other_memory(self) -> None:
        library = self.library
        pinned = self.device.pinned(16, np.int32)
        pinned[:] = 4
        if isinstance(library, Torch):
            tensor = library.torch.from_dlpack(pinned)
            self.told["pinned: host memory"] = tensor.device.type == "cpu" and bool((tensor == 4).all())
            with contextlib.suppress(ImportError):
                import ml_dtypes

                narrow = library.torch.full((8,), 1.5, dtype=library.torch.bfloat16, device="cuda")
                ours = self.stream.adopt(narrow)
                self.told["bfloat16: dtype"] = ours.dtype == np.dtype(ml_dtypes.bfloat16)
                self.told["bfloat16: values"] = (await self.stream.download(ours)).tolist() == [1.5] * 8
                back = library.torch.from_dlpack(ours)
                self.told["bfloat16: back"] = back.dtype == library.torch.bfloat16
        else:
            managed = self.device.unified(16, np.int32)
            await self.stream.fill(managed, 4)
            array = library.cupy.from_dlpack(managed)
            self.told["managed: values"] = bool((library.cupy.asnumpy(array) == 4).all())
            strided = library.full(1)[::2]
            try:
                self.stream.adopt(strided)
            except aiocuda.InvalidArgumentError as error:
                self.told["strided: refused"] = "contiguous" in str(error)

    async def all(self) -> None:
        await self.warm()
        side, library = self.library.stream(), self.library
        await self.ours_to_theirs("to their default stream", library.default())
        await self.ours_to_theirs("to a side stream", side)
        await self.theirs_to_ours("from their default stream", library.default(), lambda array: array)
        await self.theirs_to_ours("from a side stream", side, lambda array: array)
        if isinstance(library, Cupy):  # PyTorch's interface names no stream
            await self.theirs_to_ours("by their interface", side, Interfaced)
            buffer = self.stream.empty(ITEMS, np.int32)
            self.stream.launch(SPIN, 1, 1, SPIN_NS // 10)
            self.stream.fill(buffer, 2)
            with library.on(side):
                array = library.cupy.asarray(Interfaced(buffer))
            self.told["by our interface: values"] = bool((library.seen(array, side) == 2).all())
        await self.freed_under_them()
        await self.dropped_under_us()
        await self.stream_dropped_first()
        await self.one_stream_for_both()
        await self.other_memory()


async def side_by_side(device: Device) -> float:
    """Three kernels of 0.1 s on each of 16 streams, all awaited: how many times as long as on one stream they take.

    As long, if as many queues are in force as are assumed. If not, the notifiers that are armed hold the queues that
    others need, and it takes twice as long or more.
    """
    streams = [device.stream() for _ in range(16)]
    seconds = []
    for used in (streams[:1], streams):
        begin = device.driver.now()
        await aiocuda.gather(*[stream.launch(SPIN, 1, 1, 100_000_000) for _ in range(3) for stream in used])
        seconds.append(device.driver.now() - begin)
    for stream in streams:
        await stream.aclose()
    return seconds[1] / seconds[0]


async def run(name: str, order: str) -> dict[str, Any]:
    """What came of it."""
    library: Any = None
    make = {"cupy": Cupy, "torch": Torch}[name]
    if order != "after":
        library = make()
    if order == "before":
        library.full(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device = await aiocuda.open_device(driver="cuda", policy="efficient")  # which parks: it needs the queues
    told: dict[str, Any] = {
        "queues": device.hardware_queues,
        "warnings": [str(warning.message) for warning in caught],
    }
    if library is None:
        library = make()
    async with device, device.stream() as stream:
        with Latch(device, seconds=60) as latch:
            checks = Checks(library, device, stream, latch)
            await checks.all()
        told["checks"] = checks.told
        told["times as long side by side"] = await side_by_side(device)
        del checks
        gc.collect()
    return told


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)
    print(json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2]))))  # noqa: T201 - its parent reads it
