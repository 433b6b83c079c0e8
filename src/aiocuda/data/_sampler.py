"""SampledOrder: the order that a sampler has given for one epoch."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .._base._user_code import add_note
from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["EMPTY_DIGEST", "SampledOrder", "check_sampler"]

#: Bytes of a digest.
_SIZE = 16

#: The digest of an epoch of which no sample was delivered.
EMPTY_DIGEST = hashlib.blake2b(digest_size=_SIZE).hexdigest()


class SampledOrder:
    """The global order that a sampler has given for one epoch: an index of the source for each position."""

    def __init__(self, indices: npt.NDArray[np.int64]) -> None:
        self._indices = indices
        self._hash = hashlib.blake2b(digest_size=_SIZE)
        self._hashed = 0  # positions

    @classmethod
    def read(cls, sampler: Iterable[Any], epoch: int, length: int, position: int = 0) -> Self:
        """Return the order of an epoch for a source of this length. **May block**: it iterates the sampler.

        The indices before the position are hashed.

        Raises
        ------
        InvalidTypeError, InvalidArgumentError
            The sampler gives something else than indices of the source.
        """
        try:
            indices = _indices(sampler, epoch)
        except BaseException as error:
            add_note(error, f"in sampler=, for epoch {epoch}")
            raise
        outside = np.flatnonzero((indices < 0) | (indices >= length))
        if outside.size:
            index = int(indices[outside[0]])
            raise InvalidArgumentError(
                f"sampler= has given index {index} for epoch {epoch}, and the source has the indices 0 to {length - 1}",
                index=index,
            )
        order = cls(indices)
        order.digest(position)
        return order

    def __len__(self) -> int:
        return len(self._indices)

    def indices(self, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the index at each of these positions."""
        return self._indices[positions]

    def digest(self, position: int) -> str:
        """Return a digest of the indices before a position, which is no smaller than that of the last call."""
        self._hash.update(self._indices[self._hashed : position].astype("<i8").tobytes())
        self._hashed = position
        return self._hash.hexdigest()


def check_sampler(sampler: Any, is_stream: bool, shuffle: Any, world: int) -> None:
    """Raise `InvalidTypeError` or `InvalidArgumentError` unless a sampler can give the order of each epoch."""
    if is_stream:
        raise InvalidArgumentError(
            "sampler= gives the indices of samples, and this source has none: give it __len__ and __getitem__, or use "
            "shuffle=Shuffle(seed=0, window=1000)"
        )
    if shuffle is not None:
        raise InvalidArgumentError("sampler= and shuffle= both give the order of the samples: leave one out")
    if isinstance(sampler, type):
        raise InvalidTypeError(f"sampler is an object, not {sampler!r}: make one, such as {sampler.__name__}(dataset)")
    if not isinstance(sampler, Iterable):
        raise InvalidTypeError(
            f"sampler is an iterable of the indices of an epoch, not {sampler!r}: a list of integers, or an object "
            "such as RandomSampler(dataset) of torch"
        )
    if isinstance(sampler, Iterator):
        raise InvalidTypeError(
            f"sampler={sampler!r} is an iterator, which has one epoch only: pass an object whose __iter__ begins anew"
        )
    if world > 1 and getattr(sampler, "num_replicas", 1) > 1:
        raise InvalidArgumentError(
            f"sampler={sampler!r} gives the samples of one rank, and shard= would divide these again: give every rank "
            "the sampler of the whole epoch"
        )


def _indices(sampler: Iterable[Any], epoch: int) -> npt.NDArray[np.int64]:
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
    return np.fromiter(map(_index, sampler), np.int64)


def _index(item: Any) -> int:
    try:
        return operator.index(item)
    except TypeError:
        cure = "; WeightedRandomSampler(weights, n) of torch draws by weights" if isinstance(item, float) else ""
        raise InvalidTypeError(f"sampler= gives integers, the indices of single samples, not {item!r}{cure}") from None
