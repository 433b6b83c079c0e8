"""The data loader on the host driver: sources, batches, errors, life time, state."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import io
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    DeviceFault,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    Stream,
)
from aiocuda.data import Batch, DataLoader, Shuffle, _upload
from aiocuda.data._resources import LEAST_SECONDS
from aiocuda.data._typed import LoaderKeywords
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Program, Span
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.lowlevel import pinned_block_of
from tests.data.samples import FIELDS, arrays, refuses_fives, write
from tests.helpers import LATCH, PATIENCE, TRAP, Peer, Reports, open_peer, quickly, turns, until

pytestmark = pytest.mark.asyncio


async def values(batch: Batch, field: Any = "y") -> list[Any]:
    found: list[Any] = (await batch.stream.download(batch[field])).tolist()
    return found


async def everything(loader: DataLoader, epoch: int | None = None, field: Any = "y") -> list[list[Any]]:
    batches = aiter(loader) if epoch is None else loader.epoch(epoch)
    return [await values(batch, field) async for batch in batches]


def doubled(*batches: list[int]) -> list[list[int]]:
    return [[2 * sample for sample in batch] for batch in batches]


# -- sources and batches ---------------------------------------------------------------------------------------------


def generator(length: int) -> Iterator[int]:
    yield from range(length)


async def agenerator(length: int) -> AsyncIterator[int]:
    for number in range(length):
        await asyncio.sleep(0)
        yield number


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("fields", [FIELDS, None])
@pytest.mark.parametrize("source", [range(7), list(range(7)), generator, agenerator, set(range(7))])
async def test_every_source_in_batches(device: Device, source: Any, fields: Any, workers: int) -> None:
    made = source(7) if callable(source) else source
    async with DataLoader(
        device, made, fields=fields, decode=write if fields else arrays, batch_size=3, workers=workers
    ) as loader:
        batches = [(batch.number, batch.indices, await values(batch)) async for batch in loader]
    assert batches == [(0, (0, 1, 2), [0, 2, 4]), (1, (3, 4, 5), [6, 8, 10]), (2, (6,), [12])]


async def test_few_slots_are_page_locked_at_a_time() -> None:
    """The driver locks them one after the other, so the first batch would wait for all."""
    nbytes = 1 << 17
    gate = threading.Event()
    locked: list[int] = []

    def pin(address: int, size: int) -> None:
        if size == nbytes:
            locked.append(address)
            gate.wait(LATCH)

    def fill(sample: int, out: Any) -> None:
        out["x"][...] = sample

    async with open_peer() as (peer, device):
        peer.before["pin"] = pin
        fields = {"x": ((nbytes,), np.uint8)}
        async with DataLoader(device, range(12), fields=fields, decode=fill, prefetch=5) as loader:
            batches = aiter(loader)
            first = asyncio.ensure_future(anext(batches))
            await until(lambda: len(locked) == 2, "two slots to be locked")
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(locked) == 2
            gate.set()
            assert (await quickly(first)).number == 0
            assert [(await values(batch, "x"))[0][0] async for batch in batches] == list(range(1, 12))
            assert len(locked) == 5


async def test_a_slot_that_is_page_locked_at_once_changes_no_order(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of each slot is locked between the loader's question and the call-back."""

    def asked(array: Any) -> Any:
        block = pinned_block_of(array)
        assert block is not None
        locked = threading.Event()
        if block.region is not None:
            block.region.when_locked(locked.set)
            assert locked.wait(PATIENCE)
        return block

    monkeypatch.setattr(_upload, "pinned_block_of", asked)
    async with DataLoader(device, range(20), fields=FIELDS, decode=write, batch_size=2, prefetch=6) as loader:
        assert [batch.indices async for batch in loader] == [(at, at + 1) for at in range(0, 20, 2)]


def replaces_the_view(sample: int, out: Any) -> None:
    out["x"] = np.zeros((2, 3), np.float32)


def updates_the_views(sample: int, out: Any) -> None:
    out.update({"x": np.zeros((2, 3), np.float32)})


def merges_into_the_views(sample: int, out: Any) -> None:
    out |= {"x": np.zeros((2, 3), np.float32)}


def sets_an_attribute(sample: int, out: Any) -> None:
    out.y = sample


def gets_an_attribute(sample: int, out: Any) -> None:
    out.y[...] = sample


def names_no_field(sample: int, out: Any) -> None:
    out["z"][...] = sample


@pytest.mark.parametrize(
    ("decode", "error", "match"),
    [
        (replaces_the_view, TypeError, r"write out\['x'\]\[...\] = …, or np.copyto"),
        (updates_the_views, TypeError, r"out.update\(…\) would .* write nothing: write out\['x'\]\[...\] = …"),
        (merges_into_the_views, TypeError, r"out \|= … would .* write nothing: write out\['x'\]\[...\] = …"),
        (sets_an_attribute, TypeError, r"out.y = … would .* write nothing: write out\['y'\]\[...\] = …"),
        (gets_an_attribute, AttributeError, r"out is a mapping by field, \['x', 'y'\]: out\['x'\]\[...\] = …"),
        (names_no_field, KeyError, r"no field 'z', only \['x', 'y'\]"),
    ],
)
async def test_a_decoder_that_writes_no_field_is_told_how(
    device: Device, decode: Any, error: type[Exception], match: str
) -> None:
    async with DataLoader(device, range(2), fields=FIELDS, decode=decode) as loader:
        with pytest.raises(error) as caught:
            await anext(aiter(loader))
    assert re.search(match, "\n".join([str(caught.value), *caught.value.__notes__]))


async def test_fields_have_shape_and_dtype(device: Device) -> None:
    async with DataLoader(device, range(5), fields=FIELDS, decode=write, batch_size=2) as loader:
        async for batch in loader:
            rows = len(batch.indices)
            assert dict(batch).keys() == {"x", "y"}
            assert batch["x"].shape == (rows, 2, 3)
            assert batch["x"].dtype == np.float32
            assert batch["y"].shape == (rows,)
            assert batch["y"].dtype == np.int64
            assert (await batch.stream.download(batch["x"]))[:, 1, 2].tolist() == list(batch.indices)
            with pytest.raises(KeyError, match="no field 'z', only"):
                batch["z"]
            assert batch.get("z") is None


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Sample:
    image: Any
    label: int


