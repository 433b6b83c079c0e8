"""The order of samples: shuffled or not, shared by the ranks of a job, from any position on."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._base._checks import check_integer
from ..errors import InvalidArgumentError

__all__ = ["Order", "Permutation", "Positions", "Shuffle", "Step", "WindowShuffle"]

#: Rounds of the Feistel network. With eight, all orders of five items are equally frequent within 1 % (tested).
ROUNDS = 8

#: Half the bits of the smallest domain: with fewer, some orders of a few items never occur.
MIN_HALF_BITS = 3


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
