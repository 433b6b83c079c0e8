"""Names that programs look for in a module: those of other libraries, and of other designs. `lacking` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["MODULE_CURES"]

#: For each module: names that it lacks, separated by spaces, and what to use in their place.
_CURES: Final[Mapping[str, Mapping[str, str]]] = {
    "aiocuda": {
        "Batcher batch": "`from aiocuda.serving import MicroBatcher`",
        "MemoryPool": "each device has one, device.memory; stream.empty(shape, dtype) makes buffers in it",
        "Program RawKernel RawModule SourceModule ElementwiseKernel jit kernel compile": "aiocuda.Kernel(name, "
        "source=…, host=function)",
        "CudaError CUDAError": "aiocuda.AiocudaError is the base class of all errors; aiocuda.errors has the others",
        "Barrier": "it is called aiocuda.StreamBarrier",
        "CUDAGraph": "`async with stream.capture() as graph` records one",
        "Coordinator": "it is called aiocuda.AsyncCoordinator",
        "PipelineStage stage": "it is called aiocuda.Stage: Stage(name, function)",
        "Pool": "aiocuda.StreamPool lends streams, and aiocuda.EventPool events",
        "Profiler profile": "`from aiocuda.observe import StreamProfiler`, and Timeline",
        "Semaphore": "asyncio.Semaphore is one for tasks; stream.wait(event) orders streams",
        "array asarray": "`await stream.upload(array)` makes a buffer of an array",
        "get_elapsed_time": "start.elapsed_ms(end) is the time between two of stream.record(timing=True)",
        "is_available": "`aiocuda doctor` says whether CUDA can be used; open_device() falls back to the host driver",
        "managed_array": "device.unified(shape, dtype) makes managed memory",
        "memory_allocated": "device.memory.statistics() has the figures",
        "on": "`from aiocuda.integrations import torch` has torch.on(stream), and so has cupy",
        "open": "`async with aiocuda.open_device() as device`",
        "pinned": "device.pinned(shape, dtype) makes page-locked memory",
        "run": "asyncio.run(main()) runs a program",
        "set_device": "no device is current: `async with aiocuda.open_device(0) as device`",
        "submit": "stream.submit(function); `from aiocuda.integrations import torch` has torch.submit(stream, …)",
        "timeout wait_for": "`async with asyncio.timeout(seconds)` limits any await",
        "cuda": "`async with aiocuda.open_device() as device` opens a GPU",
        "current_stream get_current_stream": "each call is a method of its stream, as device.stream() makes one",
        "empty zeros": "stream.empty(shape, dtype) and stream.zeros(shape, dtype) make buffers",
        "launch": "stream.launch(kernel, grid, block, *arguments)",
        "synchronize": "`await stream.synchronize()` for one stream, `await device.drain()` for all",
    },
    "aiocuda.serving": {
        "Batcher batch": "MicroBatcher(infer, max_batch_size=32) calls a function with batches",
        "CancelOnDisconnect cancel_on_disconnect error_responses health lifespan ready": "aiocuda.serving.asgi has it",
        "Lifespan": "it is aiocuda.serving.asgi.lifespan",
        "Overloaded": "it is called OverloadedError",
    },
    "aiocuda.serving.asgi": {
        "Lifespan": "it is called lifespan",
        "healthcheck healthz liveness": "it is called health",
        "readiness readyz": "it is called ready",
        "ErrorResponses": "it is called error_responses",
    },
}

#: For each module: names that it lacks, and what to use in their place.
MODULE_CURES: Final[Mapping[str, Mapping[str, str]]] = {
    module: {name: cure for names, cure in cures.items() for name in names.split()} for module, cures in _CURES.items()
}
