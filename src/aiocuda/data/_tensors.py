"""Tensors: copies batches on a device into PyTorch's own tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..device import Device
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from ._batch import Batch, memory_of
from ._tensor_batch import TensorBatch

__all__ = ["Tensors", "check_alike", "check_output"]

#: What stays as it is: there is no memory to upload.
_PLAIN = (str, bytes, int, float, complex, np.generic, type(None))
_NUMBERS = (int, float, complex, np.generic)


class _Leaf(NamedTuple):
    """The place of a tensor in the form of a batch."""

    name: Any  #: of the array on the device
    like: Any  #: a tensor without memory, of this shape, strides and dtype, for an array of bytes; else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Path:
    """The name of an array that is not a field itself. It equals no key of the program."""

    keys: tuple[Any, ...]

    def __repr__(self) -> str:
        return repr(self.keys)


class Delivers(Protocol):
    """A loader that has delivered a batch."""

    def free_batch(self) -> None:
        """Free the memory of the batch after all work that uses it."""

    def put_back(self) -> None:
        """Deliver the batch again at the next request. Until then the state is that before it."""


class Tensors:
    """Copies batches on a device into PyTorch's own tensors, on the stream that is current where they are requested.

    The form of a batch is a mapping from field to a nested value, with a `_Leaf` in place of each array.
    """

    def __init__(self, device: Device) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise ImportError('output="torch" needs PyTorch: pip install torch', name="torch") from error
        torch = self._torch
        self._index = device.index if device.driver.name == "cuda" else None
        if self._index is not None and not torch.cuda.is_available():
            raise UnsupportedError(
                f'output="torch" needs a PyTorch that uses CUDA for {device!r}, and torch.cuda.is_available() is False'
            )
        self._place = torch.device("cpu") if self._index is None else torch.device("cuda", self._index)

    # -- delivery: the consumer's thread -------------------------------------------------------------------------

    def current_stream(self) -> Any:
        """Return PyTorch's current stream of the device; None without CUDA.

        Raises
        ------
        BusyError
            It is being captured into a graph.
        """
        if self._index is None:
            return None
        stream = self._torch.cuda.current_stream(self._index)
        with self._torch.cuda.stream(stream):
            self._check_not_captured(stream)
        return stream

    def _check_not_captured(self, stream: Any) -> None:
        """Raise `BusyError` if the stream, which is the current one, is being captured."""
        if stream is not None and self._torch.cuda.is_current_stream_capturing():
            raise BusyError(
                f"{stream!r} is being captured into a graph, which would copy this batch again at each replay: "
                "request the batch before, and copy it into a tensor of the graph"
            )

    async def next(self, request: Callable[[], Coroutine[Any, Any, Batch]], loader: Delivers) -> TensorBatch:
        """Request a batch, and return it as tensors. Its own memory is free after the copies."""
        stream = self.current_stream()  # before the wait, in which other tasks may set another one
        batch = await request()
        try:
            tensors = self.copied(batch, memory_of(batch).form, batch.number, batch.indices, stream)
        except BaseException:
            loader.put_back()
            raise
        loader.free_batch()
        return tensors

    def copied(
        self, arrays: Mapping[Any, Any], form: Mapping[Any, Any] | None, number: int, indices: tuple[int, ...],
        stream: Any,
    ) -> TensorBatch:  # fmt: skip
        """Return a batch of tensors, which are copied on this stream. ``arrays`` are exported by DLPack.

        Raises
        ------
        BusyError
            The stream is being captured into a graph, since the batch was requested.
        """
        with contextlib.nullcontext() if stream is None else self._torch.cuda.stream(stream):
            self._check_not_captured(stream)
            if form is None:
                parts = {name: self._torch.from_dlpack(array).clone() for name, array in arrays.items()}
            else:
                parts = _rebuilt(form, lambda leaf, _: self._tensor(leaf, arrays), ())
        return TensorBatch(parts, number, indices)

    def _tensor(self, leaf: Any, arrays: Mapping[Any, Any]) -> Any:
        if not isinstance(leaf, _Leaf):
            return leaf
        torch = self._torch
        if leaf.like is None:
            return torch.from_dlpack(arrays[leaf.name]).clone()
        tensor = torch.empty_like(leaf.like, device=self._place)
        if tensor.numel():
            self._bytes(tensor).copy_(torch.from_dlpack(arrays[leaf.name]).view(-1))
        return tensor

    def _bytes(self, tensor: Any) -> Any:
        """Return the memory of a dense tensor."""
        return tensor.as_strided((tensor.numel(),), (1,)).view(self._torch.uint8)

    # -- forms: any thread ---------------------------------------------------------------------------------------

    def split(self, parts: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Return the form of a batch, and its arrays by name. Strings, numbers and None stay in the form."""
        arrays: dict[Any, Any] = {}

        def leaf(value: Any, path: Any) -> Any:
            if isinstance(value, _PLAIN):
                return value
            like = None
            torch = self._torch
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout is torch.strided:
                value, like = self._dense(value)
                if not like.numel():
                    return _Leaf(path, like)
                value = self._bytes(value)
            arrays[path] = value
            return _Leaf(path, like)

        return {name: _rebuilt(part, leaf, name) for name, part in parts.items()}, arrays

    def _dense(self, tensor: Any) -> tuple[Any, Any]:
        """Return a tensor without gaps, and one without memory of its form. NumPy lacks some dtypes and strides."""
        tensor = tensor.detach()
        like = self._torch.empty_like(tensor, device="meta")
        if tensor.stride() != like.stride() or tensor.is_conj() or tensor.is_neg():
            tensor = self._torch.empty_like(tensor).copy_(tensor)
        return tensor, like

    def stacked(
        self, parts: Mapping[Any, list[Any]], indices: Sequence[int]
    ) -> tuple[dict[Any, Any], dict[Any, list[Any]]]:
        """Return the form of a batch, and by name the array of each sample. ``parts`` has those of decoded samples.

        Strings and None become lists, with an item for each sample.

        Parameters
        ----------
        parts
        indices
            That of each sample in the source.

        Raises
        ------
        InvalidArgumentError
            Samples have other keys, or lists of another length, than the first one.
        ValueError
            Tensors of one part have different shapes or dtypes.
        InvalidTypeError
            Tensors are sparse.
        """
        arrays: dict[Any, list[Any]] = {}

        def stack(values: list[Any], path: Any) -> Any:
            first = values[0]
            if isinstance(first, Mapping):
                check_alike(values, indices, path)
                return {key: stack([value[key] for value in values], _join(path, key)) for key in first}
            if isinstance(first, (list, tuple)) and not all(isinstance(item, _NUMBERS) for item in first):
                check_alike(values, indices, path)
                parts = [stack(list(each), _join(path, at)) for at, each in enumerate(zip(*values, strict=True))]
                return _like(first, parts)
            if any(value is None or isinstance(value, (str, bytes)) for value in values):
                return values
            if not all(isinstance(value, self._torch.Tensor) for value in values):
                arrays[path] = values
                return _Leaf(path, None)
            return self._stack_tensors(values, path, arrays)

        return {name: stack(values, name) for name, values in parts.items()}, arrays

    def _stack_tensors(self, values: list[Any], path: Any, arrays: dict[Any, list[Any]]) -> _Leaf:
        torch, first = self._torch, values[0]
        kinds = {(tuple(value.shape), value.dtype) for value in values}
        if len(kinds) > 1:
            raise ValueError(
                f"part {path!r} has tensors of different shapes or dtypes in one batch: {kinds}; make them equal in "
                "decode=, or give the loader a collate="
            )
        if any(value.layout is not torch.strided for value in values):
            raise InvalidTypeError(f"part {path!r} has sparse tensors: return tensor.to_dense() from decode=")
        if first.numel():
            arrays[path] = [self._bytes(value.detach().resolve_conj().resolve_neg().contiguous()).numpy()
                            for value in values]  # fmt: skip
        return _Leaf(path, torch.empty((len(values), *first.shape), dtype=first.dtype, device="meta"))


