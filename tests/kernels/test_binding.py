"""Arguments of a launch: accepted values, and the errors for others."""

from __future__ import annotations

import contextlib
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from aiocuda import Kernel
from aiocuda.errors import InvalidArgumentError, InvalidTypeError


class Buffer:
    """What a kernel's argument needs of a buffer."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self._argument = object()


def kernel(parameters: str) -> Kernel:
    return Kernel("f", source=f"__global__ void f({parameters});")


PAIR = np.dtype([("x", np.float32), ("n", np.int32)])


def bound(parameters: str, value: object) -> Any:
    (made,) = kernel(parameters).bind((value,))
    return made


def test_arguments_come_back_in_order() -> None:
    x, y = Buffer("f4"), Buffer("f4")
    made = kernel("float a, const float* x, float* y, int n").bind((2.5, x, y, 7))
    assert made == [2.5, x._argument, y._argument, 7]


@pytest.mark.parametrize("given", [(), (1,), (1, 2, 3)])
def test_a_wrong_count_shows_the_signature(given: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTypeError, match=rf"f\(int a, int b\) takes 2 arguments, {len(given)} given") as caught:
        kernel("int a, int b").bind(given)
    assert (caught.value.expected, caught.value.given) == (2, len(given))  # type: ignore[attr-defined]


# Pointers


def test_a_host_array_has_one_error() -> None:
    with pytest.raises(InvalidTypeError, match="the device cannot reach a host array") as caught:
        bound("float* x", np.ones(4, np.float32))
    assert caught.value.__suppress_context__  # the AttributeError of the fast path is not shown above it


@pytest.mark.parametrize(
    ("parameter", "accepted", "refused"),
    [
        ("float* x", ["f4"], ["f8", "f2", "i4", "u4", "c8"]),
        ("double* x", ["f8"], ["f4", "i8", "c16"]),
        ("__half* x", ["f2"], ["f4", "u2"]),
        ("int* x", ["i4"], ["u4", "f4", "i8", "?"]),
        ("long* x", [np.dtype("l")], ["f8", "i4" if np.dtype("l").itemsize == 8 else "i8"]),
        ("long long* x", ["i8", np.longlong], ["u8", "i4"]),
        ("size_t* x", ["u8", np.ulonglong], ["i8"]),
        ("bool* x", ["?"], ["u1", "i1"]),
        ("signed char* x", ["i1"], ["u1"]),
        ("unsigned char* x", ["u1", "i1", "f4", "c16", "?"], []),
        ("char* x", ["u1", "f8"], []),
        ("std::byte* x", ["u1", "f8"], []),
        ("const void* x", ["u1", "f8", "c8"], []),
        ("float2* x", ["f4", "c8"], ["f8", "c16"]),
        ("cuDoubleComplex* x", ["f8", "c16"], ["c8"]),
        ("uchar4* x", ["u1"], ["i1", "u4"]),
        ("__nv_bfloat16* x", ["u2"], ["f2", "i2"]),
        ("float** x", ["u8", "i8"], ["f4", "f8"]),
        ("Pair* x", [PAIR, "i4,u1", np.dtype([("a", PAIR, 3)])], ["f4", "u8", "V8", "S8", "M8[s]"]),
        ("const struct Pair* x", [PAIR], ["u1"]),
    ],
)
def test_a_pointer_takes_buffers_of_its_element_type(parameter: str, accepted: list[Any], refused: list[Any]) -> None:
    for dtype in accepted:
        buffer = Buffer(dtype)
        assert bound(parameter, buffer) is buffer._argument
    for dtype in refused:
        with pytest.raises(InvalidTypeError) as caught:
            bound(parameter, Buffer(dtype))
        assert str(np.dtype(dtype)) in str(caught.value)


def test_a_dtype_mismatch_names_both_types() -> None:
    with pytest.raises(InvalidTypeError, match=r"argument 1 of f\(float\* x\) is a buffer of float64.*float32"):
        bound("float* x", Buffer("f8"))


@pytest.mark.parametrize("value", [np.ones(3, np.float32), np.ones((), np.float32), np.ones(0, np.float64)])
def test_a_host_array_is_refused_with_the_cure(value: object) -> None:
    for parameter in ("float* x", "void* x"):
        with pytest.raises(InvalidTypeError, match=r"await stream.upload\(array\)"):
            bound(parameter, value)


@pytest.mark.parametrize("value", [None, 0, 1 << 40, b"bytes", [1.0], np.float32(1)])
def test_a_pointer_refuses_other_objects(value: object) -> None:
    with pytest.raises(InvalidTypeError, match=r"a pointer takes a buffer|another library"):
        bound("float* x", value)


# Numbers


def test_an_integer_out_of_range_names_the_range() -> None:
    with pytest.raises(InvalidArgumentError, match=r"2147483648: int takes an integer from -2147483648 to 2147483647"):
        bound("int n", 2**31)
    with pytest.raises(InvalidArgumentError, match="an integer of 20001 bits"):
        bound("int n", 2**20000)


class Indexed:
    def __index__(self) -> int:
        return 5


@pytest.mark.parametrize("value", [5, np.int8(5), np.uint64(5), np.array(5), Indexed()])
def test_objects_with_index_are_integers(value: object) -> None:
    made = bound("int n", value)
    assert made == 5
    assert type(made) is int


@pytest.mark.parametrize("value", [True, np.True_])
def test_a_bool_is_an_integer(value: object) -> None:
    made = bound("int n", value)
    assert (made, type(made)) == (1, int)


@pytest.mark.parametrize("value", [3.0, np.float64(3), "3", None, 3j, Fraction(3), np.ones(1, int), Buffer("i4")])
def test_other_numbers_are_not_rounded(value: object) -> None:
    with pytest.raises(InvalidTypeError, match=r"argument 1 of f\(int n\) is"):
        bound("int n", value)


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_, 0, 1, np.uint8(1)])
def test_bool_takes_truth_values(value: Any) -> None:
    assert bound("bool b", value) is bool(value)


def test_bool_takes_nothing_else() -> None:
    with pytest.raises(InvalidArgumentError, match="bool takes True or False"):
        bound("bool b", 2)
    with pytest.raises(InvalidTypeError, match="bool takes True or False"):
        bound("bool b", 1.0)


@pytest.mark.parametrize("value", [2, np.int64(2), np.float16(2), np.float32(2), np.float64(2), np.longdouble(2)])
def test_every_real_number_may_be_a_float(value: object) -> None:
    for parameter in ("float x", "double x", "__half x"):
        made = bound(parameter, value)
        assert (made, type(made)) == (2.0, float)


@pytest.mark.parametrize("value", ["2", None, 2j, np.complex64(2), Fraction(2), np.ones(2), Buffer("f4")])
def test_a_float_refuses_other_objects(value: object) -> None:
    with pytest.raises(InvalidTypeError, match=r"argument 1 of f\(float x\) is"):
        bound("float x", value)


@pytest.mark.parametrize("value", [10**400, -(10**400), np.longdouble("1e400")])
def test_a_number_beyond_every_double(value: object) -> None:
    if isinstance(value, np.longdouble) and not np.isfinite(value):
        value = 10**400  # here a long double is a double
    with pytest.raises(InvalidArgumentError, match="double takes a number up to"):
        bound("double x", value)


def test_infinity_and_nan_are_numbers() -> None:
    for parameter in ("float x", "double x", "__half x"):
        assert bound(parameter, -math.inf) == -math.inf
        assert bound(parameter, np.float32(np.inf)) == math.inf
        assert math.isnan(bound(parameter, math.nan))


def test_every_refusal_is_an_aiocuda_error() -> None:
    values: list[Any] = [None, "x", object(), np.ones(3), 1e400, 2**70, -1, [], Buffer("f8"), b"", 1j]
    for parameter in ("bool p", "unsigned char p", "int p", "size_t p", "__half p", "float p", "float* p"):
        binder = kernel(parameter)
        for value in values:
            with contextlib.suppress(InvalidArgumentError, InvalidTypeError):
                binder.bind((value,))
