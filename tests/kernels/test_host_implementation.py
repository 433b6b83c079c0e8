"""Host implementations of kernels: what they may write and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiocuda import DeviceFault, Kernel
from tests.helpers import open_peer, quickly

pytestmark = pytest.mark.asyncio

SOURCE = "__global__ void shift(float* y, const float* x, int n);"


def naps(y: Any, x: Any, n: Any) -> Iterator[float]:
    yield 0.0
    y[:] = x + 1


def returning(value: Callable[[Any], object]) -> Callable[..., Any]:
    def naps(y: Any, x: Any, n: Any) -> Iterator[float]:
        y[:] = x + 1
        yield 0.0
        return value(y)  # type: ignore[return-value]  # that is what is tried

    return naps


async def run(host: Callable[..., object]) -> np.ndarray[Any, np.dtype[Any]]:
    async with open_peer() as (_, device):
        stream = device.stream()
        x, y = await stream.upload(np.zeros(4, np.float32)), await stream.upload(np.zeros(4, np.float32))
        await quickly(stream.launch(Kernel("shift", source=SOURCE, host=host), 1, 4, y, x, 4))
        result: np.ndarray[Any, np.dtype[Any]] = await stream.download(y)
        return result


@pytest.mark.parametrize(
    "host",
    [
        lambda y, x, n: np.add(x, 1, out=y),
        lambda y, x, n: np.add(x, 1, out=y)[: n - 1],
        lambda y, x, n: (np.add(x, 1, out=y), x + 1),
        lambda y, x, n: y.__iadd__(1),
        lambda y, x, n: [y.__iadd__(1), 3],
        naps,
        returning(lambda y: y),
    ],
)
async def test_a_host_implementation_writes_in_place(host: Callable[..., object]) -> None:
    assert (await run(host) == 1).all()


@pytest.mark.parametrize("host", [lambda y, x, n: x + 1, returning(lambda y: y + 1)])
async def test_returning_a_new_array_is_an_error(host: Callable[..., object]) -> None:
    with pytest.raises(DeviceFault, match=r"shift.*returned a new array of shape \(4,\) float32.*writes the arrays"):
        await run(host)


@pytest.mark.parametrize("host", [lambda y, x, n: x.fill(1), lambda y, x, n: np.add(x, 1, out=x)])
async def test_arrays_of_const_pointers_are_read_only(host: Callable[..., object]) -> None:
    with pytest.raises(DeviceFault, match=r"shift.*read-only"):
        await run(host)


async def test_another_shape_than_that_of_the_buffers_has_its_cure() -> None:
    with pytest.raises(DeviceFault, match=r"shift.*\(its arrays have the shapes of the buffers, and not of the grid\)"):
        await run(lambda y, x, n: np.copyto(y, x[:2]))


async def test_arrays_have_the_dtype_of_their_buffers() -> None:
    """Fields and all: a type string has none, and ml_dtypes' bfloat16 is two bytes of anything in one."""
    pair = np.dtype([("low", "u2"), ("high", "u2")])

    def swap(data: Any, n: Any) -> None:
        data["low"], data["high"] = data["high"].copy(), data["low"].copy()

    async with open_peer() as (_, device), device.stream() as stream:
        kernel = Kernel("swap", source="__global__ void swap(void* data, int n);", host=swap)
        buffer = await stream.upload(np.array([(1, 2), (3, 4)], pair))
        await quickly(stream.launch(kernel, 1, 1, buffer, 2))
        assert (await stream.download(buffer)).tolist() == [(2, 1), (4, 3)]
        pinned = device.pinned(2, pair)
        pinned[:] = [(5, 6), (7, 8)]
        await quickly(stream.launch(kernel, 1, 1, pinned, 2))
        assert np.asarray(pinned).tolist() == [(6, 5), (8, 7)]
