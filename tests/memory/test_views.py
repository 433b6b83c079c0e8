"""Views of buffers, and copies between them, against NumPy: shapes, dtypes and indices that Hypothesis makes."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

import aiocuda
from aiocuda import DeviceBuffer, InvalidArgumentError, Stream

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

pytestmark = pytest.mark.slow

Array: TypeAlias = npt.NDArray[Any]

#: Runs a coroutine function with a stream.
Run: TypeAlias = Callable[[Callable[[Stream], Coroutine[Any, Any, None]]], None]

QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SHAPES = nps.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
DTYPES = st.sampled_from([np.dtype(code) for code in "?bHiQefdFD"])


@pytest.fixture(scope="module")
def on_stream() -> Iterator[Run]:
    """One device and one event loop for all examples."""

    async def begin() -> tuple[aiocuda.Device, Stream]:
        device = await aiocuda.open_device(driver="host")
        return device, device.stream()

    with asyncio.Runner() as runner:
        device, stream = runner.run(begin())
        yield lambda test: runner.run(test(stream))
        runner.run(device.aclose())


def cases(values: Iterable[dict[str, Any]]) -> Callable[[Any], Any]:
    """An example of each."""

    def add(test: Any) -> Any:
        for value in values:
            test = example(**value)(test)
        return test

    return add


def numbered(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array in which no two rows are equal."""
    nbytes = math.prod(shape) * dtype.itemsize
    return (np.arange(nbytes) % 251).astype(np.uint8).view(dtype).reshape(shape)


