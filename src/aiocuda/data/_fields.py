"""The decoding of single samples into the fields of a slot, on threads and in worker processes.

Worker processes import this module: it needs only NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGNMENT", "Field", "Layout", "RowViews", "SampleDecoder", "are_positional"]

#: Bytes. Each field of a slot begins at a multiple of it, as rows of memory on a device do.
ALIGNMENT = 256


def are_positional(fields: Iterable[Any]) -> bool:
    """True if the fields are 0, 1, and so on: the parts of a tuple, or a single array."""
    return all(type(field) is int and field == place for place, field in enumerate(fields))


class Field(NamedTuple):
    """One array of a batch: ``batch_size`` samples of this shape, at this offset in the memory of a slot."""

    name: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


class RowViews(dict[Any, "npt.NDArray[Any]"]):
    """The views that a decoder writes a sample into, by field. No entry can be replaced."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        """Yield the names of the fields; the views, if the fields are 0, 1, …, as a batch does."""
        return iter(self.values() if are_positional(self.keys()) else self.keys())

    def __setitem__(self, name: Any, value: object) -> None:
        raise _refused(f"out[{name!r}] = …", name)

    def __setattr__(self, name: str, value: object) -> None:
        raise _refused(f"out.{name} = …", name if name in self else next(iter(self.keys())))

    def update(self, *args: Any, **views: Any) -> None:
        """Raise a TypeError."""
        raise _refused("out.update(…)", next(iter(self.keys())))

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # `|` makes a dictionary
        raise _refused("out |= …", next(iter(self.keys())))

    def __missing__(self, name: Any) -> npt.NDArray[Any]:
        raise KeyError(f"there is no field {name!r}, only {list(self.keys())}")


def _refused(what: str, name: Any) -> TypeError:
    cure = f"write out[{name!r}][...] = …, or np.copyto(out[{name!r}], …)"
    return TypeError(f"{what} would replace the view and write nothing: {cure}")


class Layout:
    """Where the fields of a batch lie in the memory of a slot.

    Attributes
    ----------
    batch_size
    fields
    nbytes
        The size of a slot.
    """

    def __init__(self, fields: Mapping[Any, tuple[tuple[int, ...], np.dtype[Any]]], batch_size: int) -> None:
        self.batch_size = batch_size
        self.fields: list[Field] = []
        self.nbytes = 0
        for name, (shape, dtype) in fields.items():
            self.fields.append(Field(name, shape, dtype, self.nbytes))
            nbytes = batch_size * math.prod(shape) * dtype.itemsize
            self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def arrays(self, memory: npt.NDArray[np.uint8]) -> dict[Any, npt.NDArray[Any]]:
        """Return the arrays of all fields, of ``batch_size`` samples each, over the bytes of a slot."""
        found = {}
        for name, shape, dtype, offset in self.fields:
            nbytes = self.batch_size * math.prod(shape) * dtype.itemsize
            found[name] = memory[offset : offset + nbytes].view(dtype).reshape((self.batch_size, *shape))
        return found

    @staticmethod
    def row(arrays: Mapping[Any, npt.NDArray[Any]], row: int) -> RowViews:
        """Return a writable view of one sample of each field; 0-d for a field of shape ``()``."""
        return RowViews({name: array[row, ...] for name, array in arrays.items()})


#: The epoch of a sample, and its position in the order of all ranks.
Place: TypeAlias = tuple[int, int]

#: Bytes that a row is filled with before `decode`, to find those that it leaves unwritten.
PATTERNS = (0xA5, 0x5A)

#: Bytes in a row that count as unwritten. Random values keep both patterns there once in 2**64 tries.
LEAST = 4


class SampleDecoder:
    """Reads and decodes one sample.

    Attributes
    ----------
    source
        Maps an index to a sample; None if the sample is passed with its index.
    decode
        The function of the program: ``decode(sample, out)`` with fields, ``decode(sample)`` without. None passes the
        sample on as it is.
    checks
        True if `write` looks for fields that ``decode`` does not write.
    keywords
        Those of ``rng`` and ``epoch`` that ``decode`` takes.
    seed
        Of ``rng``.
    """

    __slots__ = ("checks", "decode", "keywords", "seed", "source")

    def __init__(
        self,
        source: Any,
        decode: Callable[..., Any] | None,
        *,
        checks: bool = False,
        keywords: tuple[str, ...] = (),
        seed: int = 0,
    ) -> None:
        self.source = source
        self.decode = decode
        self.checks = checks and decode is not None
        self.keywords = keywords
        self.seed = seed

    def write(self, index: int, sample: Any, out: Mapping[Any, npt.NDArray[Any]], place: Place = (0, 0)) -> None:
        """Write a sample into views of its fields."""
        if self.checks:
            self._write_checked(index, sample, out, place)
        else:
            self._write(index, sample, out, place)

    def _write(self, index: int, sample: Any, out: Mapping[Any, npt.NDArray[Any]], place: Place) -> None:
        if self.source is not None:
            sample = self.source[index]
        if self.decode is None:
            _copy_sample(sample, out)
            return
        try:
            returned = self.decode(sample, out, **self._values(*place)) if self.keywords else self.decode(sample, out)
        except AttributeError as error:  # not by `__getattr__`, with which all lookups are slower
            if error.obj is out:
                error.add_note(
                    f"out is a mapping by field, {list(out.keys())}: out['x'][...] = …, or x, y = out for 0 and 1"
                )
            raise
        if returned is not None and not _is_of(returned, out):
            raise TypeError(
                f"decode returned a value of type {type(returned).__name__}, and with fields= it writes into out: "
                f"out[{next(iter(out.keys()))!r}][...] = value; or leave fields= out"
            )

    def _values(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the keywords of ``decode``."""
        values: dict[str, Any] = {}
        if "epoch" in self.keywords:
            values["epoch"] = epoch
        if "rng" in self.keywords:
            # Not `default_rng`: NumPy may change its bit generator. A hash, since a seed may be negative.
            key = blake2b(f"aiocuda sample {self.seed} {epoch} {position}".encode(), digest_size=16).digest()
            values["rng"] = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
        return values

    def _write_checked(self, index: int, sample: Any, out: Mapping[Any, npt.NDArray[Any]], place: Place) -> None:
        """Write a sample over a pattern; if some of it is left, again over another one: a value may be the pattern.

        Raises
        ------
        ValueError
            Bytes of a field have kept both patterns.
        """
        kept: dict[Any, Any] = dict.fromkeys(out.keys(), True)  # the bytes that have kept every pattern, by field
        for pattern in PATTERNS:
            for view in out.values():
                _bytes_of(view)[...] = pattern
            self._write(index, sample, out, place)
            masks = {name: (_bytes_of(out[name]) == pattern) & before for name, before in kept.items()}
            kept = {name: mask for name, mask in masks.items() if _has_run(mask, out[name])}
            if not kept:
                return
        names = ", ".join(map(repr, kept))
        raise ValueError(
            f"decode= has not written all of field {names} of sample {index}: a batch would have data of an earlier "
            f"sample there; write each field, such as out[{next(iter(kept))!r}][...] = 0"
        )

    def result(self, index: int, sample: Any, place: Place = (0, 0)) -> Any:
        """Return a decoded sample: the arrays that `collate` stacks."""
        if self.source is not None:
            sample = self.source[index]
        if self.keywords:
            assert self.decode is not None
            return self.decode(sample, **self._values(*place))
        return sample if self.decode is None else self.decode(sample)