@pytest.mark.parametrize(
    ("decode", "names"),
    [
        (lambda n: np.full(3, n), [0]),
        (lambda n: n, [0]),
        (lambda n: (np.full(3, n), n), [0, 1]),
        (lambda n: [np.full(3, n), n], [0, 1]),
        (lambda n: Pair(np.full(3, n), n), ["left", "right"]),
        (lambda n: Sample(np.full(3, n), n), ["image", "label"]),
        (None, [0]),
    ],
)
async def test_parts_of_a_sample_become_fields(device: Device, decode: Any, names: list[Any]) -> None:
    async with DataLoader(device, range(4), decode=decode, batch_size=2) as loader:
        async for batch in loader:
            assert list(batch.keys()) == names
            for name in names:
                host = await batch.stream.download(batch[name])
                assert host.reshape(2, -1)[:, 0].tolist() == list(batch.indices)


async def test_collate_makes_the_arrays_of_a_batch(device: Device) -> None:
    def padded(samples: list[Any]) -> dict[str, Any]:
        width = max(map(len, samples))
        return {"ids": np.array([[*each, *[-1] * (width - len(each))] for each in samples])}

    async with DataLoader(device, [[1], [2, 3], [4, 5, 6], [7]], batch_size=2, collate=padded) as loader:
        assert [await values(batch, "ids") async for batch in loader] == [[[1, -1], [2, 3]], [[4, 5, 6], [7, -1, -1]]]


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        ([np.zeros(2), np.zeros(3)], ValueError, r"part 0 has shape \(3,\) in one sample and \(2,\)"),
        ([{"a": 1}, {"b": 1}], ValueError, r"different keys: \['b'\] in sample 1, and \['a'\] in sample 0"),
        ([(1,), (1, 2)], ValueError, r"different keys: \[0, 1\] in sample 1, and \[0\] in sample 0"),
        (["text", "more"], InvalidTypeError, "part 0 of a sample is no array of numbers but str"),
        ([None, None], InvalidTypeError, "a decoded sample is None"),
    ],
)
async def test_samples_that_make_no_batch(device: Device, source: Any, error: type[Exception], match: str) -> None:
    async with DataLoader(device, source, batch_size=2) as loader:
        with pytest.raises(error, match=match) as caught:
            await anext(aiter(loader))
        assert "in batch 0, when its samples were collated" in caught.value.__notes__


async def test_type_checkers_know_every_keyword() -> None:
    parameters = list(inspect.signature(DataLoader.__init__).parameters)
    assert parameters == ["self", "device", "source", *LoaderKeywords.__annotations__, "output"]


async def test_samples_without_decode_are_copied_into_the_fields(device: Device) -> None:
    for samples in (
        [{"x": np.full((2, 3), n, np.float32), "y": 2 * n} for n in range(3)],
        [(np.full((2, 3), n, np.float32), 2 * n) for n in range(3)],
    ):
        async with DataLoader(device, samples, fields=FIELDS, batch_size=2) as loader:
            assert await everything(loader) == doubled([0, 1], [2])
    async with DataLoader(device, [np.zeros(3)], fields={"x": (3, "f8"), "y": ((), "i8")}) as loader:
        with pytest.raises(ValueError, match="for 2 fields: give the loader a decode="):
            await anext(aiter(loader))
    async with DataLoader(device, [np.zeros(4)], fields={"x": (3, "f8")}) as loader:
        with pytest.raises(ValueError, match=r"field 'x' of a sample has shape \(4,\), and fields= says \(3,\)"):
            await anext(aiter(loader))


@pytest.mark.parametrize(
    ("sample", "field", "error", "match"),
    [
        (
            np.full(3, 0.5, np.float32),
            np.uint8,
            ValueError,
            "field 'x' of a sample is float32, such as 0.5, which its dtype",
        ),
        (
            [1.0, 2.0, 0.7],
            np.int64,
            ValueError,
            "such as 0.7, which its dtype int64 does not hold: say float64 in fields=",
        ),
        ({"image": 1}, np.uint8, ValueError, r"has the keys \['image'\], and the loader has the fields \['x'\]: name"),
        (["cat", "dog", "cow"], np.int64, ValueError, "in field 'x' of a sample, which is copied as it is"),
        ((np.zeros(3), 1), np.int64, ValueError, "in field 'x' of a sample, which is copied as it is"),
    ],
)
async def test_samples_that_the_fields_do_not_hold(
    device: Device, sample: Any, field: Any, error: type[Exception], match: str
) -> None:
    async with DataLoader(device, [sample], fields={"x": (3, field)}) as loader:
        with pytest.raises(error) as caught:
            await anext(aiter(loader))
    assert re.search(match, " ".join([str(caught.value), *caught.value.__notes__]))


async def test_fields_hold_other_dtypes_with_the_same_values(device: Device) -> None:
    samples = [np.array([1.0, 2.0, 250.0]), np.array([True, False, True]), np.array([1, 2, 3], np.int64)]
    async with DataLoader(device, samples, fields={"x": (3, np.uint8)}) as loader:
        assert await everything(loader, field="x") == [[[1, 2, 250]], [[1, 0, 1]], [[1, 2, 3]]]


async def test_an_empty_source_has_no_batch(device: Device) -> None:
    async with DataLoader(device, [], fields=FIELDS, decode=write) as loader:
        assert len(loader) == 0
        assert bool(loader)
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="no batch: 0 samples, batch_size=1, drop_last=False$") as caught:
                assert await everything(loader) == []
            assert caught[0].filename == everything.__code__.co_filename


async def test_an_epoch_without_a_batch_warns(device: Device) -> None:
    for source in (range(3), generator(3)):
        options: dict[str, Any] = {"fields": FIELDS, "decode": write, "batch_size": 4, "drop_last": True}
        async with DataLoader(device, source, **options) as loader:
            with pytest.warns(
                RuntimeWarning, match="no batch: 3 samples, batch_size=4, drop_last=True: make batch_size smaller"
            ):
                assert await everything(loader) == []


