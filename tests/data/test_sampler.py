"""The order of a sampler, and the random numbers and the epoch that `decode` takes."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, InvalidArgumentError, InvalidTypeError
from aiocuda.data import DataLoader, Shuffle
from tests.data.samples import FIELDS, Weights, augmented, augments, write

pytestmark = pytest.mark.asyncio

EXECUTORS: list[dict[str, Any]] = [{"workers": 3}, {"workers": 2, "executor": "process"}]


def drawn(epoch: int, seed: int = 0) -> list[int]:
    sampler = Weights(10, 14, seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def loader(device: Device, sampler: Any = None, **options: Any) -> DataLoader:
    sampler = Weights(10, 14) if sampler is None else sampler
    return DataLoader(device, range(10), **{"fields": FIELDS, "decode": write, "batch_size": 3, **options},
                      sampler=sampler)  # fmt: skip


async def values(batches: AsyncIterator[Any]) -> list[tuple[int, float, int]]:
    """Return the index, the random number and the other number of each sample."""
    found: list[tuple[int, float, int]] = []
    async for batch in batches:
        x, y = await batch.stream.download(batch["x"]), await batch.stream.download(batch["y"])
        found += zip(batch.indices, x.reshape(len(x), -1)[:, 0].tolist(), y.tolist(), strict=True)
    return found


# -- samplers ----------------------------------------------------------------------------------------------------------


async def test_a_sampler_gives_the_order_of_each_epoch(device: Device) -> None:
    async with loader(device) as each:
        assert len(each) == 5
        for epoch in (0, 1):
            assert [index async for batch in each for index in batch.indices] == drawn(epoch)
        assert [index async for batch in each.epoch(7) for index in batch.indices] == drawn(7)


@pytest.mark.parametrize("world", [2, 3])
async def test_ranks_share_the_order_of_a_sampler(device: Device, world: int) -> None:
    by_rank = []
    for rank in range(world):
        async with loader(device, shard=(rank, world), batch_size=2) as each:
            by_rank.append([index async for batch in each for index in batch.indices])
    order = [index for indices in zip(*by_rank, strict=True) for index in indices]
    assert order[:14] == drawn(0)
    assert order[14:] == drawn(0)[: len(order) - 14]


@pytest.mark.parametrize("done", range(6))
async def test_a_state_of_a_sampler_resumes_exactly(device: Device, done: int) -> None:
    async with loader(device) as first:
        batches = first.epoch(2)
        before = [index for _ in range(done) for index in (await anext(batches)).indices]
        state = json.loads(json.dumps(first.state_dict()))
    async with loader(device, batch_size=4) as second:
        second.load_state_dict(state)
        if done:
            assert second.state_dict() == state
            rest = [index async for batch in second for index in batch.indices]
            assert before + rest == drawn(2)
        assert [index async for batch in second for index in batch.indices] == drawn(3 if done else 0)


async def test_a_resumed_epoch_refuses_another_order_of_the_sampler(device: Device) -> None:
    async with loader(device) as first:
        await anext(aiter(first))
        state = first.state_dict()
    async with loader(device, Weights(10, 14, seed=1)) as second:
        second.load_state_dict(state)
        for _ in range(2):  # the state stays loaded
            with pytest.raises(InvalidArgumentError, match="other indices for the 3 samples of epoch 0"):
                await anext(aiter(second))
        assert [index async for batch in second.epoch(1) for index in batch.indices] == drawn(1, seed=1)


async def test_states_name_the_kind_of_their_order(device: Device) -> None:
    state, plain = loader(device).state_dict(), DataLoader(device, range(10)).state_dict()
    assert "sampler" not in plain
    with pytest.raises(InvalidArgumentError, match=r"order of a sampler, .*order of the source: .*with its sampler="):
        DataLoader(device, range(10)).load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match=r"order of the source, .*order of a sampler: .*without shuffle"):
        loader(device).load_state_dict(plain)
    with pytest.raises(InvalidArgumentError, match="has the digest 3"):
        loader(device).load_state_dict(state | {"sampler": 3})


async def test_a_state_of_an_earlier_version_is_loaded(device: Device) -> None:
    state = {
        "version": 1,
        "epoch": 2,
        "position": 4,
        "batches": 2,
        "ahead": [[3, 4]],
        "samples": 10,
        "shuffle": [0, None],
    }
    async with DataLoader(device, range(10), batch_size=2, shuffle=Shuffle(0)) as each:
        each.load_state_dict(state)
        assert each.state_dict() == state
        assert [batch.number async for batch in each] == [2, 4]


async def test_ranks_with_different_samplers_have_no_common_state(device: Device) -> None:
    states = []
    for rank in range(2):
        async with loader(device, Weights(10, 14, seed=rank), shard=(rank, 2)) as each:
            await anext(aiter(each))
            states.append(each.state_dict())
    with pytest.raises(InvalidArgumentError, match="samplers of ranks 0 and 1 have given different orders"):
        DataLoader.merge_state_dicts(states)
    assert DataLoader.merge_state_dicts(states[:1]) == states[0]


class OfOneRank(Weights):
    num_replicas = 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sampler": 3}, InvalidTypeError, "an iterable of the indices"),
        ({"sampler": iter([0])}, InvalidTypeError, "has one epoch only"),
        ({"sampler": [0], "shuffle": Shuffle()}, InvalidArgumentError, "leave one out"),
        ({"sampler": OfOneRank(1, 1), "shard": (0, 2)}, InvalidArgumentError, "the samples of one rank"),
        ({"batch_sampler": [[0]]}, TypeError, "use sampler="),
    ],
)
async def test_wrong_samplers(device: Device, options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DataLoader(device, range(10), **options)


async def test_a_stream_has_no_sampler(device: Device) -> None:
    with pytest.raises(InvalidArgumentError, match="gives the indices of samples"):
        DataLoader(device, iter(range(10)), sampler=[0])


class Fails(Weights):
    def set_epoch(self, epoch: int) -> None:
        raise LookupError("no weights")


@pytest.mark.parametrize(
    ("sampler", "error", "match"),
    [
        ([0, 10], InvalidArgumentError, "has given index 10 for epoch 0, and the source has the indices 0 to 9"),
        ([-1], InvalidArgumentError, "has given index -1"),
        ([[0, 1]], InvalidTypeError, r"single samples, not \[0, 1\]"),
        ([0.0], InvalidTypeError, "not 0.0"),
        (Fails(1, 1), LookupError, "no weights"),
    ],
)
async def test_a_sampler_that_gives_no_indices(
    device: Device, sampler: Any, error: type[Exception], match: str
) -> None:
    async with loader(device, sampler) as each:
        with pytest.raises(error, match=match) as caught:
            await anext(aiter(each))
    if error is not InvalidArgumentError:
        assert caught.value.__notes__ == ["in sampler=, for epoch 0"]


async def test_a_sampler_without_a_length_or_samples(device: Device) -> None:
    class Unknown:
        def __iter__(self) -> Any:
            return iter([3, 1])

    async with loader(device, Unknown()) as each:
        with pytest.raises(InvalidTypeError, match="no length"):
            len(each)
        assert [batch.indices async for batch in each] == [(3, 1)]
        assert each.advice().workers == 1
    async with loader(device, []) as each:
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="no batch: 0 samples"):
                assert [batch.indices async for batch in each] == []


# -- rng and epoch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [FIELDS, None])
async def test_random_numbers_belong_to_epoch_and_position(device: Device, fields: Any) -> None:
    """Threads, processes, two ranks and a resumed loader have the same, and a sample drawn twice has two."""
    decode = augmented if fields is None else augments

    def make(**options: Any) -> DataLoader:
        return loader(device, **{"fields": fields, "decode": decode, **options})

    async with make(workers=3) as each:
        expected = await values(each.epoch(1))
        other = await values(each.epoch(2))
    assert len({number for _, number, _ in expected + other}) == 28
    assert [index for index, _, _ in expected] == drawn(1)
    assert [y for _, _, y in expected] == [index + (1000 if fields else 0) for index in drawn(1)]
    async with make(**EXECUTORS[1], batch_size=4) as each:
        assert await values(each.epoch(1)) == expected
    async with make(workers=1) as each:
        batches = each.epoch(1)
        for _ in range(2):
            await anext(batches)
        state = each.state_dict()
    async with make(**EXECUTORS[1]) as each:
        each.load_state_dict(state)
        assert await values(aiter(each)) == expected[6:]
    for rank in range(2):
        async with make(shard=(rank, 2)) as each:
            assert await values(each.epoch(1)) == expected[rank::2]


async def stream() -> AsyncIterator[int]:
    for number in range(7):
        yield number


@pytest.mark.parametrize("make", [lambda: iter(range(7)), stream])
async def test_samples_of_a_stream_have_positions(device: Device, make: Any) -> None:
    """A rank that repeats a sample of the start repeats its random number, too."""

    async def of(rank: int, world: int, window: int | None = None) -> list[tuple[int, float, int]]:
        shuffle = None if window is None else Shuffle(0, window)
        async with DataLoader(device, make(), fields=FIELDS, decode=augments, batch_size=2, shard=(rank, world),
                              shuffle=shuffle) as each:  # fmt: skip
            return await values(aiter(each))

    async with DataLoader(device, range(7), fields=FIELDS, decode=augments) as each:
        expected = await values(aiter(each))
    assert await of(0, 1) == expected
    assert await of(1, 2) == [*expected[1::2], expected[0]]
    assert [number for _, number, _ in await of(0, 1, 3)] == [number for _, number, _ in expected]


async def test_the_seed_of_the_order_is_that_of_the_random_numbers(device: Device) -> None:
    numbers = []
    for seed in (-1, 0, 1):
        async with DataLoader(device, range(5), fields=FIELDS, decode=augments, shuffle=Shuffle(seed)) as each:
            numbers.append([number for _, number, _ in await values(aiter(each))])
    async with DataLoader(device, range(5), fields=FIELDS, decode=augments) as each:
        assert [number for _, number, _ in await values(aiter(each))] == numbers[1]
    assert len({number for each in numbers for number in each}) == 15


async def test_a_seed_keeps_its_random_numbers(device: Device) -> None:
    """A resumed run, also under a later version, goes on with the same ones."""
    async with DataLoader(device, range(2), fields=FIELDS, decode=augments) as each:
        assert [number for _, number, _ in await values(aiter(each))] == pytest.approx(NUMBERS)


NUMBERS = [0.8953693509101868, 0.24387460947036743]


def first_argument(epoch: Any) -> Any:
    return {"y": epoch}


def passes_on(sample: Any, **others: Any) -> Any:
    assert not others
    return {"y": sample}


def with_default(sample: Any, epoch: int = -1) -> Any:
    return {"y": epoch}


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        (first_argument, [0, 1]),
        (passes_on, [0, 1]),
        (with_default, [5, 5]),
        (functools.partial(with_default, epoch=9), [9, 9]),
        (np.abs, [0, 1]),
    ],
)
async def test_only_keywords_that_decode_names_are_passed(device: Device, decode: Any, expected: list[int]) -> None:
    async with DataLoader(device, range(2), decode=decode, batch_size=2) as each:
        batch = await anext(each.epoch(5))
        (field,) = batch.keys()
        assert (await batch.stream.download(batch[field])).tolist() == expected


async def test_a_checked_decoder_gets_the_same_random_numbers_again() -> None:
    import aiocuda

    async with aiocuda.open_device(driver="host", check=True) as device:
        async with DataLoader(device, range(3), fields=FIELDS, decode=augments) as each:
            checked = await values(aiter(each))
    async with aiocuda.open_device(driver="host") as device:
        async with DataLoader(device, range(3), fields=FIELDS, decode=augments) as each:
            assert await values(aiter(each)) == checked
