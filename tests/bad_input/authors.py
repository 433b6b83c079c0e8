"""Mistakes of authors of kernels and pipelines, with the error of each and words of its cure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

import aiocuda
from aiocuda import CompileError, InvalidTypeError
from aiocuda.testing import Latch
from tests.bad_input.newcomers import At, coordinated, enter_async

__all__ = ["AUTHORS"]

AIOCUDA: Any = aiocuda  # untyped, as all that follows, because a type checker refuses the mistakes
LATCH: Any = Latch

AWAIT = "and not its result: await it first, and use its result"


async def coroutine_function(*args: Any) -> None:
    raise AssertionError("it was called")


def fills(slot: Any) -> Any:
    return slot.stream.fill(slot.buffer("x", 4), 1)


async def piped(at: At, call: Callable[[Any], Any]) -> Any:
    """Return the result of a call with a pipeline, which may be a coroutine."""
    async with AIOCUDA.Pipeline(at.device, [AIOCUDA.Stage("fill", fills)]) as pipeline:
        result = call(pipeline)
        return await result if inspect.iscoroutine(result) else result


async def ticketed(at: At, call: Callable[[Any], Any]) -> Any:
    async def submits(pipeline: Any) -> Any:
        return call(await pipeline.submit(1))

    return await piped(at, submits)


def noded(at: At, call: Callable[[Any], Any]) -> Any:
    return coordinated(at, lambda coordinator: call(coordinator.download(at.buffer)))


def returns(kind: str) -> Any:
    return AIOCUDA.Kernel("f", source=f'extern "C" __global__ {kind} f(float* x) {{}}', host=lambda x: None)


RESULTS: dict[str, Callable[[Any], Any]] = {
    "[:3]": lambda thing: thing[:3],
    "+ 1": lambda thing: thing + 1,
    "for": list,
    "float()": float,
    "np.asarray()": np.asarray,
}

#: (the mistake, the class of the error, words of the cure)
AUTHORS: dict[str, tuple[Callable[[At], object], type[Exception], str]] = {
    **{
        f"{name} {used}": (lambda at, of=of, use=use: of(at, use), InvalidTypeError, AWAIT)
        for name, of in (("ticket", ticketed), ("node", noded))
        for used, use in RESULTS.items()
    },
    "ticket.shape": (lambda at: ticketed(at, lambda ticket: ticket.shape), AttributeError, "await it first"),
    "ticket.get()": (lambda at: ticketed(at, lambda ticket: ticket.get()), AttributeError, "`await ticket`"),
    "node.sum()": (
        lambda at: noded(at, lambda node: node.sum()),
        AttributeError,
        "await it first, and use its",
    ),
    "Latch(stream)": (lambda at: LATCH(at.stream), InvalidTypeError, "Latch(device), not Stream"),
    "latch.hold()": (lambda at: LATCH(at.device).hold(), InvalidTypeError, "latch.hold(stream), not NoneType"),
    "latch.hold(x)": (lambda at: LATCH(at.device).hold(at.buffer), InvalidTypeError, "latch.hold(stream), not DeviceB"),
    "async with Latch()": (lambda at: enter_async(LATCH(at.device)), InvalidTypeError, "`with Latch(device) as latch`"),
    "add_callback(async_fn)": (
        lambda at: at.stream.add_callback(coroutine_function),
        InvalidTypeError,
        "is a coroutine function: create a task",
    ),
    "offload(async_fn)": (
        lambda at: at.device.offload(coroutine_function),
        InvalidTypeError,
        "is a coroutine function: await it here",
    ),
    "__global__ int": (lambda at: returns("int"), CompileError, "a `__global__` function returns void"),
    "__global__ unsigned long": (lambda at: returns("unsigned  long"), CompileError, "kernel 'f' returns long: a"),
}