@pytest.mark.parametrize("on_error", ["skip", lambda error, index: None])
async def test_an_epoch_of_which_all_samples_are_skipped_warns(device: Device, on_error: Any) -> None:
    def fails(sample: int) -> Any:
        raise OSError(sample)

    async with DataLoader(device, range(4), decode=fails, batch_size=2, on_error=on_error) as loader:
        with pytest.warns(RuntimeWarning, match=r"no batch: 4 samples, .* and on_error= has skipped them all"):
            assert await everything(loader) == []


async def test_an_iterator_that_has_ended_raises(device: Device) -> None:
    for source in (generator(4), iter(range(4)), agenerator(4)):
        async with DataLoader(device, source, fields=FIELDS, decode=write, batch_size=2) as loader:
            assert len(await everything(loader)) == 2
            with pytest.raises(InvalidArgumentError, match="is an iterator that has ended: pass an object that can be"):
                await everything(loader)


@pytest.mark.parametrize(("drop_last", "count"), [(True, 2), (False, 3)])
async def test_the_last_batch_may_be_shorter(device: Device, drop_last: bool, count: int) -> None:
    for source in (range(7), generator(7)):
        async with DataLoader(device, source, fields=FIELDS, decode=write, batch_size=3, drop_last=drop_last) as loader:
            assert [len(batch.indices) async for batch in loader] == [3, 3, 1][:count]
    assert len(DataLoader(device, range(7), batch_size=3, drop_last=drop_last)) == count


async def test_the_length_of_a_stream_is_not_known(device: Device) -> None:
    with pytest.raises(InvalidTypeError, match="has no length"):
        len(DataLoader(device, generator(3)))


# -- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["map", "iterable"])
async def test_so_many_samples_are_decoded_at_once_also_in_one_batch(device: Device, kind: str) -> None:
    meeting = threading.Barrier(4)

    def meets(sample: Any, out: Any) -> None:
        end = time.thread_time() + 2 * LEAST_SECONDS  # a thread takes several of quicker samples
        while time.thread_time() < end:
            pass
        meeting.wait(PATIENCE)  # it breaks, and raises, if not four come
        write(sample, out)

    source: Any = range(8) if kind == "map" else generator(8)
    async with DataLoader(device, source, fields=FIELDS, decode=meets, batch_size=4, workers=4, prefetch=1) as loader:
        assert await everything(loader) == doubled([0, 1, 2, 3], [4, 5, 6, 7])


@pytest.mark.parametrize("workers", [0, 1])
async def test_one_thread_reads_and_decodes_and_it_is_not_that_of_the_loop(device: Device, workers: int) -> None:
    threads: set[int] = set()

    def note(sample: Any, out: Any) -> None:
        threads.add(threading.get_ident())
        write(sample, out)

    class Source:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            threads.add(threading.get_ident())
            return index

    async with DataLoader(device, Source(), fields=FIELDS, decode=note, batch_size=2, workers=workers) as loader:
        await everything(loader)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_threads_end_with_the_loader(device: Device) -> None:
    before = threading.active_count()
    async with DataLoader(device, range(64), fields=FIELDS, decode=write, workers=8) as loader:
        await everything(loader)
    deadline = time.monotonic() + PATIENCE
    while any(thread.name.startswith("aiocuda-loader") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        await asyncio.sleep(1e-3)
    assert threading.active_count() <= before + 8  # the driver's own may have been started


@pytest.mark.parametrize("prefetch", [1, 2, 5])
async def test_no_more_batches_than_prefetch_are_ahead(device: Device, prefetch: int) -> None:
    begun: list[int] = []

    def note(sample: Any, out: Any) -> None:
        begun.append(sample)
        write(sample, out)

    async with DataLoader(
        device, range(40), fields=FIELDS, decode=note, batch_size=2, workers=2, prefetch=prefetch
    ) as loader:
        async for batch in loader:
            await asyncio.sleep(2e-3)
            assert max(begun) < 2 * (batch.number + 1 + prefetch)


async def test_batches_come_in_order_unless_told_otherwise(device: Device) -> None:
    first = threading.Event()

    def waits(sample: Any, out: Any) -> None:
        if sample == 0:
            first.wait(LATCH)
        write(sample, out)

    options: dict[str, Any] = {"fields": FIELDS, "decode": waits, "workers": 2, "prefetch": 4}
    async with DataLoader(device, range(6), ordered=False, **options) as loader:
        numbers = []
        async for batch in loader:
            numbers.append(batch.number)
            if len(numbers) == 3:
                first.set()
        assert numbers[0] != 0
        assert sorted(numbers) == list(range(6))
    async with DataLoader(device, range(6), ordered=True, **options) as loader:
        assert [batch.number async for batch in loader] == list(range(6))


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [FIELDS, None])
async def test_a_failed_sample_raises_its_exception_with_the_index(device: Device, fields: Any) -> None:
    own = LookupError("no file")

    def decode(sample: Any, out: Any = None) -> Any:
        if sample == 4:
            raise own
        return write(sample, out) if fields else arrays(sample)

    async with DataLoader(device, range(10), fields=fields, decode=decode, batch_size=2, workers=2) as loader:
        batches = []
        with pytest.raises(LookupError) as caught:
            async for batch in loader:
                batches.append(await values(batch))  # noqa: PERF401 - the loop ends with an exception
        assert caught.value is own
        assert "at sample 4 of the loader's source" in own.__notes__
        assert batches == doubled([0, 1], [2, 3])
        assert loader.state_dict()["position"] == 4


async def test_the_source_of_a_worker_raises_like_decode(device: Device) -> None:
    class Source:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise OSError("truncated")
            return index

    async with DataLoader(device, Source(), fields=FIELDS, decode=write, batch_size=2) as loader:
        with pytest.raises(OSError, match="truncated") as caught:
            await everything(loader)
        assert "at sample 3 of the loader's source" in caught.value.__notes__
    async with DataLoader(device, Source(), fields=FIELDS, decode=write, batch_size=2, on_error="skip") as loader:
        assert await everything(loader) == doubled([0, 1], [2], [4, 5])


