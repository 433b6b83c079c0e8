"""A process in which another library uses a stream of aiocuda after the stream was closed. It prints the result.

`main` prints one line of JSON: each check by its name, and whether it passed. `test_beside_torch.py` runs each case in
a fork of a process that has imported the library.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import aiocuda
from aiocuda import Device, Stream

ITEMS = 1 << 20

#: What lives until the interpreter's exit.
left_for_the_exit: list[Any] = []

Told = dict[str, bool]


def open_cuda() -> Any:
    return aiocuda.open_device(driver="cuda")


def on(handle: int) -> Any:
    """PyTorch's object for a stream of aiocuda."""
    import torch

    return torch.cuda.ExternalStream(handle)


def copy_up(handle: int, value: int) -> tuple[Any, Any]:
    """A pinned tensor, and a tensor on the GPU to which it is copied on a stream of aiocuda, without a wait."""
    import torch

    pinned = torch.full((ITEMS,), value, dtype=torch.int32, pin_memory=True)
    with torch.cuda.stream(on(handle)):
        target = torch.empty(ITEMS, dtype=torch.int32, device="cuda")
        target.copy_(pinned, non_blocking=True)
    return pinned, target


def is_full(tensor: Any, value: int) -> bool:
    return bool((tensor == value).all().item())


def use_pinned_memory() -> bool:
    """PyTorch's host allocator looks at its events, and hands its blocks out again."""
    import torch

    for round_ in range(3):
        pinned = torch.full((ITEMS,), round_, dtype=torch.int32, pin_memory=True)
        if not is_full(pinned.to("cuda", non_blocking=True), round_):
            return False
        del pinned
    gc.collect()
    torch.cuda.synchronize()
    return True


async def pinned_freed_after_the_stream() -> Told:
    async with open_cuda() as device:
        async with device.stream() as stream, stream.lend() as handle:
            pinned, target = copy_up(handle, 7)
        told = {"copied": is_full(target, 7)}
        del pinned
        gc.collect()
        told["pinned memory"] = use_pinned_memory()
        async with device.stream() as again:
            told["serves again"] = device.driver.stream_has_handle(again._queue.handle, handle)
            buffer = again.empty(ITEMS, np.int32)
            again.fill(buffer, 3)
            told["values"] = bool((await again.download(buffer) == 3).all())
    return told


async def pinned_freed_after_the_device() -> Told:
    async with open_cuda() as device, device.stream() as stream, stream.lend() as handle:
        pinned, target = copy_up(handle, 7)
    told = {"copied": is_full(target, 7)}
    del pinned
    gc.collect()
    told["pinned memory"] = use_pinned_memory()
    return told


async def pinned_freed_after_the_loop() -> Told:
    """By the interpreter's exit, in whatever order that takes place."""
    async with open_cuda() as device, device.stream() as stream, stream.lend() as handle:
        left_for_the_exit.extend(copy_up(handle, 7))
    return {"copied": is_full(left_for_the_exit[1], 7)}


async def pinned_freed_while_the_device_stays_open_at_exit() -> Told:
    device = await open_cuda()
    stream = device.stream()
    left_for_the_exit.extend((device, stream, *copy_up(stream.__cuda_stream__()[1], 7)))
    await stream.synchronize()
    return {"copied": is_full(left_for_the_exit[-1], 7)}


async def device_tensors() -> Told:
    """Their blocks belong to the stream on which they were allocated."""
    import torch

    told = {}
    async with open_cuda() as device:
        async with device.stream() as stream, stream.lend() as handle:
            _, first = copy_up(handle, 1)
            _, second = copy_up(handle, 2)
        told["first"] = is_full(first, 1)
        del first
        gc.collect()
        torch.cuda.empty_cache()
    told["second"] = is_full(second, 2)
    with torch.cuda.stream(on(handle)):  # PyTorch's own use of it goes on
        second.add_(1)
        third = torch.empty(ITEMS, dtype=torch.int32, device="cuda").fill_(9)
    torch.cuda.synchronize()
    told["used after the device"] = is_full(second, 3) and is_full(third, 9)
    del second, third
    gc.collect()
    torch.cuda.empty_cache()
    return told


async def record_stream() -> Told:
    """PyTorch's allocator records an event on each recorded stream when the tensor is freed."""
    import torch

    told = {}
    async with open_cuda() as device:
        tensors = [torch.full((ITEMS,), value, dtype=torch.int32, device="cuda") for value in range(3)]
        torch.cuda.synchronize()
        async with device.stream() as stream, stream.lend() as handle:
            theirs = on(handle)
            with torch.cuda.stream(theirs):
                for tensor in tensors:
                    tensor.add_(10)
                    tensor.record_stream(theirs)
        told["values"] = all(is_full(tensor, 10 + value) for value, tensor in enumerate(tensors))
        del tensor, tensors[0]  # after the stream
        gc.collect()
    del tensors[0]  # after the device
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    told["the last one"] = is_full(tensors[0], 12)
    left_for_the_exit.extend(tensors)
    return told