async def check_equal(stream: Stream, buffer: DeviceBuffer, expected: Array) -> None:
    """Shape, dtype and bytes: a number may be no number."""
    found = await stream.download(buffer)
    assert (buffer.shape, buffer.dtype) == (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert all(type(extent) is int for extent in buffer.shape)
    assert found.tobytes() == expected.tobytes()


# -- slices ----------------------------------------------------------------------------------------------------------


@st.composite
def contiguous(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Integers, a slice of the next dimension, and all of the others."""
    leading = draw(st.integers(0, len(shape)))
    extents = itertools.takewhile(bool, shape[:leading])
    index: list[Any] = [draw(st.integers(-extent, extent - 1)) for extent in extents]
    if len(index) < len(shape):
        bound = st.none() | st.integers(-7, 7)
        index.append(slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1]))))
    if draw(st.booleans()):
        index.append(Ellipsis)
    return tuple(index)


@st.composite
def indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = draw(SHAPES)
    return shape, draw(contiguous(shape) | nps.basic_indices(shape, allow_newaxis=False))


@QUICK
@given(shape_and_index=indexed(), dtype=DTYPES)
@cases(
    {"shape_and_index": ((4, 5, 6), index), "dtype": np.dtype(np.int16)}
    for index in (
        np.s_[3], np.s_[-1], np.int64(2), np.s_[:], np.s_[1:3], np.s_[-2:], np.s_[5:2], np.s_[2:2], np.s_[:100],
        ..., (), (1,), np.s_[1, 2], np.s_[1, 2, 3], np.s_[1, 1:3], np.s_[1:3, :], np.s_[1:2, 2:5], (...,),
        np.s_[0, ...], np.s_[0, 1, 2:6], np.s_[0:1, 1:2, 2:5], np.s_[2:2, 1:3], np.s_[1:3, 2:2],
        np.s_[::2], np.s_[::-1], np.s_[:, 0], np.s_[0:2, 0:2],
    )
)  # fmt: skip
def test_slice_is_numpys_view_or_is_refused(
    on_stream: Run, shape_and_index: tuple[tuple[int, ...], Any], dtype: np.dtype[Any]
) -> None:
    shape, index = shape_and_index
    array = numbered(shape, dtype)
    parts = index if isinstance(index, tuple) else (index,)
    part = array[index if any(each is Ellipsis for each in parts) else (*parts, ...)]  # a view, and never a scalar
    has_steps = any(isinstance(each, slice) and each.step not in (None, 1) for each in parts)

    async def check(stream: Stream) -> None:
        buffer = await stream.upload(array)
        if has_steps or not part.flags.c_contiguous:
            with pytest.raises(InvalidArgumentError, match=r"must have step 1|is not contiguous"):
                buffer[index]
            return
        view = buffer[index]
        await check_equal(stream, view, part)
        await stream.fill(view, np.ones((), dtype)[()])
        array[index] = 1
        await check_equal(stream, buffer, array)

    on_stream(check)


# -- reshape and view ------------------------------------------------------------------------------------------------


@st.composite
def shapes_of_one_size(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two groupings of the same factors; an extent of the second one may be -1."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 5]), max_size=4))

    def group(factors: list[int]) -> list[int]:
        ends = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=3)))
        return [math.prod(factors[begin:end]) for begin, end in itertools.pairwise([0, *ends, len(factors)])]

    shape, wanted = group(factors), group(draw(st.permutations(factors)))
    if draw(st.booleans()):
        wanted[draw(st.integers(0, len(wanted) - 1))] = draw(st.integers(-1, 7))
    return tuple(shape), tuple(wanted)


@QUICK
@given(shapes=shapes_of_one_size() | st.tuples(SHAPES, SHAPES), dtype=DTYPES)
@cases(
    {"shapes": ((4, 6), wanted), "dtype": np.dtype(np.int32)}
    for wanted in ((6, 4), (24,), 24, (2, 3, 4), (-1,), -1, (2, -1), (1, 24, 1), (np.int64(6), 4), (5, 5), (-1, -1), 25)
)
@cases({"shapes": shapes, "dtype": np.dtype(np.int32)} for shapes in (((0, 6), (3, 0)), ((1,), ()), ((24,), (-2, -12))))
def test_reshape_is_numpys(on_stream: Run, shapes: tuple[tuple[int, ...], Any], dtype: np.dtype[Any]) -> None:
    shape, wanted = shapes
    array = numbered(shape, dtype)

    async def check(stream: Stream) -> None:
        buffer = await stream.upload(array)
        try:
            expected = array.reshape(wanted)
        except ValueError:
            with pytest.raises(InvalidArgumentError, match=f"{array.size} items"):
                buffer.reshape(wanted)
        else:
            await check_equal(stream, buffer.reshape(wanted), expected)

    on_stream(check)


@QUICK
@given(shape=SHAPES, dtype=DTYPES, other=DTYPES)
@cases(
    {"shape": (3, 4), "dtype": np.dtype(np.float32), "other": np.dtype(other)}
    for other in (np.uint8, np.int32, np.complex64, np.float64)
)
@example(shape=(2, 3), dtype=np.dtype(np.float32), other=np.dtype(np.complex64))
@example(shape=(), dtype=np.dtype(np.float32), other=np.dtype(np.int32))
def test_view_as_another_dtype_is_numpys(
    on_stream: Run, shape: tuple[int, ...], dtype: np.dtype[Any], other: np.dtype[Any]
) -> None:
    array = numbered(shape, dtype)

    async def check(stream: Stream) -> None:
        buffer = await stream.upload(array)
        try:
            expected = array.view(other) if shape else None
        except ValueError:
            expected = None
        if expected is None:
            with pytest.raises(InvalidArgumentError, match=r"no whole number|0-d"):
                buffer.view(other)
        else:
            await check_equal(stream, buffer.view(other), expected)

    on_stream(check)


# -- copies ----------------------------------------------------------------------------------------------------------

ROWS = 20

#: Source, target, their first rows, and the number of rows. The third array is on the host.
COPIES = st.lists(
    st.tuples(
        st.permutations(range(3)), st.integers(0, ROWS), st.integers(0, ROWS), st.integers(0, ROWS)
    ),
    max_size=12,
)  # fmt: skip


@QUICK
@given(row=nps.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4), dtype=DTYPES, copies=COPIES)
@example(row=(), dtype=np.dtype(np.uint8), copies=[([2, 0, 1], 0, 0, ROWS), ([0, 1, 2], 3, 5, 1), ([1, 2, 0], 5, 0, 1)])
def test_copies_of_parts_are_numpys(
    on_stream: Run, row: tuple[int, ...], dtype: np.dtype[Any], copies: list[tuple[list[int], int, int, int]]
) -> None:
    expected = [numbered((ROWS + at, *row), dtype)[at:].copy() for at in range(3)]

    async def check(stream: Stream) -> None:
        host = expected[2].copy()
        places: list[Any] = [await stream.upload(expected[0]), await stream.upload(expected[1]), host]
        for (source, target, _), begin, at, rows in copies:
            count = min(rows, ROWS - begin, ROWS - at)
            expected[target][at : at + count] = expected[source][begin : begin + count]
            copied = stream.copy(places[target][at : at + count], places[source][begin : begin + count])
            if 2 in (source, target):
                await copied  # the program may use the host's memory again
        for buffer, array in zip(places[:2], expected, strict=False):
            await check_equal(stream, buffer, array)
        assert host.tobytes() == expected[2].tobytes()

    on_stream(check)