@pytest.mark.parametrize("fields", [FIELDS, None])
async def test_skipped_samples_make_their_batch_shorter(device: Device, fields: Any) -> None:
    def decode(sample: Any, out: Any = None) -> Any:
        if fields is None and sample % 5 == 0:
            raise ValueError("five")
        return refuses_fives(sample, out) if fields else arrays(sample)

    async with DataLoader(
        device, range(12), fields=fields, decode=decode, batch_size=3, workers=3, on_error="skip"
    ) as loader:
        batches = [(batch.indices, await values(batch)) async for batch in loader]
        assert loader.statistics().skipped == 3
        assert loader.statistics().samples == 9
    assert [indices for indices, _ in batches] == [(1, 2), (3, 4), (6, 7, 8), (9, 11)]
    assert [found for _, found in batches] == doubled([1, 2], [3, 4], [6, 7, 8], [9, 11])


async def test_a_function_is_called_for_each_skipped_sample(device: Device) -> None:
    seen: list[tuple[str, int]] = []
    async with DataLoader(
        device, range(11), fields=FIELDS, decode=refuses_fives, batch_size=1,
        on_error=lambda error, index: seen.append((str(error), index)),
    ) as loader:  # fmt: skip
        assert [batch.indices for batch in [batch async for batch in loader]] == [
            (index,) for index in range(11) if index % 5
        ]
    assert seen == [(f"{index} is a multiple of five", index) for index in (0, 5, 10)]


@pytest.mark.parametrize(
    ("on_error", "error", "match"),
    [
        (lambda error, index: 1 / 0, ZeroDivisionError, "division"),
    ],
)
async def test_a_function_that_fails_shows_the_sample(
    device: Device, on_error: Any, error: type[Exception], match: str
) -> None:
    async with DataLoader(device, range(3), fields=FIELDS, decode=refuses_fives, on_error=on_error) as loader:
        with pytest.raises(error, match=match) as caught:
            await anext(aiter(loader))
        failure = caught.value.__context__
        assert failure is not None
        assert failure.__notes__ == ["at sample 0 of the loader's source"]


async def test_a_function_that_raises_ends_the_epoch(device: Device) -> None:
    def on_error(error: Exception, index: int) -> None:
        raise KeyError(index)

    async with DataLoader(device, range(9), fields=FIELDS, decode=refuses_fives, on_error=on_error) as loader:
        with pytest.raises(KeyError):
            await everything(loader)


@pytest.mark.parametrize("source", [generator, agenerator])
async def test_an_iterable_that_raises_ends_the_epoch_after_its_batches(device: Device, source: Any) -> None:
    def broken() -> Iterator[int]:
        yield from range(5)
        raise OSError("the network is down")

    async def abroken() -> AsyncIterator[int]:
        for sample in broken():
            yield sample

    made: Any = broken() if source is generator else abroken()
    async with DataLoader(device, made, fields=FIELDS, decode=write, batch_size=2, on_error="skip") as loader:
        batches = []
        with pytest.raises(OSError, match="network") as caught:
            async for batch in loader:
                batches.append(await values(batch))  # noqa: PERF401 - the loop ends with an exception
        assert batches == doubled([0, 1], [2, 3])
        assert "in the source of the loader, at sample 5, counted from 0" in caught.value.__notes__


async def test_the_close_of_a_source_does_not_end_the_epoch_silently(device: Device) -> None:
    class Source:
        def __aiter__(self) -> Source:
            return self

        async def __anext__(self) -> int:
            raise OSError

        async def aclose(self) -> None:
            raise StopAsyncIteration

    async with DataLoader(device, Source()) as loader:
        with pytest.raises(RuntimeError, match="a function raised StopAsyncIteration") as caught:
            await everything(loader)
    assert isinstance(caught.value.__cause__, StopAsyncIteration)


async def test_an_iterable_that_raises_one_object_again_and_again(device: Device) -> None:
    """The object gets its note once."""
    error = OSError("the network is down")

    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise error

    async with DataLoader(device, Broken(), fields=FIELDS, decode=write) as loader:
        for _ in range(3):
            with pytest.raises(OSError, match="network"):
                async for _ in loader:
                    pass
    assert error.__notes__ == ["in the source of the loader, at sample 0, counted from 0"]


@pytest.mark.parametrize("error", [StopIteration, asyncio.CancelledError, GeneratorExit])
async def test_whatever_decode_raises_reaches_the_consumer(device: Device, error: type[BaseException]) -> None:
    def decode(sample: Any, out: Any) -> None:
        raise error("mine")

    async with DataLoader(device, range(3), fields=FIELDS, decode=decode, on_error="raise") as loader:
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - it, or a RuntimeError caused by it
            await anext(aiter(loader))
    assert isinstance(caught.value, error) or isinstance(caught.value.__cause__, error)


async def test_a_loader_goes_on_with_another_epoch_after_a_failure(device: Device) -> None:
    bad = {3}

    def decode(sample: Any, out: Any) -> None:
        if sample in bad:
            raise ValueError
        write(sample, out)

    async with DataLoader(device, range(6), fields=FIELDS, decode=decode, batch_size=2, workers=2) as loader:
        with pytest.raises(ValueError):  # noqa: PT011
            await everything(loader)
        bad.clear()
        assert await everything(loader, 5) == doubled([0, 1], [2, 3], [4, 5])


# -- life time -------------------------------------------------------------------------------------------------------


