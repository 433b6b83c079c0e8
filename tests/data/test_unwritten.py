"""Fields that `decode` leaves unwritten: with ``check=True`` they are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda.data import DataLoader
from aiocuda.data._fields import PATTERNS, Layout, SampleDecoder
from aiocuda.driver.host import HostDriver
from tests.data.samples import (
    FIELDS,
    forgets_the_end_of_x,
    forgets_y,
    returns_a_value,
    returns_its_views,
    write,
    writes_patterns,
)

EXECUTORS = [
    pytest.param({}, id="one thread"),
    pytest.param({"workers": 3}, id="threads"),
    pytest.param({"workers": 2, "executor": "process"}, id="processes", marks=pytest.mark.slow),
]


async def load(decode: Any, options: dict[str, Any], *, check: bool | None) -> list[int]:
    async with (
        aiocuda.open_device(driver=HostDriver(), check=check) as device,
        DataLoader(device, range(6), fields=FIELDS, decode=decode, batch_size=2, **options) as loader,
    ):
        return [each async for batch in loader for each in (await batch.stream.download(batch["y"])).tolist()]


@pytest.mark.asyncio
@pytest.mark.parametrize("options", EXECUTORS)
@pytest.mark.parametrize(("decode", "field"), [(forgets_y, "y"), (forgets_the_end_of_x, "x")])
async def test_a_field_that_is_left_unwritten_is_found(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], decode: Any, field: str
) -> None:
    monkeypatch.setenv("AIOCUDA_CHECK", "1")
    with pytest.raises(
        ValueError, match=f"not written all of field '{field}' of sample 1: .* write each field"
    ) as caught:
        await load(decode, options, check=None)
    assert "at sample 1 of the loader's source" in caught.value.__notes__


@pytest.mark.asyncio
@pytest.mark.parametrize("options", EXECUTORS)
async def test_a_sample_with_an_unwritten_field_is_skipped_like_one_that_fails(options: dict[str, Any]) -> None:
    assert await load(forgets_y, {**options, "on_error": "skip"}, check=True) == [0, 2, 4]


@pytest.mark.asyncio
@pytest.mark.parametrize("options", EXECUTORS)
@pytest.mark.parametrize("decode", [write, writes_patterns])
async def test_what_decode_writes_is_delivered_whatever_it_is(options: dict[str, Any], decode: Any) -> None:
    found = await load(decode, options, check=True)
    assert found == await load(decode, options, check=False)
    assert len(found) == 6


@pytest.mark.asyncio
@pytest.mark.parametrize("options", EXECUTORS)
async def test_a_value_that_decode_returns_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"a value of type ndarray, and with fields= it writes into out: out\['x'\]"):
        await load(returns_a_value, options, check=False)


@pytest.mark.asyncio
@pytest.mark.parametrize("options", EXECUTORS)
async def test_decode_may_return_out_and_its_views(options: dict[str, Any]) -> None:
    assert await load(returns_its_views, options, check=False) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f2", "i4", "f8", "c16", "g", [("a", "u1"), ("b", "i8")]])
@pytest.mark.parametrize("shape", [(), (5,), (0,)])
def test_every_kind_of_field_is_checked(dtype: Any, shape: tuple[int, ...]) -> None:
    layout = Layout({"z": (shape, np.dtype(dtype))}, 2)
    arrays = layout.arrays(np.zeros(layout.nbytes, np.uint8))
    calls: list[Any] = []

    def decode(sample: Any, out: Any) -> None:
        calls.append(sample)
        if sample is not None:
            out["z"][...] = sample

    decoder = SampleDecoder(None, decode, checks=True)
    decoder.write(0, np.ones((), np.dtype(dtype)), layout.row(arrays, 1))
    assert len(calls) == 1
    if 0 not in shape:
        with pytest.raises(ValueError, match="field 'z' of sample 7"):
            decoder.write(7, None, layout.row(arrays, 1))
        assert len(calls) == 1 + len(PATTERNS)


def test_a_decoder_whose_values_are_random_is_not_taken_for_one_that_writes_nothing() -> None:
    layout = Layout({"z": ((3, 224, 224), np.dtype("u1"))}, 1)
    arrays = layout.arrays(np.zeros(layout.nbytes, np.uint8))
    random = np.random.default_rng(0)

    def decode(sample: Any, out: Any) -> None:
        out["z"][...] = random.integers(0, 256, out["z"].shape, np.uint8)

    decoder = SampleDecoder(None, decode, checks=True)
    for index in range(20):
        decoder.write(index, index, layout.row(arrays, 0))
