"""Checks the type and range of a launch's arguments, and converts them for the driver's launcher.

There is one converter for each parameter, made once. Its first lines accept the usual types: two pointers and two
numbers take half a microsecond together. The other lines convert other types, or raise the error.
"""

from __future__ import annotations

import math
import operator
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..completion._progress import check_awaited
from ..errors import InvalidArgumentError, InvalidTypeError
from ._signature import Parameter, Signature

__all__ = ["Converter", "check_structures", "converters"]

Converter: TypeAlias = Callable[[Any], Any]

# The largest double that still rounds to a finite value of the type.
_LARGEST = {"e": math.nextafter(65520.0, 0.0), "f": math.nextafter(2.0**128 - 2.0**103, 0.0), "d": sys.float_info.max}


def converters(signature: Signature, sizes: Mapping[str, int]) -> tuple[Converter, ...]:
    """Return one function per parameter, which converts the caller's argument to the launcher's.

    ``sizes`` has the bytes of each structure by its name, once the kernel has been compiled.
    """
    return tuple(_converter(signature, index, sizes) for index in range(len(signature.parameters)))


def check_structures(signature: Signature, sizes: Mapping[str, int], arguments: Sequence[Any]) -> None:
    """Compare the item sizes of buffers with the structures, for a launch that was bound before these were known."""
    for index, parameter in enumerate(signature.parameters):
        if parameter.structure:
            _check_structure(parameter, arguments[index].dtype, sizes, f"argument {index + 1} of {signature}")


def _converter(signature: Signature, index: int, sizes: Mapping[str, int]) -> Converter:
    parameter = signature.parameters[index]
    where = f"argument {index + 1} of {signature}"
    if parameter.structure:
        return _structure(parameter, where, sizes)
    if parameter.is_pointer:
        return _pointer(parameter, where)
    if parameter.code == "?":
        return _boolean(where)
    if parameter.code in "fde":
        return _floating(parameter, where)
    return _integer(parameter, where)


def _pointer(parameter: Parameter, where: str) -> Converter:
    expected = parameter.dtype

    def check(value: Any) -> Any:
        if not hasattr(value, "_argument"):
            raise _no_buffer(value, where) from None
        if not parameter.accepts(value.dtype):
            wanted = " or ".join(sorted(parameter.accepted or ()))
            raise InvalidTypeError(
                f"{where} is a buffer of {value.dtype}, and `{parameter}` points to {wanted}: convert the array with "
                f"`.astype(np.{expected})` before the upload, or declare the parameter as it is"
            )
        return value._argument

    if parameter.accepted is None:
        return check

    def convert(value: Any) -> Any:
        try:
            # NumPy's own dtypes are singletons, so identity decides nearly always, in a third of the time of `==`.
            if value.dtype is expected:
                return value._argument
        except AttributeError:
            return check(value)  # raises the error
        return check(value)

    return convert


def _structure(parameter: Parameter, where: str, sizes: Mapping[str, int]) -> Converter:
    def convert(value: Any) -> Any:
        if not hasattr(value, "_argument"):
            raise _no_buffer(value, where)
        _check_structure(parameter, value.dtype, sizes, where)
        return value._argument

    return convert


def _check_structure(parameter: Parameter, dtype: np.dtype[Any], sizes: Mapping[str, int], where: str) -> None:
    if not parameter.accepts(dtype):
        raise InvalidTypeError(
            f"{where} is a buffer of {dtype}, and `{parameter}` points to a structure: use a structured dtype, "
            "np.dtype([('x', np.float32), ('n', np.int32)], align=True), in the upload or by `buffer.view(dtype)`. If "
            f"{parameter.structure} is a typedef, write the type itself"
        )
    size = sizes.get(parameter.structure, dtype.itemsize)
    if dtype.itemsize != size:
        raise InvalidTypeError(
            f"{where} is a buffer of {dtype}, {dtype.itemsize} bytes each, and sizeof({parameter.structure}) is {size}"
            ": give the dtype the fields of the structure, in its order, with align=True",
            expected=size,
            given=dtype.itemsize,
        )


def _no_buffer(value: Any, where: str) -> InvalidTypeError:
    check_awaited(value, where)
    if isinstance(value, np.ndarray):
        cure = "the device cannot reach a host array: `buffer = await stream.upload(array)`, then pass `buffer`"
    elif hasattr(value, "__cuda_array_interface__") or hasattr(value, "__dlpack__"):
        cure = "memory of another library needs a buffer: pass the result of `stream.adopt(x)`"
    elif isinstance(value, str):
        cure = f"a stage's Launch takes aiocuda.pipeline.SlotBuffer({value!r}, shape, dtype) for memory of its slot"
    else:
        cure = "a pointer takes a buffer, as `stream.empty`, `stream.upload`, `device.pinned` and `device.unified` make"
    return InvalidTypeError(f"{where} is {_described(value)}: {cure}")


def _boolean(where: str) -> Converter:
    def convert(value: Any) -> bool:
        if value is True or value is False:
            return bool(value)
        number = _integral(value, where, "bool takes True or False")
        if number not in (0, 1):
            raise InvalidArgumentError(f"{where} is {_shown(number)}: bool takes True or False", low=0, high=1)
        return bool(number)

    return convert


def _integer(parameter: Parameter, where: str) -> Converter:
    bits = 8 * struct.calcsize(parameter.code)
    low, high = (0, 2**bits - 1) if parameter.code.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    rule = f"{parameter.type} takes an integer from {low} to {high}"

    def convert(value: Any) -> int:
        if type(value) is int and low <= value <= high:
            return value
        number = _integral(value, where, rule)
        if not low <= number <= high:
            raise InvalidArgumentError(f"{where} is {_shown(number)}: {rule}", low=low, high=high)
        return number

    return convert


def _floating(parameter: Parameter, where: str) -> Converter:
    largest = _LARGEST[parameter.code]
    rule = f"{parameter.type} takes a number up to {largest:.6g}, or inf or nan"

    def convert(value: Any) -> float:
        if type(value) is float and -largest <= value <= largest:
            return value
        if isinstance(value, float | np.floating):
            number = float(value)
            if not np.isfinite(value):
                return number
        else:
            try:
                number = float(_integral(value, where, rule))
            except OverflowError:
                number = math.inf
        if abs(number) > largest:
            raise InvalidArgumentError(f"{where} is {_shown(value)}: {rule}", low=-largest, high=largest)
        return number

    return convert


def _integral(value: Any, where: str, rule: str) -> int:
    """Return the value as an int. A float is refused, so nothing is rounded."""
    if isinstance(value, np.bool_):  # has no __index__
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        check_awaited(value, where)
        cure = "; array.item() is its number" if isinstance(value, np.ndarray) and value.size == 1 else ""
        raise InvalidTypeError(f"{where} is {_described(value)}: {rule}{cure}") from None


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"a NumPy array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, bool | int | float | complex | np.generic):
        return f"{_shown(value)} ({type(value).__name__})"
    return f"of type {type(value).__name__}"


def _shown(value: Any) -> str:
    # Python refuses to print integers of more than 4 300 digits.
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return str(value)