async def test_a_batch_is_valid_until_the_next_one_is_requested(device: Device) -> None:
    async with DataLoader(device, range(4), fields=FIELDS, decode=write) as loader:
        iterator = aiter(loader)
        first = await anext(iterator)
        assert await values(first) == [0]
        second = await anext(iterator)
        with pytest.raises(StaleHandleError):
            first.keep()
        with pytest.raises(StaleHandleError):
            first.used_on(first.stream)
        with pytest.raises(StaleHandleError, match=r"since the next batch was requested.* call batch\.keep\(\)"):
            await first.stream.download(first["y"])
        assert "freed" in repr(first)
        kept = second.keep()
        assert kept is second
        await anext(iterator)
        assert await values(second) == [2]
        second.free()
        second.free()
        with pytest.raises(StaleHandleError, match="allocate another one"):  # the program has freed it
            await second.stream.download(second["y"])


async def test_kept_batches_live_as_long_as_their_buffers(device: Device) -> None:
    async with DataLoader(device, range(6), fields=FIELDS, decode=write) as loader:
        kept = [batch.keep() async for batch in loader]
        assert [await values(batch) for batch in kept] == doubled([0], [1], [2], [3], [4], [5])
    async with device.stream() as stream:
        assert [(await stream.download(batch["y"])).tolist() for batch in kept] == doubled([0], [1], [2], [3], [4], [5])
        del kept
        gc.collect()
        await stream.synchronize()
    await device.memory.trim()
    assert device.memory.statistics().live_bytes == 0


@pytest.mark.parametrize("when", ["keep, then used_on", "used_on, then keep", "used_on after the next request"])
async def test_a_kept_batch_that_is_dropped_waits_for_named_streams(when: str) -> None:
    """A slow kernel that aiocuda does not know reads the batch by its address."""
    gate = threading.Event()
    seen: list[int] = []

    def slow(array: Any) -> None:
        gate.wait(LATCH)
        seen.append(int(np.asarray(array)[0, 0]))

    def fill(sample: int, out: Any) -> None:
        out["x"][...] = sample

    driver = HostDriver()
    fields = {"x": ((256,), np.int64)}
    async with aiocuda.open_device(driver=driver) as device:
        async with DataLoader(device, range(100, 140), fields=fields, decode=fill, prefetch=2) as loader:
            iterator = aiter(loader)
            batch = await anext(iterator)
            if when != "used_on, then keep":
                batch.keep()
            if when == "used_on after the next request":
                await anext(iterator)
            stream = driver.stream_create(0, 0)
            one = (1, 1, 1)
            function = driver.load(0, Program("slow", "P", host=slow))
            span = Span(batch["x"].address, batch["x"].shape, batch["x"].dtype)
            driver.launcher(stream, function, one, one, 0)((driver.argument(span),))
            batch.used_on(stream)
            batch.keep()
            del batch
            gc.collect()
            for _ in range(12):
                await anext(iterator)
            gate.set()
            driver.stream_synchronize(stream)
        driver.stream_destroy(stream)
    assert seen == [100]


async def test_a_named_stream_is_waited_for_although_another_one_is_imported() -> None:
    """An import forgets imported streams that are idle, also one that only `used_on` has named."""
    gate = threading.Event()
    seen: list[int] = []

    def slow(array: Any) -> None:
        gate.wait(LATCH)
        seen.append(int(np.asarray(array)[0, 0]))

    def fill(sample: int, out: Any) -> None:
        out["x"][...] = sample

    driver = HostDriver()
    fields = {"x": ((256,), np.int64)}
    async with aiocuda.open_device(driver=driver) as device:
        async with DataLoader(device, range(100, 140), fields=fields, decode=fill, prefetch=2) as loader:
            iterator = aiter(loader)
            batch = await anext(iterator)
            stream, other = driver.stream_create(0, 0), driver.stream_create(0, 0)
            one = (1, 1, 1)
            function = driver.load(0, Program("slow", "P", host=slow))
            span = Span(batch["x"].address, batch["x"].shape, batch["x"].dtype)
            driver.launcher(stream, function, one, one, 0)((driver.argument(span),))
            batch.used_on(stream)
            Stream.from_handle(device, other)
            del batch
            # A loader that does not wait for the stream delivers twelve batches before that.
            asyncio.get_running_loop().call_later(0.3, gate.set)
            for _ in range(12):
                await anext(iterator)
            assert gate.is_set()
            driver.stream_synchronize(stream)
        for each in (stream, other):
            driver.stream_destroy(each)
    assert seen == [100]


async def test_a_batch_that_is_exported_is_kept_counted_and_reported_once(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    if device.driver.name == "cuda":
        return
    async with DataLoader(device, range(6), fields=FIELDS, decode=write) as loader:
        held = [(batch, batch["y"].__dlpack__(stream=-1)) async for batch in loader if batch.number < 3]
        assert loader.statistics().kept == 3
        assert [await values(batch) for batch, _ in held] == doubled([0], [1], [2])
    assert sum("batch_kept" in record.getMessage() for record in caplog.records) == 1


async def test_memory_goes_round(device: Device) -> None:
    """No more batches have memory than are on their way, and one in hand."""
    async with DataLoader(device, range(60), fields={"x": ((1 << 16,), "u1")}, decode=lambda s, out: None) as loader:
        async for _ in loader:
            assert device.memory.statistics().live_bytes <= 5 << 16
    assert device.memory.statistics().live_bytes == 0


async def test_breaking_off_ends_the_epoch_with_the_next_one(device: Device) -> None:
    async with DataLoader(device, range(30), fields=FIELDS, decode=write, batch_size=2, workers=2) as loader:
        async for batch in loader:
            if batch.number == 3:
                break
        assert await values(batch) == [12, 14]
        assert loader.state_dict() | {"samples": None} == {
            "version": 1, "epoch": 0, "position": 8, "batches": 4, "ahead": [], "samples": None, "shuffle": None
        }  # fmt: skip
        assert (await everything(loader))[0] == [0, 2]
        assert loader.state_dict()["epoch"] == 2


async def test_one_task_at_a_time(device: Device) -> None:
    gate = threading.Event()

    def waits(sample: Any, out: Any) -> None:
        gate.wait(LATCH)
        write(sample, out)

    async with DataLoader(device, range(3), fields=FIELDS, decode=waits) as loader:
        iterator = aiter(loader)
        first = asyncio.ensure_future(anext(iterator))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="another task"):
            await anext(iterator)
        gate.set()
        assert (await first).number == 0


