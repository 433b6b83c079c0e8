"""ml_dtypes' bfloat16 is a dtype like others, on every way in and out but one, which has no word for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocuda import Device, Kernel, Stream, UnsupportedError
from aiocuda.memory.interchange import _array_interface
from tests.helpers import open_peer, quickly
from tests.memory.others import Producer

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed, `make` installs it")
pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("device", ["host"], indirect=True)  # tests on a GPU need no more than the library does
async def test_it_is_uploaded_filled_computed_and_handed_over(device: Device, stream: Stream, other: Stream) -> None:
    array = np.arange(6).astype(ml_dtypes.bfloat16)
    buffer = await stream.upload(array)
    assert buffer.dtype == array.dtype
    assert (await stream.download(buffer)).tolist() == array.tolist()
    adopted = other.adopt(Producer(buffer))
    assert (adopted.dtype, adopted.address) == (array.dtype, buffer.address)
    await other.fill(adopted, 1.5)
    assert (await stream.download(buffer)).tolist() == [1.5] * 6
    pinned = device.pinned(6, ml_dtypes.bfloat16)
    pinned[:] = 2
    assert (await stream.download(await stream.upload(pinned))).tolist() == [2.0] * 6


async def test_a_twin_computes_with_it() -> None:
    def double(data: Any, n: Any) -> None:
        data *= 2

    source = '#include <cuda_bf16.h>\nextern "C" __global__ void twice(__nv_bfloat16* data, int n) {}'
    async with open_peer() as (_, device), device.stream() as stream:
        buffer = await stream.upload(np.arange(4).astype(ml_dtypes.bfloat16))
        await quickly(stream.launch(Kernel("twice", source=source, host=double), 1, 1, buffer, 4))
        assert (await stream.download(buffer)).tolist() == [0.0, 2.0, 4.0, 6.0]


async def test_the_array_interface_has_no_word_for_it() -> None:
    with pytest.raises(UnsupportedError, match="DLPack has one for it"):
        _array_interface.write(4096, (2,), np.dtype(ml_dtypes.bfloat16), None)
