"""Sources: the samples of an epoch, in their order, divided into the batches of a rank.

A source with ``__len__`` and ``__getitem__`` gets indices, and workers call ``source[index]``. An iterable is read by a
thread, one batch at a time; an asynchronous iterable by a task.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .._base._checks import check_integer
from .._base._mistakes import keywords
from .._base._scope import Scope
from .._base._user_code import add_note, call, failure_of
from ..errors import InvalidArgumentError, InvalidTypeError
from ._names import lacks
from ._sampler import SampledOrder

__all__ = [
    "AsyncReader", "BatchPlan", "IndexFeed", "MapSource", "Order", "Permutation", "Positions", "Shuffle", "SourceKind",
    "Step", "StreamReader", "WindowShuffle", "iterator_has_ended", "kind_of", "length_of",
]  # fmt: skip

SourceKind: TypeAlias = Literal["map", "iterable", "async"]

#: Rounds of the Feistel network. With eight, all orders of five items are equally frequent within 1 % (tested).
ROUNDS = 8

#: Half the bits of the smallest domain: with fewer, some orders of a few items never occur.
MIN_HALF_BITS = 3

#: Indices that a permutation computes in one call: NumPy's overhead for each index is then small.
BLOCK = 1024


class MapSource(Protocol):
    """A source whose samples have indices: a sequence, or a dataset of PyTorch or Hugging Face."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class BatchPlan(NamedTuple):
    """The samples of one batch.

    Attributes
    ----------
    number
        The batch's number in its epoch.
    indices
        The index of each sample in the source.
    samples
        The samples of a stream. None if workers call ``source[index]``.
    padded
        How many of the samples repeat samples of the start of the epoch.
    end
        The global position after the batch.
    epoch
    positions
        The position of each sample in the global order of the epoch.
    """

    number: int
    indices: tuple[int, ...]
    samples: list[Any] | None
    padded: int
    end: int
    epoch: int
    positions: tuple[int, ...]


def kind_of(source: Any) -> SourceKind:
    """Return how samples are taken from a source.

    Raises
    ------
    InvalidTypeError
        It is a string, bytes or a mapping, or has none of the three forms.
    """
    if isinstance(source, (str, bytes, bytearray, Mapping, os.PathLike)):
        is_path = isinstance(source, (str, os.PathLike))
        cure = f"sorted(Path({str(source)!r}).iterdir())" if is_path else "list(x.items())"
        raise InvalidTypeError(
            f"a source of samples is a sequence, an iterable or an asynchronous iterable, not a "
            f"{type(source).__name__}: pass a list, for example {cure}"
        )
    if isinstance(source, AsyncIterable):
        return "async"
    # PyTorch's IterableDataset inherits a __getitem__ that raises.
    is_stream = any(base.__name__ == "IterableDataset" for base in type(source).__mro__)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not (is_stream or isinstance(source, type)):
        return "map"
    if isinstance(source, Iterable):
        return "iterable"
    only = [name for name in ("__len__", "__getitem__") if hasattr(source, name) and not isinstance(source, type)]
    raise InvalidTypeError(
        f"a source of samples has __len__ and __getitem__, __iter__ or __aiter__; {type(source).__name__} has "
        f"{f'{only[0]} only' if only else 'none'}"
    )


def length_of(source: Any, kind: SourceKind | None = None) -> int | None:
    """Return the number of samples, or None if the source has no length. One of the kind "map" must have one.

    Raises
    ------
    InvalidTypeError
        The length of such a source is none.
    """
    if not hasattr(source, "__len__"):
        return None
    try:
        return len(source)
    except (TypeError, NotImplementedError) as error:
        if kind == "map":
            raise InvalidTypeError(
                f"len(source) of {type(source).__name__} has failed, and it is the number of samples, an integer: "
                f"{error!r}"
            ) from error
        return None


# -- the order ---------------------------------------------------------------------------------------------------------


@lacks
@dataclasses.dataclass(frozen=True, slots=True)
class Shuffle:
    """A random order of samples, the same for every rank and every run with the same seed. Each epoch has its own.

    Parameters
    ----------
    seed
        Any integer.
    window
        For a stream of samples: the number of samples among which the next one is chosen. They are kept in memory. None
        for a source with ``__len__`` and ``__getitem__``, whose order is a permutation of all indices; it takes no
        memory.

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        A seed or a window that is no integer; a window below 1.
    """

    seed: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        check_integer(self.seed, "seed")
        if self.window is not None:
            check_integer(self.window, "window")
            if self.window < 1:
                raise InvalidArgumentError(f"window is at least 1 sample, not {self.window}", window=self.window)


