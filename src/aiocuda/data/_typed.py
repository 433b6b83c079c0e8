"""What a type checker needs for loaders: the class of their batches, and the keywords of `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy.typing as npt

from ._batch import Batch
from ._options import Executor, OnError
from ._sources import Shuffle
from ._sync_batch import SyncBatch

if TYPE_CHECKING:  # `typing` has no default before Python 3.13
    from typing_extensions import TypeVar

    #: What a loader delivers: a `Batch`, or a `TensorBatch` with ``output="torch"``.
    BatchT = TypeVar("BatchT", default=Batch)
    #: What a loader for a plain loop delivers: a `SyncBatch`, or a `TensorBatch` with ``output="torch"``.
    SyncBatchT = TypeVar("SyncBatchT", default=SyncBatch)
else:
    from typing import TypeVar

    BatchT = TypeVar("BatchT")
    SyncBatchT = TypeVar("SyncBatchT")

__all__ = ["BatchT", "FieldLike", "LoaderKeywords", "SyncBatchT"]

#: The shape and the dtype of one sample.
FieldLike: TypeAlias = tuple[int | Sequence[int], npt.DTypeLike]


class LoaderKeywords(TypedDict, total=False):
    """The keywords of `DataLoader` without ``output``, which tells the class of its batches."""

    fields: Mapping[Any, FieldLike] | Sequence[FieldLike] | None
    decode: Callable[..., Any] | None
    batch_size: int
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None
    workers: int
    executor: Executor
    ordered: bool
    shuffle: Shuffle | None
    sampler: Iterable[int] | None
    shard: tuple[int, int] | None
    prefetch: int
    on_error: OnError
    timeout: float | None
    restarts: int