async def test_cancelling_a_request_changes_nothing(device: Device) -> None:
    gate = threading.Event()

    def waits(sample: Any, out: Any) -> None:
        gate.wait(LATCH)
        write(sample, out)

    async with DataLoader(device, range(3), fields=FIELDS, decode=waits) as loader:
        iterator = aiter(loader)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(iterator), 0.01)
        gate.set()
        assert [await values(batch) async for batch in iterator] == doubled([0], [1], [2])


async def test_closing_ends_the_wait_for_a_batch(device: Device) -> None:
    gate = threading.Event()

    def waits(sample: Any, out: Any) -> None:
        gate.wait(LATCH)

    async with DataLoader(device, range(3), fields=FIELDS, decode=waits) as loader:
        request = asyncio.ensure_future(anext(aiter(loader)))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(loader.aclose())
        with pytest.raises(ClosedError, match="closed while a task waited"):
            await quickly(request)
        gate.set()
        await closing


async def test_a_cancelled_request_for_another_epoch_ends_the_first_one_completely(device: Device) -> None:
    gate, decoding = threading.Event(), threading.Event()

    def waits(sample: Any, out: Any) -> None:
        if sample == 3 and not gate.is_set():
            decoding.set()
            gate.wait(LATCH)
        write(sample, out)

    async with DataLoader(device, range(8), fields=FIELDS, decode=waits, workers=2, prefetch=3) as loader:
        async for _ in loader:
            break
        await asyncio.to_thread(decoding.wait, PATIENCE)
        request = asyncio.ensure_future(anext(loader.epoch(1)))
        await asyncio.sleep(0)
        request.cancel()
        await turns()
        assert not request.done()  # the function that writes to a slot still runs
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await quickly(request)
        assert await everything(loader, 2) == doubled(*([sample] for sample in range(8)))


async def test_batches_of_an_epoch_that_was_left_for_another_one_have_ended(device: Device) -> None:
    async with DataLoader(device, range(6), fields=FIELDS, decode=write, batch_size=2) as loader:
        left, other = aiter(loader), aiter(loader)
        await anext(left)
        assert (await anext(other)).number == 0
        with pytest.raises(ClosedError, match="another epoch of the loader was begun"):
            await anext(left)
        assert [batch.number async for batch in other] == [1, 2]
        assert loader.state_dict()["epoch"] == 2


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.slow)])
async def test_a_fault_of_the_device_reaches_the_consumer(executor: Any) -> None:
    options: dict[str, Any] = {"fields": FIELDS, "decode": write, "workers": 2, "executor": executor}
    with Reports() as reports:
        slow = Peer(HostDriver(bandwidth=1e4), polls_freely=False)  # uploads are on their way when it faults
        async with open_peer(slow) as (peer, device):
            await asyncio.to_thread(TRAP.load, peer.driver, 0)
            async with DataLoader(device, range(40), **options) as loader:
                numbers = []
                with pytest.raises(DeviceFault):
                    async for batch in loader:
                        numbers.append(batch.number)
                        if batch.number == 3:
                            with contextlib.suppress(DeviceFault):
                                await batch.stream.launch(TRAP, 1, 1)
                assert numbers == list(range(4))
                with pytest.raises(DeviceFault):
                    await anext(aiter(loader))
            await until(
                lambda: not any(thread.name.startswith("aiocuda-loader") for thread in threading.enumerate()),
                "the end of the loader's threads",
            )
        gc.collect()
    assert not reports.failures  # the uploads on their way have failed, too


async def test_progress_bars_know_the_length(device: Device) -> None:
    tqdm = pytest.importorskip("tqdm.asyncio").tqdm
    async with DataLoader(device, range(10), fields=FIELDS, decode=write, batch_size=3) as loader:
        for batches in (loader, loader.epoch(4)):
            bar = tqdm(batches, disable=None, file=io.StringIO())
            assert [batch.number async for batch in bar] == [0, 1, 2, 3]
            assert bar.total == 4


async def test_a_loader_is_opened_once_and_closed(device: Device) -> None:
    loader = DataLoader(device, range(3), fields=FIELDS, decode=write)
    with pytest.raises(BusyError, match="async with DataLoader"):
        await anext(aiter(loader))
    with pytest.raises(InvalidTypeError, match="async for batch in loader"):
        list(loader)
    async with loader:
        iterator = aiter(loader)
        await anext(iterator)
        with pytest.raises(BusyError, match="entered once"):
            await loader.__aenter__()
    with pytest.raises(ClosedError, match="make another one"):
        await anext(iterator)
    await loader.aclose()
    with pytest.raises(ClosedError, match="make another one"):
        await loader.__aenter__()


async def test_an_exception_in_the_block_ends_everything(device: Device) -> None:
    with pytest.raises(ZeroDivisionError):
        async with DataLoader(device, range(30), fields=FIELDS, decode=write, workers=2) as loader:
            async for _ in loader:
                _ = 1 / 0
    await device.drain()


async def test_the_device_may_be_closed_first() -> None:
    async with aiocuda.open_device(driver="host") as device:
        loader = DataLoader(device, range(30), fields=FIELDS, decode=write, workers=2)
        await loader.__aenter__()
        batch = await anext(aiter(loader))
        await device.aclose()
        with pytest.raises(ClosedError):
            await anext(aiter(loader))
        batch.free()
        await loader.aclose()


async def test_the_loop_is_never_blocked(device: Device) -> None:
    """Sources and decoders run on threads: the loop goes on while both wait for it."""
    source_gate, decode_gate = threading.Event(), threading.Event()
    waiting: list[str] = []

    def source() -> Iterator[int]:
        for number in range(6):
            waiting.append("source")
            assert source_gate.wait(PATIENCE)
            yield number

    def decode(sample: Any, out: Any) -> None:
        waiting.append("decode")
        assert decode_gate.wait(PATIENCE)
        write(sample, out)

    async with DataLoader(device, source(), fields=FIELDS, decode=decode, batch_size=2, workers=2) as loader:
        loading = asyncio.create_task(everything(loader))
        await until(lambda: "source" in waiting, "the source's wait")
        source_gate.set()
        await until(lambda: waiting.count("decode") == 2, "the decoders' wait")
        decode_gate.set()
        await quickly(loading)
    assert waiting.count("source") == waiting.count("decode") == 6


