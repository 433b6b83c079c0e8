"""Kill and resume with the loaders of other libraries. `make slow` runs these tests with the group ``loaders``."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda.data import to_device

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]

ITEMS, EPOCH = 10, 5  # items and batches of an epoch


class Counts:
    """Items of two epochs, with the state of a map dataset of PyTorch's: none."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        return index


def stateful(**options: Any) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(Counts(), batch_size=2, **options)


def shuffled() -> Any:
    """Each epoch has its own order, by a sampler whose state is saved with the loader's."""
    torch = pytest.importorskip("torch")

    class Sampler(torch.utils.data.Sampler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.epoch = self.at = 0

        def __iter__(self) -> Iterator[int]:
            order = np.random.default_rng(self.epoch).permutation(ITEMS).tolist()
            while self.at < ITEMS:
                self.at += 1
                yield order[self.at - 1]
            self.epoch, self.at = self.epoch + 1, 0

        def state_dict(self) -> Any:
            return {"epoch": self.epoch, "at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.epoch, self.at = state["epoch"], state["at"]

    return stateful(sampler=Sampler())


def streamed() -> Any:
    """An iterable dataset with a state of its own."""
    torch = pytest.importorskip("torch")
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[int]:
            while self.at < ITEMS:
                self.at += 1
                yield self.at - 1
            self.at = 0

        def state_dict(self) -> Any:
            return {"at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]

    return torchdata.StatefulDataLoader(Stream(), batch_size=2)


def nodes() -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    batches = nodes.Batcher(nodes.IterableWrapper(range(ITEMS)), batch_size=2)
    return nodes.Loader(nodes.Prefetcher(nodes.Mapper(batches, np.asarray), prefetch_factor=2))


def grain_dataset() -> Any:
    grain = pytest.importorskip("grain")
    return grain.MapDataset.range(ITEMS).shuffle(seed=3).batch(2).to_iter_dataset()


def grain_repeated() -> Any:
    """Two epochs as one, by Grain."""
    grain = pytest.importorskip("grain")
    return grain.MapDataset.range(ITEMS).shuffle(seed=3).repeat(2).batch(2).to_iter_dataset()


def grain_loader() -> Any:
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(ITEMS, shuffle=True, seed=3, num_epochs=1)
    return grain.DataLoader(data_source=range(ITEMS), sampler=sampler, operations=[grain.transforms.Batch(2)])


LOADERS: dict[str, Any] = {
    "StatefulDataLoader": stateful,
    "StatefulDataLoader with processes": lambda: stateful(num_workers=1, multiprocessing_context="fork"),
    "a shuffled StatefulDataLoader": shuffled,
    "a stream in a StatefulDataLoader": streamed,
    "torchdata's nodes": nodes,
    "Grain's dataset": grain_dataset,
    "two epochs of Grain's dataset": grain_repeated,
    "Grain's DataLoader": grain_loader,
}


def plain(loader: Iterable[Any]) -> list[list[int]]:
    """Two epochs of the loader by itself."""
    found = [np.asarray(batch).tolist() for batch in loader]
    if len(found) < 2 * EPOCH:
        found += [np.asarray(batch).tolist() for batch in loader]
    return found


async def run(make: Any, saved: bytes | None, most: int) -> tuple[list[list[int]], bytes]:
    """The next batches of a new loader, and the state after them: the process ends there."""
    found: list[list[int]] = []
    async with aiocuda.open_device(driver="host") as device, to_device(make(), device) as batches:
        if saved is not None:
            batches.load_state_dict(pickle.loads(saved))
        while len(found) < most:
            async for batch in batches:
                found.append((await batch.stream.download(batch[0])).tolist())
                if len(found) == most:
                    break
        return found, pickle.dumps(batches.state_dict())


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_killed_at_each_batch_of_two_epochs_it_goes_on_exactly(make: Any) -> None:
    expected = plain(make())
    for killed in range(1, len(expected)):
        before, state = asyncio.run(run(make, None, killed))
        after, _ = asyncio.run(run(make, state, len(expected) - killed))
        assert before + after == expected, killed


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_state_goes_into_the_loader_itself(make: Any) -> None:
    expected = plain(make())
    _, state = asyncio.run(run(make, None, 2))
    loader = make()
    owner = iterator = loader if hasattr(loader, "load_state_dict") else iter(loader)
    getattr(owner, "load_state_dict", None) and owner.load_state_dict(pickle.loads(state))
    getattr(owner, "set_state", None) and owner.set_state(pickle.loads(state))
    assert [np.asarray(batch).tolist() for batch in iterator][: EPOCH - 2] == expected[2:EPOCH]
