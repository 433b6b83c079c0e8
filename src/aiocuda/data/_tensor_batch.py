"""TensorBatch: a batch as PyTorch's own tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from .._base._mistakes import refuses
from ._fields import are_positional
from ._names import lacks

__all__ = ["FieldMapping", "TensorBatch"]


@lacks
@refuses("is a mapping of arrays: `for (x,) in loader` unpacks a batch with one field, and batch[field] is an array")
class FieldMapping:
    """The base of batches: it refuses what their arrays have."""

    __slots__ = ()


@lacks
class TensorBatch(FieldMapping, dict[Any, Any]):
    """A batch as PyTorch's own tensors: a dictionary, by field. ``output="torch"`` of a loader delivers it.

    If the fields are 0, 1, …, iteration yields the values: ``for images, labels in loader``. The tensors live as long
    as the program refers to them, and were written on the stream of PyTorch that was current when the batch was
    requested. So `keep`, `used_on` and `free` do nothing: a program may call them as those of a `Batch`.

    Attributes
    ----------
    number : int
        The batch's number in its epoch, from 0.
    indices : tuple of int
        The index of each sample in the source.
    """

    def __init__(self, parts: Mapping[Any, Any], number: int = 0, indices: tuple[int, ...] = ()) -> None:
        super().__init__(parts)
        self.number = number
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        """Yield the names of the fields; the tensors, if the fields are 0, 1, …."""
        return iter(self.values() if are_positional(self.keys()) else self.keys())

    def __missing__(self, field: Any) -> Any:
        raise KeyError(f"the batch has no field {field!r}, only {list(self.keys())}")

    def keep(self) -> Self:
        """Return the batch."""
        return self

    def used_on(self, stream: Any) -> Self:
        """Return the batch. PyTorch's ``record_stream`` is for tensors that another stream uses."""
        return self

    def free(self) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return f"<TensorBatch {self.number} of {len(self.indices)} samples, {', '.join(map(str, self.keys()))}>"