# -- order, shards, state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: range(23), lambda: generator(23)])
async def test_shuffled_epochs_have_each_sample_once(device: Device, make: Any) -> None:
    window = None if isinstance(make(), range) else 5
    orders = []
    for epoch in range(3):
        async with DataLoader(
            device, make(), fields=FIELDS, decode=write, batch_size=4, shuffle=Shuffle(9, window)
        ) as loader:
            orders.append([index async for batch in loader.epoch(epoch) for index in batch.indices])
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


async def test_plain_loops_run_one_epoch_after_the_other(device: Device) -> None:
    async with DataLoader(device, range(20), fields=FIELDS, decode=write, shuffle=Shuffle(1)) as loader:
        plain = [[index async for batch in loader for index in batch.indices] for _ in range(2)]
        named = [[index async for batch in loader.epoch(epoch) for index in batch.indices] for epoch in range(2)]
    assert plain == named
    assert plain[0] != plain[1]


@pytest.mark.parametrize("epoch", [-1, "0", True])
async def test_epochs_are_counted_from_zero(device: Device, epoch: Any) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError)):
        DataLoader(device, range(2)).epoch(epoch)


@pytest.mark.parametrize("kind", ["map", "iterable", "async"])
@pytest.mark.parametrize("done", range(6))
async def test_a_state_resumes_exactly(device: Device, kind: str, done: int) -> None:
    """The batches ahead when the state is taken are loaded again; the one in hand counts as delivered."""

    def loader() -> DataLoader:
        source: Any = range(14) if kind == "map" else generator(14) if kind == "iterable" else agenerator(14)
        window = None if kind == "map" else 4
        return DataLoader(device, source, fields=FIELDS, decode=write, batch_size=3, shuffle=Shuffle(2, window))

    async with loader() as whole:
        expected = [batch.indices async for batch in whole]
    async with loader() as first:
        iterator = aiter(first)
        before = [(await anext(iterator)).indices for _ in range(done)]
        state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) <= 1024
    async with loader() as second:
        second.load_state_dict(state)
        resumed = [(batch.number, batch.indices) async for batch in second]
        assert second.state_dict()["epoch"] == 1
    assert before + [indices for _, indices in resumed] == expected
    assert [number for number, _ in resumed] == list(range(done, 5))


async def test_a_state_taken_after_the_end_is_that_of_the_next_epoch(device: Device) -> None:
    async with DataLoader(device, range(4), batch_size=2, shuffle=Shuffle(1)) as loader:
        await everything(loader, field=0)
        state = loader.state_dict()
        following = await everything(loader, field=0)
    assert (state["epoch"], state["position"]) == (1, 0)
    async with DataLoader(device, range(4), batch_size=2, shuffle=Shuffle(1)) as loader:
        loader.load_state_dict(state)
        assert await everything(loader, field=0) == following


async def test_batches_delivered_ahead_are_not_delivered_again(device: Device) -> None:
    gate = threading.Event()

    def waits(sample: Any, out: Any) -> None:
        if sample == 1:
            gate.wait(LATCH)
        write(sample, out)

    options: dict[str, Any] = {"fields": FIELDS, "workers": 2, "prefetch": 4, "ordered": False}
    async with DataLoader(device, range(8), decode=waits, **options) as loader:
        iterator = aiter(loader)
        delivered = [(await anext(iterator)).number for _ in range(3)]
        state = loader.state_dict()
        gate.set()
    assert [number for begin, end in state["ahead"] for number in range(begin, end)] == sorted(delivered)[1:]
    async with DataLoader(device, range(8), decode=write, **options) as loader:
        loader.load_state_dict(state)
        rest = [batch.number async for batch in loader]
    assert sorted(delivered + rest) == list(range(8))
    other = DataLoader(device, range(8), decode=write, shard=(0, 2), **options)
    with pytest.raises(InvalidArgumentError, match="ordered=False"):
        other.load_state_dict(state)