def _is_of(returned: Any, out: Mapping[Any, npt.NDArray[Any]]) -> bool:
    """True for what a decoder may return that has written: None, ``out``, its views, as functions with ``out=`` do."""
    if isinstance(returned, tuple):
        return all(_is_of(each, out) for each in returned)
    views = out.values() if isinstance(returned, np.ndarray) else ()
    return returned is None or returned is out or any(np.may_share_memory(returned, view) for view in views)


def _bytes_of(view: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return view.reshape(-1).view(np.uint8)


def _has_run(mask: npt.NDArray[np.bool_], view: npt.NDArray[Any]) -> bool:
    """True if `LEAST` bytes in a row are set; all of them, if there are fewer, or if the dtype has padding."""
    if view.nbytes <= LEAST or view.dtype.char in "gGV":
        return view.nbytes > 0 and bool(mask.all())
    for _ in range(LEAST - 1):
        mask = mask[1:] & mask[:-1]
    return bool(mask.any())


#: By the kind of a dtype, those that hold only a part of its values.
_LOSES = {"f": "biu", "c": "biuf"}


def _copy_sample(sample: Any, out: Mapping[Any, npt.NDArray[Any]]) -> None:
    """Copy a sample that needs no decoding: a mapping, a tuple with an item for each field, or the only field itself.

    Raises
    ------
    ValueError
        Its arrays have another shape, or values that the field would lose, or there are other ones than the fields.
    """
    if isinstance(sample, Mapping):
        for name, view in out.items():
            try:
                value = sample[name]
            except KeyError as error:
                raise ValueError(
                    f"a sample has the keys {list(sample)}, and the loader has the fields {list(out.keys())}: name the "
                    "fields like the keys, {'image': (shape, dtype)}, or give the loader a decode="
                ) from error
            _copy(name, value, view)
    elif isinstance(sample, (tuple, list)) and len(out) != 1:
        if len(sample) != len(out):
            raise ValueError(
                f"a sample has {len(sample)} parts, and the loader has {len(out)} fields: {list(out.keys())}"
            )
        for (name, view), part in zip(out.items(), sample, strict=True):
            _copy(name, part, view)
    elif len(out) == 1:
        for name, view in out.items():
            _copy(name, sample, view)
    else:
        raise ValueError(f"a sample of type {type(sample).__name__} for {len(out)} fields: give the loader a decode=")


def _copy(name: Any, value: Any, view: npt.NDArray[Any]) -> None:
    try:
        array = np.asarray(value)
        if array.shape == view.shape:
            view[...] = array
            if array.dtype is view.dtype:  # usual
                return
    except (TypeError, ValueError) as error:
        error.add_note(f"in field {name!r} of a sample, which is copied as it is: give the loader a decode=")
        raise
    if array.shape != view.shape:
        raise ValueError(f"field {name!r} of a sample has shape {array.shape}, and fields= says {view.shape}")
    if view.dtype.kind in _LOSES.get(array.dtype.kind, "") and not np.array_equal(view, array):
        raise ValueError(
            f"field {name!r} of a sample is {array.dtype}, such as {array[view != array].flat[0]}, which its dtype "
            f"{view.dtype} does not hold: say {array.dtype} in fields=, or give the loader a decode= that scales it"
        )
