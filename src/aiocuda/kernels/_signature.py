"""The parameters of a kernel: C types, `struct` codes and NumPy dtypes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidTypeError

__all__ = ["Parameter", "Signature", "pointer", "scalar"]


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel."""

    name: str  #: ``""`` if the source gives none
    type: str  #: the C type: ``"const float*"``
    code: str  #: `struct` code with native alignment; ``"P"`` for a pointer
    dtype: np.dtype[np.generic] | None  #: of the value or a pointer's elements; None for ``void*`` and structures
    is_pointer: bool = False
    is_const: bool = False  #: True for a pointer to memory that the kernel only reads
    accepted: frozenset[str] | None = None  #: names of the dtypes that a buffer may have; None for all
    structure: str = ""  #: the name of the structure that it points to: a buffer has a structured dtype

    def __str__(self) -> str:
        return f"{self.type} {self.name}".rstrip()

    def accepts(self, dtype: np.dtype[np.generic]) -> bool:
        """Return whether a buffer of this dtype may be passed for this pointer."""
        if self.structure:
            return dtype.names is not None
        return self.accepted is None or dtype.name in self.accepted


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """A kernel's name and parameters, in order."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def format(self) -> str:
        """The parameters as `struct` codes with native alignment: ``"fPPi"``."""
        return "".join(parameter.code for parameter in self.parameters)

    def count_error(self, arguments: Sequence[Any]) -> InvalidTypeError:
        """Return the error for a launch with too few or too many arguments."""
        expected, given = len(self.parameters), len(arguments)
        cure = ""
        if given == 1 and isinstance(arguments[0], (tuple, list)):  # as CuPy's kernels take them
            cure = ": pass them one by one after the block, launch(kernel, grid, block, *arguments)"
        elif given == expected - 1 and not self.parameters[-1].is_pointer:
            cure = ": pass each of them; n= is the number of threads, and is not passed to the kernel"
        elif given == expected + 2 and not any(hasattr(each, "_argument") for each in arguments[:2]):
            cure = ": with n=, leave out grid and block, launch(kernel, *arguments, n=count, block=256)"
        elif given == expected - 2:
            cure = ": grid and block come before them, (kernel, grid, block, *arguments), or are left out with n="
        return InvalidTypeError(
            f"{self} takes {expected} argument{'s' * (expected != 1)}, {given} given{cure}",
            expected=expected,
            given=given,
        )

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parameters))})"


def scalar(name: str, spelled: str) -> Parameter | None:
    """Return a parameter that is passed by value; None if its type cannot be passed."""
    spelled = _canonical(spelled)
    code = _CODES.get(spelled)
    if code is None:
        return None
    dtype = _dtype(code)
    return Parameter(name, spelled, code, dtype, accepted=frozenset({dtype.name}))


def pointer(name: str, spelled: str, levels: tuple[bool, ...]) -> Parameter | None:
    """Return a pointer parameter. A type that is not known is the name of a structure; None if it is no name.

    Parameters
    ----------
    levels
        One item for each star, in order: True if the star points to a ``const`` type.
    """
    written, spelled = spelled, _canonical(spelled)
    text = spelled + "".join(" const*" if const else "*" for const in levels)
    if levels[0]:
        text = f"const {spelled}*" + text.removeprefix(f"{spelled} const*")
    dtype: np.dtype[np.generic] | None = None
    accepted: frozenset[str] | None = None
    structure = ""
    if len(levels) > 1:  # an array of addresses
        dtype, accepted = np.dtype(np.uint64), frozenset({"uint64", "int64"})
    elif spelled in _BYTES:
        dtype = _BYTES[spelled]
    elif spelled in _ELEMENTS:
        names = _ELEMENTS[spelled]
        dtype, accepted = np.dtype(names[0]), frozenset(names)
    elif spelled in _CODES:
        dtype = _dtype(_CODES[spelled])
        accepted = frozenset({dtype.name})
    elif " " in written:
        return None
    else:
        structure, text = written, text.replace(spelled, written)
    return Parameter(name, text, "P", dtype, True, levels[-1], accepted, structure)


def _canonical(spelled: str) -> str:
    """Return the usual spelling of a type: ``unsigned long`` for ``int unsigned long``, without ``std::``."""
    words = [word.removeprefix("::").removeprefix("cuda::").removeprefix("std::") for word in spelled.split()]
    sign = "unsigned " if "unsigned" in words else "signed " if "signed" in words and "char" in words else ""
    words = [word for word in words if word not in ("signed", "unsigned")]
    if "int" in words and len(words) > 1:
        words.remove("int")
    return sign + (" ".join(sorted(words)) or "int")


def _dtype(code: str) -> np.dtype[np.generic]:
    # By its name: if long and long long have one size, NumPy has two equal dtypes, and buffers have this one.
    return np.dtype(np.dtype(code).name)


_CODES: Mapping[str, str] = types.MappingProxyType(
    {
        spelled: code
        for code, spellings in {
            "?": ("bool",),
            "b": ("char", "signed char", "int8_t"),
            "B": ("unsigned char", "uint8_t"),
            "h": ("short", "int16_t"),
            "H": ("unsigned short", "uint16_t"),
            "i": ("int", "int32_t"),
            "I": ("unsigned int", "uint32_t"),
            "l": ("long",),
            "L": ("unsigned long",),
            "q": ("long long", "int64_t", "intptr_t", "ptrdiff_t"),
            "Q": ("unsigned long long", "uint64_t", "uintptr_t", "size_t"),
            "e": ("__half", "half"),
            "f": ("float",),
            "d": ("double",),
        }.items()
        for spelled in spellings
    }
)

# Pointers to these types mean bytes in C: they accept a buffer of any dtype.
_BYTES: Mapping[str, np.dtype[np.generic] | None] = types.MappingProxyType(
    {"void": None} | dict.fromkeys(("char", "unsigned char", "uint8_t", "byte"), np.dtype(np.uint8))
)

_VECTORS: Mapping[str, str] = types.MappingProxyType(
    {"char": "int8", "uchar": "uint8", "short": "int16", "ushort": "uint16", "int": "int32", "uint": "uint32"}
    | {"long": _dtype("l").name, "ulong": _dtype("L").name, "longlong": "int64", "ulonglong": "uint64"}
    | {"float": "float32", "double": "float64"}
)

# Element types of pointers that cannot be passed by value. NumPy has no bfloat16: use uint16, or ml_dtypes' type.
_ELEMENTS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {f"{base}{width}": (name,) for base, name in _VECTORS.items() for width in (1, 2, 3, 4)}
    | dict.fromkeys(("float2", "cuFloatComplex", "cuComplex"), ("float32", "complex64"))
    | dict.fromkeys(("double2", "cuDoubleComplex"), ("float64", "complex128"))
    | dict.fromkeys(("__half2", "half2"), ("float16",))
    | dict.fromkeys(("__nv_bfloat16", "nv_bfloat16", "__nv_bfloat162", "nv_bfloat162"), ("uint16", "bfloat16"))
)
