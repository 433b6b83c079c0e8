"""Random numbers: what a kernel's parameter takes is what `struct` can pack into its C type."""

from __future__ import annotations

import math
import struct

import pytest

from aiocuda import Kernel
from aiocuda.errors import InvalidArgumentError

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import given, settings
from hypothesis import strategies as st

INTEGERS = {
    "char": "b",
    "unsigned char": "B",
    "short": "h",
    "uint16_t": "H",
    "int": "i",
    "unsigned": "I",
    "long": "l",
    "unsigned long": "L",
    "int64_t": "q",
    "size_t": "Q",
}
BINDERS = {code: Kernel("f", source=f"__global__ void f({name} n);") for name, code in INTEGERS.items()}
FLOATS = {
    code: Kernel("f", source=f"__global__ void f({name} x);")
    for name, code in {"__half": "e", "float": "f", "double": "d"}.items()
}


@settings(deadline=None)  # a busy machine is no failure
@given(
    code=st.sampled_from(sorted(BINDERS)),
    value=st.integers()
    | st.integers(-(2**65), 2**65)
    | st.sampled_from([s * 2**b + d for s in (-1, 1) for b in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, 0, 1)]),
)
def test_an_integer_is_taken_if_its_type_holds_it(code: str, value: int) -> None:
    try:
        struct.pack(code, value)
    except struct.error:
        with pytest.raises(InvalidArgumentError):
            BINDERS[code].bind((value,))
    else:
        assert BINDERS[code].bind((value,)) == [value]


@settings(deadline=None)  # a busy machine is no failure
@given(
    code=st.sampled_from(sorted(FLOATS)),
    value=st.floats() | st.sampled_from([65519.99, 65520.0, 3.4028235677973366e38]),
)
def test_a_float_is_taken_unless_it_becomes_infinite(code: str, value: float) -> None:
    try:
        struct.pack(f"<{code}", value)  # without the <, "f" makes an infinity of what is too large
    except OverflowError:
        with pytest.raises(InvalidArgumentError, match="takes a number up to"):
            FLOATS[code].bind((value,))
    else:
        (made,) = FLOATS[code].bind((value,))
        assert type(made) is float
        assert struct.pack("d", made) == struct.pack("d", value) or math.isnan(made)
