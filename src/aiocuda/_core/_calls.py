"""Calls of C functions, and access to words of memory, by address.

The compiled form has the same functions in C: see ``_compiled.pxd``. The Python form itself uses only `next_id` and
`copy_context`. The others are for tests of `Native` in Python. A *word* is an integer of 64 bits.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

__all__ = [
    "COMPILED", "add_to_word", "call_four", "call_one", "call_three", "call_two", "copy_context", "new_object",
    "next_id", "read_word", "write_value",
]  # fmt: skip

T = TypeVar("T")

#: True in the compiled form.
COMPILED = False


#: Returns the id of a new operation.
next_id: Callable[[], int] = itertools.count(1).__next__


def new_object(made: type[T]) -> T:
    """Return a new object of a class that has no ``__init__``."""
    return made()


def call_four(function: int, block: int) -> int:
    """Call a C function with the four words of a block."""
    return int(_FUNCTION(function)(*(ctypes.c_uint64 * 4).from_address(block)))


def call_three(function: int, first: int, second: int, third: int) -> int:
    """Call a C function with three words."""
    return int(_FUNCTION(function)(first, second, third, 0))


def call_two(function: int, first: int, second: int) -> int:
    """Call a C function with two words."""
    return int(_FUNCTION(function)(first, second, 0, 0))


def call_one(function: int, first: int) -> int:
    """Call a C function with one word."""
    return int(_FUNCTION(function)(first, 0, 0, 0))


def read_word(address: int) -> int:
    """Return the word of 64 bits at an address."""
    return ctypes.c_int64.from_address(address).value


def add_to_word(address: int, count: int) -> None:
    """Add to the word of 64 bits at an address."""
    ctypes.c_int64.from_address(address).value += count


def write_value(letter: int, address: int, value: object) -> bool:
    """Write a kernel's argument to its address, and return True; or return False, and write nothing.

    That is for values which the driver converts or refuses: of another type, as a NumPy scalar, an int for a float
    parameter and the reverse, or out of the parameter's range. ``letter`` is the character code of the parameter's
    type: a letter of `struct`, as in `aiocuda.driver.protocol.Program.format`.
    """
    if type(value) is not (float if chr(letter) in "fd" else int):
        return False
    try:
        data = struct.pack("@" + chr(letter), value)
    except struct.error:
        return False
    if chr(letter) == "f" and math.isinf(struct.unpack("@f", data)[0]) and math.isfinite(value):
        return False
    ctypes.memmove(address, data, len(data))
    return True


#: The type of all these functions. It passes four words in registers. A function ignores those that it does not take.
_FUNCTION = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)
