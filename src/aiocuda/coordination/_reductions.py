"""The kernels of reduce and all_reduce, with their host implementations."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from ..lowlevel import DeviceResources

if TYPE_CHECKING:
    from ..kernels import Kernel

__all__ = ["CONTINUES", "MOST", "OPERATIONS", "UNFINISHED", "Fold", "fold_of"]

_Array: TypeAlias = npt.NDArray[Any]

#: How many sources and targets one launch takes.
MOST = 8

#: Flags of a launch: it begins with partial results; it leaves partial results instead of writing the targets.
CONTINUES, UNFINISHED = 1, 2

OPERATIONS: dict[str, np.ufunc] = {
    "sum": np.add, "product": np.multiply, "minimum": np.minimum, "maximum": np.maximum,
}  # fmt: skip

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))

#: The C type of the items of each dtype.
_C_TYPES = {
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long", "uint8": "unsigned char",
    "uint16": "unsigned short", "uint32": "unsigned int", "uint64": "unsigned long long", "float16": "__half",
    "float32": "float", "float64": "double",
}  # fmt: skip


class Fold(NamedTuple):
    """A kernel that combines sources, item by item, in their order.

    ``kernel(n, sources, targets, flags, partial, source 0 … 7, target 0 … 7)``
    """

    kernel: Kernel
    items: np.dtype[Any]  #: the dtype of its sources and targets: that of the buffers, or one with the same bits
    partial: np.dtype[Any]  #: the dtype of partial results


def fold_of(operation: object, dtype: np.dtype[Any]) -> Fold:
    """Return the kernel of an operation. Raises `InvalidArgumentError` or `InvalidTypeError` if there is none."""
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise InvalidArgumentError(f"operation is one of {', '.join(OPERATIONS)}, not {operation!r}")
    return _fold(operation, dtype)


@functools.cache
def _fold(operation: str, dtype: np.dtype[Any]) -> Fold:
    name = dtype.name
    if name not in _INTEGERS | _FLOATS:
        raise InvalidTypeError(
            f"buffers of {dtype} cannot be reduced: a reduction takes integers, float16, bfloat16, float32 and "
            "float64; buffer.view(dtype) is a view of the same bytes"
        )
    items = partial = np.dtype("uint16" if name == "bfloat16" else name)
    if name in ("float16", "bfloat16"):  # summed in float32, and rounded once
        partial = np.dtype(np.float32)
    elif name in _INTEGERS and operation in ("sum", "product"):  # signed ones wrap to the same bits
        items = partial = np.dtype(f"uint{8 * items.itemsize}")
    symbol = f"{operation}_{'bfloat16' if name == 'bfloat16' else items.name}"
    kind = _C_TYPES[items.name]
    sources = ", ".join(f"const {kind}* s{index}" for index in range(MOST))
    targets = ", ".join(f"{kind}* t{index}" for index in range(MOST))
    parameters = f"long long n, int sources, int targets, int flags, void* partial, {sources}, {targets}"
    host = _host_fold(OPERATIONS[operation], name)
    return Fold(DeviceResources.kernel_of_ptx(_ptx_of, symbol, parameters, host), items, partial)


@functools.cache
def _ptx() -> tuple[str, dict[str, str]]:
    """Return the first lines of the PTX, and the text of each kernel: a device loads one without the others."""
    try:
        import lzma
    except ImportError as missing:
        raise UnsupportedError(
            f"reduce and all_reduce on a GPU need lzma, and the Python in {sys.prefix} was built without that module: "
            "install liblzma-dev (on Fedora xz-devel) and build Python again, or use another Python"
        ) from missing
    packed = Path(__file__).with_suffix(".ptx.xz").read_bytes()
    header, *kernels = lzma.decompress(packed).decode().split("\t// .globl\t")
    return header, {name.strip(): text for name, _, text in (kernel.partition("\n") for kernel in kernels)}


def _ptx_of(symbol: str) -> str:
    """Return the PTX of one kernel. Blocks: the first call reads and decompresses the file."""
    header, kernels = _ptx()
    return header + kernels[symbol]


def _host_fold(combine: np.ufunc, name: str) -> Callable[..., None]:
    """Return the host implementation of the kernel for one operation and dtype."""
    widen, narrow = {"float16": (_to_float32, _to_float16), "bfloat16": (_from_bfloat16, _to_bfloat16)}.get(
        name, (_same, _same)
    )

    def fold(n: int, sources: int, targets: int, flags: int, partial: _Array, *pointers: _Array) -> None:
        values = [widen(pointer[:n]) for pointer in pointers[:sources]]
        total = partial[:n] if flags & CONTINUES else values.pop(0)
        with np.errstate(all="ignore"):
            for value in values:
                total = combine(total, value)
            if flags & UNFINISHED:
                partial[:n] = total
                return
            result = narrow(total)
        for target in pointers[MOST : MOST + targets]:
            target[:n] = result

    return fold


def _same(array: _Array) -> _Array:
    return array


def _to_float32(array: _Array) -> _Array:
    return array.astype(np.float32)


def _to_float16(array: _Array) -> _Array:
    return array.astype(np.float16)


def _from_bfloat16(bits: _Array) -> _Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(array: _Array) -> _Array:
    """Round to the nearest bfloat16, to even in a tie, and return its bits."""
    bits = array.view(np.uint32)
    rounded = ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)