async def test_a_state_is_small_while_one_batch_is_late(device: Device) -> None:
    gate = threading.Event()

    def waits(sample: Any, out: Any) -> None:
        if sample == 1:
            gate.wait(LATCH)
        write(sample, out)

    options: dict[str, Any] = {"fields": FIELDS, "workers": 2, "ordered": False}
    async with DataLoader(device, range(500), decode=waits, **options) as loader:
        iterator = aiter(loader)
        delivered = [(await anext(iterator)).number for _ in range(400)]
        state = json.dumps(loader.state_dict())
        gate.set()
    assert len(state) <= 1024
    async with DataLoader(device, range(500), decode=write, **options) as loader:
        loader.load_state_dict(json.loads(state))
        rest = [batch.number async for batch in loader]
    assert sorted(delivered + rest) == list(range(500))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"version": 9}, InvalidArgumentError, "version 9"),
        ({"samples": 5}, InvalidArgumentError, "5 samples, and the loader's has 10 samples"),
        (
            {"shuffle": [3, None]},
            InvalidArgumentError,
            r"belongs to Shuffle\(seed=3, window=None\), and the loader has the order of the source: "
            r"make the loader with shuffle=Shuffle\(seed=3, window=None\)$",
        ),
        ({"position": 11}, InvalidArgumentError, "has the position 11, and an epoch of the source ends at 10: it must"),
        ({"position": -1}, InvalidArgumentError, "has -1 where a count belongs"),
        ({"epoch": "0"}, InvalidArgumentError, "has '0' where a count belongs"),
        ({"ahead": None}, InvalidArgumentError, "incomplete"),
        ({"ahead": [3, 4]}, InvalidArgumentError, "incomplete"),
        ({"ahead": [[3, "4"]]}, InvalidArgumentError, "has '4' where a count belongs"),
    ],
)
async def test_states_of_others_are_refused(
    device: Device, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    loader = DataLoader(device, range(10))
    with pytest.raises(error, match=match):
        loader.load_state_dict(loader.state_dict() | change)
    with pytest.raises(InvalidTypeError, match="is a dictionary"):
        loader.load_state_dict([1])  # type: ignore[arg-type]


async def test_a_state_without_shuffle_is_refused_by_a_loader_with_one(device: Device) -> None:
    state = DataLoader(device, range(10)).state_dict()
    with pytest.raises(InvalidArgumentError, match=r"belongs to the order of the source, .* without shuffle$"):
        DataLoader(device, range(10), shuffle=Shuffle(3)).load_state_dict(state)


async def test_a_state_of_the_last_batch_has_an_empty_rest_and_then_comes_the_next_epoch(device: Device) -> None:
    async with DataLoader(device, range(4), batch_size=2, shuffle=Shuffle(1)) as loader:
        states = [loader.state_dict() async for _ in loader]
        following = await everything(loader, field=0)
    async with DataLoader(device, range(4), batch_size=2, shuffle=Shuffle(1)) as loader:
        loader.load_state_dict(states[-1])
        assert await everything(loader, field=0) == []
        assert await everything(loader, field=0) == following


async def test_the_batch_size_may_change_when_a_state_is_loaded(device: Device) -> None:
    async with DataLoader(device, range(10), batch_size=2, shuffle=Shuffle(1)) as loader:
        batches = [(loader.state_dict(), batch.indices) async for batch in loader]
    expected = [index for _, indices in batches[2:] for index in indices]
    async with DataLoader(device, range(10), batch_size=4, shuffle=Shuffle(1)) as loader:
        loader.load_state_dict(batches[1][0])
        rest = [batch.indices async for batch in loader]
    assert [index for indices in rest for index in indices] == expected
    assert [len(indices) for indices in rest] == [4, 2]


async def test_a_state_is_loaded_before_the_epoch(device: Device) -> None:
    async with DataLoader(device, range(4)) as loader:
        state = loader.state_dict()
        async for _ in loader:
            with pytest.raises(BusyError, match="is running"):
                loader.load_state_dict(state)
            break


async def test_states_of_ranks_are_merged(device: Device) -> None:
    loaders = [DataLoader(device, range(10), shard=(rank, 2)) for rank in range(2)]
    states = []
    for loader in loaders:
        async with loader:
            iterator = aiter(loader)
            for _ in range(2):
                await anext(iterator)
            states.append(loader.state_dict())
    assert DataLoader.merge_state_dicts(states) == states[0] == states[1]
    assert states[0]["position"] == 4
    with pytest.raises(InvalidArgumentError, match="ranks 0 and 1 differ"):
        DataLoader.merge_state_dicts([states[0], states[0] | {"position": 6}])
    with pytest.raises(InvalidArgumentError, match="no state to merge"):
        DataLoader.merge_state_dicts([])
    with pytest.raises(InvalidTypeError, match="this is one: pass a list"):
        DataLoader.merge_state_dicts(states[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"shuffle": [1, None]},
            r"are Shuffle\(seed=0, window=None\) and Shuffle\(seed=1, .*: give every rank the same",
        ),
        ({"shuffle": None}, r"are Shuffle\(seed=0, window=None\) and the order of the source"),
        ({"samples": 9}, "have 8 samples and 9 samples: give every rank the whole source"),
        ({"batches": 3}, "position 4 after 2 batches, and epoch 0, position 4 after 3; save"),
    ],
)
async def test_states_of_ranks_that_differ_name_the_difference(
    device: Device, change: dict[str, Any], match: str
) -> None:
    state = DataLoader(device, range(8), shuffle=Shuffle()).state_dict() | {"position": 4, "batches": 2}
    with pytest.raises(InvalidArgumentError, match=match):
        DataLoader.merge_state_dicts([state, state | change])


@pytest.mark.parametrize("make", [lambda: range(11), lambda: generator(11)])
async def test_padding_is_counted_and_comes_from_the_start(device: Device, make: Any) -> None:
    indices, padded = [], []
    for rank in range(4):
        async with DataLoader(device, make(), fields=FIELDS, decode=write, batch_size=2, shard=(rank, 4)) as loader:
            indices.append([index async for batch in loader for index in batch.indices])
            padded.append(loader.statistics().padded)
    assert indices == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 0]]
    assert padded == [0, 0, 0, 1]


# -- statistics ------------------------------------------------------------------------------------------------------


@pytest.fixture
def simulated_driver() -> Iterator[SimulatedDriver]:
    """A driver with a slow link. All durations are those of the model."""
    with contextlib.closing(SimulatedDriver(None, bandwidth=2e8)) as driver:
        yield driver


async def test_statistics_name_the_bottleneck(simulated_driver: SimulatedDriver, simulated_device: Device) -> None:
    def slow(sample: Any, out: Any) -> None:
        simulated_driver.advance_time(5e-3)
        write(sample, out)

    def trickle() -> Iterator[int]:
        for number in range(8):
            simulated_driver.advance_time(5e-3)
            yield number

    def loader(source: Any, decode: Any) -> DataLoader:
        return DataLoader(simulated_device, source, fields=FIELDS, decode=decode, batch_size=2, workers=1)

    found = []
    for source, decode, seconds in ((range(8), slow, 0), (trickle(), write, 0), (range(8), write, 0.02)):
        async with loader(source, decode) as each:
            async for _ in each:
                await asyncio.sleep(seconds)
            found.append(each.statistics().bottleneck().name)
            assert each.statistics().throughput > 0
            assert each.statistics().bottleneck().why
    assert found == ["decode", "source", "consumer"]


async def test_the_link_to_the_device_may_be_the_bottleneck(simulated_device: Device) -> None:
    def nothing(sample: Any, out: Any) -> None:
        pass

    fields = {"x": ((1 << 20,), np.uint8)}
    async with DataLoader(simulated_device, range(12), fields=fields, decode=nothing, workers=2) as loader:
        async for _ in loader:
            pass
        assert loader.statistics().bottleneck().name == "upload"
