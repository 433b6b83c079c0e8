"""Sources: the samples of an epoch, divided into batches.

A source with ``__len__`` and ``__getitem__`` gets indices, and workers call ``source[index]``. An iterable is read by a
thread, one batch at a time; an asynchronous iterable by a task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from .._base._scope import Scope
from .._base._user_code import add_note, call, failure_of
from ..errors import InvalidTypeError
from ._order import Order, Permutation, Positions, WindowShuffle

__all__ = [
    "AsyncReader", "BatchPlan", "IndexFeed", "MapSource", "SourceKind", "StreamReader", "kind_of", "length_of",
]  # fmt: skip

SourceKind: TypeAlias = Literal["map", "iterable", "async"]

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
    """

    number: int
    indices: tuple[int, ...]
    samples: list[Any] | None
    padded: int
    end: int


def kind_of(source: Any) -> SourceKind:
    """Return how samples are taken from a source.

    Raises
    ------
    InvalidTypeError
        It is a string, bytes or a mapping, or has none of the three forms.
    """
    if isinstance(source, (str, bytes, bytearray, Mapping)):
        raise InvalidTypeError(
            f"a source of samples is a sequence, an iterable or an asynchronous iterable, not a "
            f"{type(source).__name__}: pass a list, for example list(x.items())"
        )
    if isinstance(source, AsyncIterable):
        return "async"
    # PyTorch's IterableDataset inherits a __getitem__ that raises.
    is_stream = any(base.__name__ == "IterableDataset" for base in type(source).__mro__)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not (is_stream or isinstance(source, type)):
        return "map"
    if isinstance(source, Iterable):
        return "iterable"
    raise InvalidTypeError(
        f"a source of samples has __len__ and __getitem__, __iter__ or __aiter__; {type(source).__name__} has none"
    )


def length_of(source: Any) -> int | None:
    """Return the number of samples, or None if the source has no length."""
    if not hasattr(source, "__len__"):
        return None
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


class IndexFeed:
    """The batches of a source with ``__len__`` and ``__getitem__``."""

    def __init__(self, length: int, order: Order) -> None:
        self._positions = Positions(length, order)
        self._permutation = None if order.shuffle is None else Permutation(length, order.shuffle, order.epoch)
        self._block = max(1, BLOCK // order.batch_size) * order.batch_size
        self._next = 0
        self._indices: list[int] = []  # of the samples from `_begin` on
        self._begin = 0

    def next_plan(self) -> BatchPlan | None:
        """Return the next batch; None after the last one."""
        if self._next == len(self._positions):
            return None
        step = self._positions.step(self._next)
        self._next += 1
        if step.end > self._begin + len(self._indices):
            samples = self._positions.samples(step.begin, self._block)
            self._indices = (samples if self._permutation is None else self._permutation.indices(samples)).tolist()
            self._begin = step.begin
        own = tuple(self._indices[step.begin - self._begin : step.end - self._begin])
        return BatchPlan(step.number, own, None, step.padded, step.position)


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
        self._head: list[tuple[int, Any]] = []  # the first samples, which ranks may repeat at the end
        self._own: list[tuple[int, Any]] = []  # of the next batch
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
        if len(self._head) < self._world - 1:  # one for each rank that may lack a sample at the end
            self._head.append(entry)
        at = self._position - self._begin
        if at >= 0 and at % self._world == self._rank:
            self._own.append(entry)
        self._position += 1
        if at + 1 == self._order.batch_size * self._world:
            return [self._plan(0)]
        return []

    def _plan(self, padded: int) -> BatchPlan:
        own, self._own = self._own, []
        number, self._number = self._number, self._number + 1
        self._begin = self._position
        return BatchPlan(number, tuple(index for index, _ in own), [each for _, each in own], padded, self._position)


class StreamReader:
    """The batches of an iterable. A thread calls `read`, which may block."""

    def __init__(self, source: Iterable[Any], order: Order) -> None:
        self._source = source
        self._iterator: Iterator[Any] | None = None
        self._batches = _StreamBatches(order)
        self._index = 0
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
                    self._iterator = call(iter, self._source)
                try:
                    sample = next(self._iterator)
                except StopIteration:
                    self._ended = True
                    self._plans.extend(self._batches.end())
                else:
                    self._plans.extend(self._batches.add(self._index, sample))
                    self._index += 1
        except BaseException as error:
            self._ended = True
            failure = failure_of(error)
            note_source(failure, self._index)
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

    def __init__(self, source: AsyncIterable[Any], order: Order, scope: Scope) -> None:
        self._source = source
        self._iterator: AsyncIterator[Any] | None = None
        self._batches = _StreamBatches(order)
        self._index = 0
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
            note_source(error, self._index)
            raise
        return self._plans.popleft() if self._plans else None

    async def _read(self) -> None:
        while not self._plans and not self._ended:
            if self._iterator is None:
                self._iterator = call(aiter, self._source)
            try:
                sample = await anext(self._iterator)
            except StopAsyncIteration:
                self._ended = True
                self._plans.extend(self._batches.end())
            else:
                self._plans.extend(self._batches.add(self._index, sample))
                self._index += 1

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


def note_source(error: BaseException, index: int) -> None:
    """Note at an error of a source which sample it was to return."""
    add_note(error, f"in the source of the loader, at sample {index}, counted from 0")