async def imported_stream() -> Told:
    """A stream of PyTorch's is PyTorch's to the end."""
    import torch

    theirs = torch.cuda.Stream()
    told = {}
    async with open_cuda() as device, device.stream() as own:
        before = device.driver.statistics()
        stream = Stream.from_handle(device, theirs.cuda_stream)
        with torch.cuda.stream(theirs):
            pinned = torch.full((ITEMS,), 4, dtype=torch.int32, pin_memory=True)
            tensor = torch.empty(ITEMS, dtype=torch.int32, device="cuda")
            tensor.copy_(pinned, non_blocking=True)
        ours = stream.adopt(tensor)
        stream.fill(ours, 5)
        own.wait(stream)
        told["in order"] = bool((await own.download(ours) == 5).all())
        ours.free()
        await stream.aclose()
        told["not kept"] = device.driver.statistics()["streams_kept"] == before["streams_kept"]
        del pinned
        gc.collect()
        told["after the stream"] = use_pinned_memory()
    with torch.cuda.stream(theirs):
        tensor.add_(1)
    theirs.synchronize()
    told["after the device"] = is_full(tensor, 6)
    return told


async def graph_replayed_after_the_device() -> Told:
    """A graph of PyTorch's, captured on a lent stream, is PyTorch's to replay on any stream."""
    import torch

    tensor = torch.zeros(ITEMS, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    told = {}
    async with open_cuda() as device:
        async with device.stream() as stream:
            async with stream.lend() as handle:
                theirs = on(handle)
                with torch.cuda.stream(theirs):
                    tensor.add_(1)  # loads its code
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=theirs):
                    tensor.add_(10)
                graph.replay()
                torch.cuda.synchronize()
                told["captured and replayed"] = is_full(tensor, 11)
        graph.replay()
        torch.cuda.synchronize()
        told["after the stream"] = is_full(tensor, 21)
    graph.replay()
    torch.cuda.synchronize()
    told["after the device"] = is_full(tensor, 31)
    with torch.cuda.stream(on(handle)):
        graph.replay()
    torch.cuda.synchronize()
    told["on the stream itself"] = is_full(tensor, 41)
    async with open_cuda() as device, device.stream() as stream:
        graph.replay()
        torch.cuda.synchronize()
        await stream.synchronize()
    told["beside another device"] = is_full(tensor, 51)
    return told


