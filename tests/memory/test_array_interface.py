"""``__cuda_array_interface__``, entry by entry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocuda import InvalidArgumentError, InvalidTypeError, UnsupportedError
from aiocuda.memory.interchange._array_interface import read, write
from aiocuda.memory.interchange._foreign import check_contiguous, reach

GOOD: dict[str, Any] = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3}


def test_what_is_written_is_read() -> None:
    interface = write(4096, (2, 3), np.dtype("i8"), 7)
    assert interface["strides"] is None
    told = read(interface)
    assert told == (4096, (2, 3), None, np.dtype("i8"), False, 7)
    assert read(write(4096, (0, 3), np.dtype("?"), None)) == (0, (0, 3), None, np.dtype("?"), False, None)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_versions_that_are_known(version: int) -> None:
    assert read(GOOD | {"version": version}).stream is None


@pytest.mark.parametrize("missing", ["shape", "typestr", "data", "version"])
def test_missing_entry_is_named(missing: str) -> None:
    """Row 25."""
    with pytest.raises(InvalidArgumentError, match=f"has no '{missing}'"):
        read({name: value for name, value in GOOD.items() if name != missing})


@pytest.mark.parametrize(
    ("entry", "value", "says"),
    [
        ("version", 99, "version 99 is not known"),
        ("version", "3", "version is an integer, not '3'"),
        ("version", True, "version is an integer"),
        ("shape", [2, 3], "shape is a tuple of integers"),
        ("shape", (2, 3.0), "shape is an integer"),
        ("shape", (2, -3), "negative"),
        ("shape", (2**40, 2**40), "more than"),
        ("typestr", 4, "typestr is a string"),
        ("typestr", "nonsense", "typestr is 'nonsense'"),
        ("data", 4096, r"'data' is \(address, read-only\)"),
        ("data", (4096,), r"'data' is \(address, read-only\)"),
        ("data", (None, False), "data address is an integer"),
        ("data", (4096, 0), "is True or False, not 0"),
        ("data", (0, False), "it has no memory"),
        ("data", (-8, False), "it has no memory"),
        ("strides", (4,), "not as many"),
        ("strides", [12, 4], "strides is a tuple"),
        ("mask", object(), "it has a mask"),
        ("stream", 0, "0 is ambiguous"),
        ("stream", -1, "its stream is -1"),
        ("stream", "default", "stream is an integer"),
    ],
)
def test_wrong_entry_is_refused_by_name(entry: str, value: object, says: str) -> None:
    """Rows 24 and 25."""
    with pytest.raises(InvalidArgumentError, match=says):
        read(GOOD | {entry: value})


def test_what_is_no_dictionary_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="is a dict, not list"):
        read([])


@pytest.mark.parametrize("typestr", ["|V2", "<M8[s]", "<U4", "|O", ">f4"])
def test_items_of_unknown_meaning_are_refused(typestr: str) -> None:
    with pytest.raises(InvalidTypeError):
        read(GOOD | {"typestr": typestr})


def test_dtype_without_a_type_string_is_not_written() -> None:
    with pytest.raises(UnsupportedError, match=r"view\(np\.uint8\)"):
        write(4096, (2,), np.dtype([("a", "i4"), ("b", "f4")]), None)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [((2, 3), (12, 4), (0, 24)), ((2, 3), (-12, 4), (-12, 12)), ((3,), (0,), (0, 4)), ((0, 9), (4, 4), (0, 0)),
     ((), (), (0, 4)), ((2, 2), (1000, 8), (0, 1012))],
)  # fmt: skip
def test_reach_is_from_the_lowest_byte_to_the_highest(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert reach(shape, strides, 4) == expected


def test_contiguous_is_c_order_without_gaps() -> None:
    right: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((2, 3), (12, 4)),
        ((1, 3), (999, 4)),
        ((0, 3), (1, 1)),
        ((), ()),
        ((2, 1, 3), (12, 0, 4)),
    ]
    for shape, strides in right:
        check_contiguous("it", shape, strides, 4)
    wrong: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((2, 3), (4, 8)),
        ((2, 3), (24, 8)),
        ((3,), (-4,)),
        ((3,), (0,)),
    ]
    for shape, strides in wrong:
        with pytest.raises(InvalidArgumentError, match=r"x\.contiguous\(\)"):
            check_contiguous("it", shape, strides, 4)