_checked: Any = keywords(
    "Shuffle takes seed= and window=",
    "Shuffle(seed=0), or Shuffle(seed=0, window=1000) for a stream",
    buffer_size="use window=, the number of samples among which the next one is chosen",
    epoch="loader.epoch(n) has the batches of an epoch",
    generator="use seed=, an integer",
)(Shuffle.__init__)
setattr(Shuffle, "__init__", _checked)  # noqa: B010 - the decorator of the class has made the method


def _key(shuffle: Shuffle, epoch: int) -> bytes:
    """Return 64 bytes that seed and epoch determine, the same on every machine."""
    return hashlib.blake2b(f"aiocuda shuffle {shuffle.seed} {epoch}".encode()).digest()


class Permutation:
    """A random permutation of ``range(length)``, computed for each position on its own, without memory.

    A Feistel network permutes the numbers of an even count of bits. A result that is not below ``length`` is permuted
    again until it is (cycle walking): that stays a permutation, and takes fewer than four tries on average. Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002.
    """

    def __init__(self, length: int, shuffle: Shuffle, epoch: int) -> None:
        self._length = np.uint64(length)
        half = max(MIN_HALF_BITS, (max(length - 1, 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        self._keys = np.frombuffer(_key(shuffle, epoch), "<u8").astype(np.uint64)[:ROUNDS]

    def indices(self, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return the index at each of these positions, which are below the length."""
        found = self._permuted(positions)
        outside = np.flatnonzero(found >= self._length)
        while outside.size:
            found[outside] = self._permuted(found[outside])
            outside = outside[found[outside] >= self._length]
        return found

    def _permuted(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each number: the finaliser of SplitMix64 (Steele et al., 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


class WindowShuffle:
    """A random order of a stream: each item is chosen among the next ``window`` items."""

    def __init__(self, window: int, shuffle: Shuffle, epoch: int) -> None:
        self._size = window
        self._window: list[Any] = []
        # Not `Generator.integers`: NumPy may change its results. Those of the bit generator are fixed.
        self._bits = np.random.PCG64(int.from_bytes(_key(shuffle, epoch)[:16], "little"))

    def add(self, item: Any) -> list[Any]:
        """Return the items that come next, now that one more has been read: none or one."""
        if len(self._window) < self._size:
            self._window.append(item)
            return []
        at = self._choose()
        chosen, self._window[at] = self._window[at], item
        return [chosen]

    def end(self) -> list[Any]:
        """Return the rest, in its random order."""
        rest = []
        while self._window:
            at = self._choose()
            self._window[at], self._window[-1] = self._window[-1], self._window[at]
            rest.append(self._window.pop())
        return rest

    def _choose(self) -> int:
        return int(self._bits.random_raw()) % len(self._window)


class Order(NamedTuple):
    """How the samples of an epoch are divided into the batches of this rank."""

    batch_size: int
    drop_last: bool
    shard: tuple[int, int]
    shuffle: Shuffle | None
    epoch: int
    start: int  #: the global position of the first batch
    first: int  #: the number of the first batch
    sampled: SampledOrder | None = None  #: the indices of a sampler


class Step(NamedTuple):
    """One batch of a rank: a range of the samples of this rank, which are counted from the start of the run."""

    number: int  #: the batch's number in its epoch
    begin: int  #: its first sample
    end: int  #: the sample after its last
    padded: int  #: how many of its samples repeat samples of the start of the epoch
    position: int  #: the global position after this batch, when every rank has delivered its own


class Positions:
    """The positions of one rank's batches: of the global order, a rank takes every ``world``-th position.

    Every rank has the same number of batches. Without ``drop_last`` the ranks whose last position lies after the end
    repeat samples from the start.
    """

    def __init__(self, length: int, order: Order) -> None:
        self._length = length
        self._batch_size = batch_size = order.batch_size
        self._rank, self._world = order.shard
        self._start = start = order.start
        self._first = order.first
        left = max(0, length - start)
        #: The number of samples of this rank, padding included.
        self._own = left // (batch_size * self._world) * batch_size if order.drop_last else -(-left // self._world)

    def __len__(self) -> int:
        return (self._own + self._batch_size - 1) // self._batch_size

    def step(self, at: int) -> Step:
        """Return the ``at``-th of the batches that are left."""
        begin = at * self._batch_size
        end = min(begin + self._batch_size, self._own)
        real = -(-(self._length - self._start - self._rank) // self._world)  # samples that repeat no others
        padded = max(0, end - max(begin, real))
        return Step(self._first + at, begin, end, padded, min(self._start + end * self._world, self._length))

    def samples(self, begin: int, count: int) -> npt.NDArray[np.uint64]:
        """Return the positions of at most ``count`` samples of this rank in the global order, from ``begin`` on."""
        positions = np.arange(begin, min(begin + count, self._own), dtype=np.uint64) * np.uint64(self._world)
        positions += np.uint64(self._start + self._rank)
        positions %= np.uint64(self._length)
        return positions


# -- the batches -------------------------------------------------------------------------------------------------------


class IndexFeed:
    """The batches of a source with ``__len__`` and ``__getitem__``."""

    def __init__(self, length: int, order: Order) -> None:
        self._epoch = order.epoch
        self._permutation: Permutation | SampledOrder | None = order.sampled
        if order.sampled is not None:
            length = len(order.sampled)
        elif order.shuffle is not None:
            self._permutation = Permutation(length, order.shuffle, order.epoch)
        self.samples = length  #: of the epoch
        self._positions = Positions(length, order)
        self._batches = len(self._positions)
        self._block = max(1, BLOCK // order.batch_size) * order.batch_size
        self._next = 0
        self._indices: list[int] = []  # of the samples from `_begin` on
        self._places: list[int] = []  # their positions
        self._begin = 0

    def next_plan(self) -> BatchPlan | None:
        """Return the next batch; None after the last one."""
        if self._next == self._batches:
            return None
        step = self._positions.step(self._next)
        self._next += 1
        if step.end > self._begin + len(self._indices):
            samples = self._positions.samples(step.begin, self._block)
            self._indices = self._places = samples.tolist()
            if self._permutation is not None:
                self._indices = self._permutation.indices(samples).tolist()
            self._begin = step.begin
        own = slice(step.begin - self._begin, step.end - self._begin)
        indices = tuple(self._indices[own])
        places = indices if self._permutation is None else tuple(self._places[own])
        return BatchPlan(step.number, indices, None, step.padded, step.position, self._epoch, places)


class _StreamBatches:
    """Divides a stream into the batches of one rank."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._rank, self._world = order.shard
        shuffle = order.shuffle
        self._window = None
        if shuffle is not None and shuffle.window is not None:
            self._window = WindowShuffle(shuffle.window, shuffle, order.epoch)
        self._position = 0  # of the next sample, in the global order
        # Samples with their positions and indices: the first ones, which ranks may repeat at the end, and those of the
        # next batch.
        self._head: list[tuple[int, int, Any]] = []
        self._own: list[tuple[int, int, Any]] = []
        self._number = order.first
        self._begin = order.start  # position of the next batch, which has one part for each rank

    def add(self, index: int, sample: Any) -> list[BatchPlan]:
        """Return the batches that are complete with one more sample."""
        if self._window is None:
            return self._place((index, sample))
        return [plan for entry in self._window.add((index, sample)) for plan in self._place(entry)]

    def end(self) -> list[BatchPlan]:
        """Return the batches that are left at the end of the stream."""
        plans = [] if self._window is None else [plan for entry in self._window.end() for plan in self._place(entry)]
        rest = self._position - self._begin
        if rest > 0 and not self._order.drop_last:
            padded = -(-rest // self._world) - len(self._own)  # 0 or 1: each rank has as many as rank 0
            if padded:
                self._own.append(self._head[(self._rank - rest % self._world) % len(self._head)])
            plans.append(self._plan(padded))
        return plans

    def _place(self, entry: tuple[int, Any]) -> list[BatchPlan]:
        placed = (self._position, *entry)
        if len(self._head) < self._world - 1:  # one for each rank that may lack a sample at the end
            self._head.append(placed)
        at = self._position - self._begin
        if at >= 0 and at % self._world == self._rank:
            self._own.append(placed)
        self._position += 1
        if at + 1 == self._order.batch_size * self._world:
            return [self._plan(0)]
        return []

    def _plan(self, padded: int) -> BatchPlan:
        own, self._own = self._own, []
        number, self._number = self._number, self._number + 1
        self._begin = self._position
        places, indices, samples = zip(*own, strict=True)
        return BatchPlan(number, indices, list(samples), padded, self._position, self._order.epoch, places)


class StreamReader:
    """The batches of an iterable. A thread calls `read`, which may block."""

    def __init__(
        self, source: Iterable[Any], order: Order, iterate: Callable[[Iterable[Any]], Iterator[Any]] = iter
    ) -> None:
        self._source = source
        self._iterate = iterate
        self._iterator: Iterator[Any] | None = None
        self._batches = _StreamBatches(order)
        self.samples = 0  #: that were read
        self._plans: deque[BatchPlan] = deque()
        self._ended = False

    @property
    def has_own_iterator(self) -> bool:
        """True if the source has returned an iterator other than itself: another reader begins at its start."""
        return self._iterator is not None and self._iterator is not self._source

    def read(self) -> BatchPlan | None:
        """Return the next batch; None after the last one. **May block.**"""
        try:
            while not self._plans and not self._ended:
                if self._iterator is None:
                    self._iterator = call(self._iterate, self._source)
                try:
                    sample = next(self._iterator)
                except StopIteration:
                    self._ended = True
                    self._plans.extend(self._batches.end())
                else:
                    self._plans.extend(self._batches.add(self.samples, sample))
                    self.samples += 1
        except BaseException as error:
            self._ended = True
            failure = failure_of(error)
            note_source(failure, self.samples)
            if failure is error:
                raise
            raise failure from error
        return self._plans.popleft() if self._plans else None

    def close(self) -> None:
        """Close the iterator, if it is a generator. **May block.**"""
        self._ended = True
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


class AsyncReader:
    """The batches of an asynchronous iterable. While its code runs, the task is inside the scope of the loader."""

    def __init__(
        self,
        source: AsyncIterable[Any],
        order: Order,
        scope: Scope,
        iterate: Callable[[AsyncIterable[Any]], AsyncIterator[Any]] = aiter,
    ) -> None:
        self._source = source
        self._iterate = iterate
        self._iterator: AsyncIterator[Any] | None = None
        self._batches = _StreamBatches(order)
        self.samples = 0  #: that were read
        self._plans: deque[BatchPlan] = deque()
        self._ended = False
        self._scope = scope

    @property
    def has_own_iterator(self) -> bool:
        """True if the source has returned an iterator other than itself: another reader begins at its start."""
        return self._iterator is not None and self._iterator is not self._source

    async def read(self) -> BatchPlan | None:
        """Return the next batch; None after the last one."""
        try:
            with self._scope.inside():
                await self._read()
        except Exception as error:
            self._ended = True
            note_source(error, self.samples)
            raise
        return self._plans.popleft() if self._plans else None

    async def _read(self) -> None:
        while not self._plans and not self._ended:
            if self._iterator is None:
                self._iterator = call(self._iterate, self._source)
            try:
                sample = await anext(self._iterator)
            except StopAsyncIteration:
                self._ended = True
                self._plans.extend(self._batches.end())
            else:
                self._plans.extend(self._batches.add(self.samples, sample))
                self.samples += 1

    async def aclose(self) -> None:
        """Close the iterator, if it is an asynchronous generator."""
        self._ended = True
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "aclose", None)
        if close is not None:
            try:
                with self._scope.inside():
                    await close()
            except StopAsyncIteration as error:
                raise failure_of(error) from error


def iterator_has_ended(source: object, use: str) -> InvalidArgumentError:
    """Return the error for a source that gives nothing, since it is an iterator that was read before."""
    return InvalidArgumentError(
        f"the source of these batches, of type {type(source).__name__}, is an iterator that has ended: pass an object "
        "that can be iterated again, such as a list, a loader, or one whose __iter__ is the generator function; or "
        f"make an iterator and {use} for each epoch"
    )


def note_source(error: BaseException, index: int) -> None:
    """Note at an error of a source which sample it was to return."""
    add_note(error, f"in the source of the loader, at sample {index}, counted from 0")