async def captured_stream_does_not_serve() -> Told:
    """PyTorch captures a closed stream of aiocuda: the capture is not disturbed, and the stream is not used again."""
    import torch

    tensor = torch.zeros(ITEMS, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    told = {}
    async with open_cuda() as device:
        async with device.stream() as first, device.stream() as second:
            handle, other = first.__cuda_stream__()[1], second.__cuda_stream__()[1]
            theirs = on(handle)
            with torch.cuda.stream(theirs):
                tensor.add_(1)
            torch.cuda.synchronize()
            await first.aclose()  # in this order: so it is the first one to be asked
        with torch.cuda.graph(graph, stream=theirs):
            tensor.add_(10)
            opened = device.stream()
            tensor.add_(100)
        told["another one serves"] = device.driver.stream_has_handle(opened._queue.handle, other)
        graph.replay()
        torch.cuda.synchronize()
        told["captured"] = is_full(tensor, 111)
        await opened.aclose()
    return told


async def torch_before_between_and_after() -> Told:
    import torch

    early = torch.full((ITEMS,), 1, dtype=torch.int32, device="cuda")
    kept = []
    told = {}
    for round_ in range(3):
        async with open_cuda() as device:
            created = device.driver.statistics()["streams_created"]
            async with device.stream() as stream, stream.lend() as handle:
                kept.append(copy_up(handle, round_))
            made = device.driver.statistics()["streams_created"] - created
            told[f"device {round_}: streams"] = made == (round_ == 0)
        early.add_(1)
        told[f"between {round_}"] = is_full(early, 2 + round_)
    told["values"] = all(is_full(target, round_) for round_, (_, target) in enumerate(kept))
    kept.clear()
    gc.collect()
    told["after"] = use_pinned_memory()
    torch.cuda.empty_cache()
    return told


def to_gpu(pinned: Any) -> Any:
    return pinned.to("cuda", non_blocking=True)


async def submitted_and_pinned_memory_freed_after_the_device() -> Told:
    import torch

    from aiocuda.integrations import torch as ours

    async with open_cuda() as device:
        async with device.stream() as stream:
            pinned = torch.full((ITEMS,), 7, dtype=torch.int32, pin_memory=True)
            target = await ours.submit(stream, to_gpu, pinned)
        told = {"copied": is_full(target, 7)}
        second = torch.full((ITEMS,), 8, dtype=torch.int32, pin_memory=True)
        async with device.stream() as stream:
            left_for_the_exit.append(await ours.submit(stream, to_gpu, second))
        del pinned
        gc.collect()
        told["after the stream"] = use_pinned_memory()
    del second
    gc.collect()
    told["after the device"] = use_pinned_memory() and is_full(left_for_the_exit[0], 8)
    return told


async def submitted_results_used_after_the_device() -> Told:
    import torch

    from aiocuda.integrations import torch as ours

    def make(value: int) -> Any:
        return torch.full((ITEMS,), value, dtype=torch.int32, device="cuda")

    async with open_cuda() as device:
        async with device.stream() as stream:
            first, second, third = [await ours.submit(stream, make, value) for value in range(3)]
        told = {"after the stream": is_full(first, 0)}
        del first
        gc.collect()
        torch.cuda.empty_cache()
    second.add_(10)
    told["after the device"] = is_full(second, 11)
    del second
    gc.collect()
    torch.cuda.empty_cache()
    told["the last one"] = is_full(third, 2)
    left_for_the_exit.append(third)
    return told


async def coroutine_on_a_stream_that_is_closed() -> Told:
    import torch

    from aiocuda.integrations import torch as ours

    async with open_cuda() as device:
        stream = device.stream()

        @ours.on(stream)
        async def work() -> Any:
            x = torch.full((ITEMS,), 3, dtype=torch.int32, device="cuda")
            await stream.aclose()
            x.add_(1)  # on the stream, which is PyTorch's, too
            return x

        x = await work()
    torch.cuda.synchronize()
    told = {"used after the close": is_full(x, 4), "default again": torch.cuda.current_stream().cuda_stream == 0}
    del x
    gc.collect()
    torch.cuda.empty_cache()
    told["after the device"] = use_pinned_memory()
    return told


async def graph_replayed_by_name_and_after_the_device() -> Told:
    import torch

    from aiocuda.integrations import torch as ours

    tensor = torch.zeros(ITEMS, dtype=torch.int32, device="cuda")
    tensor.add_(1)  # loads its code
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tensor.add_(10)
    async with open_cuda() as device, device.stream() as stream:
        await ours.replay(stream, graph)
        told = {"replayed": is_full(tensor, 11)}
    graph.replay()
    torch.cuda.synchronize()
    told["after the device"] = is_full(tensor, 21)
    return told


async def ten_thousand_loans() -> Told:
    async def lend(device: Device) -> None:
        async with device.stream() as stream, stream.lend():
            pass

    async with open_cuda() as device:
        await lend(device)
        made = device.statistics().streams_created
        for _ in range(10_000):
            await lend(device)
        counts = device.statistics()
        return {"one stream": made == counts.streams_created == 1, "none open": counts.streams == 0}


async def cupy_arrays() -> Told:
    """CuPy's arrays of a stream that has been closed."""
    import cupy

    told = {}
    async with open_cuda() as device:
        async with device.stream() as stream, stream.lend() as handle:
            with cupy.cuda.ExternalStream(handle):
                array = cupy.full(ITEMS, 6, cupy.int32)
                again = array + 1
        told["after the stream"] = bool((cupy.asnumpy(array) == 6).all())
        del array
    told["after the device"] = bool((cupy.asnumpy(again) == 7).all())
    with cupy.cuda.ExternalStream(handle) as theirs:
        again += 1
        theirs.record().synchronize()
    told["used after the device"] = bool((cupy.asnumpy(again) == 8).all())
    del again
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    return told


#: By library and name.
CASES: dict[str, dict[str, Callable[[], Awaitable[Told]]]] = {
    library: {case.__name__: case for case in cases}
    for library, cases in {
        "torch": (
            *(pinned_freed_after_the_stream, pinned_freed_after_the_device, pinned_freed_after_the_loop),
            *(pinned_freed_while_the_device_stays_open_at_exit, device_tensors, record_stream, imported_stream),
            *(graph_replayed_after_the_device, captured_stream_does_not_serve, torch_before_between_and_after),
            *(submitted_and_pinned_memory_freed_after_the_device, submitted_results_used_after_the_device),
            *(coroutine_on_a_stream_that_is_closed, graph_replayed_by_name_and_after_the_device),
        ),
        "cupy": (cupy_arrays,),
        "aiocuda": (ten_thousand_loans,),
    }.items()
}


async def run(case: str) -> Told:
    (chosen,) = [cases[case] for cases in CASES.values() if case in cases]
    return await chosen()


def main(case: str) -> None:
    """Run a case, and print its result."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(90, exit=True)
    print(json.dumps(asyncio.run(run(case))), flush=True)  # noqa: T201 - its parent reads it