def check_alike(values: Sequence[Any], indices: Sequence[int], path: Any = None) -> None:
    """Raise `InvalidArgumentError` unless all samples have the keys of the first one, or lists of its length."""
    where = "" if path is None else f" of part {path!r}"
    first = _keys(values[0])
    for value, index in zip(values, indices, strict=True):
        if _keys(value) != first:
            raise InvalidArgumentError(
                f"samples of one batch have different keys{where}: {_said(value)} in sample {index}, and "
                f"{_said(values[0])} in sample {indices[0]}; make them equal in decode=, or give the loader a collate=",
                index=index,
            )


def _keys(value: Any) -> Any:
    """Return what samples of one batch have in common: keys, a length, or the type."""
    if isinstance(value, Mapping):
        return value.keys()
    return len(value) if isinstance(value, (list, tuple)) else type(value)


def _said(value: Any) -> str:
    """Return the keys of a value in words."""
    if isinstance(value, Mapping):
        return repr(list(value))
    return f"{len(value)} items" if isinstance(value, (list, tuple)) else type(value).__name__


def check_output(output: Any) -> None:
    """Raise `InvalidArgumentError` unless a loader can deliver batches of this kind."""
    if output not in (None, "torch"):
        raise InvalidArgumentError(f"output is 'torch', or None for a Batch, not {output!r}")


def _rebuilt(value: Any, leaf: Callable[[Any, Any], Any], path: Any) -> Any:
    """Return a nested value with ``leaf(value, path)`` in place of each leaf."""
    if isinstance(value, Mapping):
        return {key: _rebuilt(each, leaf, _join(path, key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, _Leaf):
        return _like(value, [_rebuilt(each, leaf, _join(path, at)) for at, each in enumerate(value)])
    return leaf(value, path)


def _like(value: Any, parts: list[Any]) -> Any:
    """Return these parts as a list, a tuple or a named tuple, as the value is."""
    if isinstance(value, list):
        return parts
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _join(path: Any, key: Any) -> _Path:
    return _Path((*path.keys, key) if isinstance(path, _Path) else (path, key))
