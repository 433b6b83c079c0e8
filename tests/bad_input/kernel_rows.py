"""Rows 41 to 51: kernels, and what they are launched with."""

from __future__ import annotations

import numpy as np

from aiocuda import CompileError, InvalidArgumentError, InvalidTypeError, Kernel, UnsupportedError
from tests.bad_input.case import KERNEL, Case, each_of

_SOURCE = "__global__ void k(float* x) {}"
_STRUCTURE = Kernel("s", source="struct P { float x; int n; }; __global__ void s(P* p) {}", host=lambda p: None)
_MANY = 1 << 40


def _launched(grid: object, block: object, shared_bytes: object = 0) -> object:
    return lambda world, _: world.stream.launch(KERNEL, grid, block, world.buffer, 16, 1.0, shared_bytes=shared_bytes)


CASES = [
    *(
        Case(
            row,
            f"grid {grid} block {block} shared {shared}",
            _launched(grid, block, shared),  # type: ignore[arg-type]
            InvalidArgumentError,
            says,
        )
        for row, grid, block, shared, says in (
            (41, 0, 32, 0, "grid.x is 0"),
            (41, -1, 32, 0, "grid.x is -1"),
            (41, 2**31, 32, 0, f"{2**31}; "),
            (41, (1, 65536), 32, 0, "takes 1 to 65535"),
            (41, 1, 0, 0, "block.x is 0"),
            (41, 1, -1, 0, "block.x is -1"),
            (41, 1, 1025, 0, "takes 1 to 1024"),
            (41, 1, (1, 1, 65), 0, "takes 1 to 64"),
            (42, 1, (32, 33), 0, "at most 1024 per block"),
            (42, 1, 32, _MANY, str(_MANY)),
            (42, 1, 32, -1, "shared_bytes is -1"),
        )
    ),
    *(
        Case(41, f"grid {grid!r}", _launched(grid, 32), InvalidTypeError, repr(grid))  # type: ignore[arg-type]
        for grid in (1.0, "1", None, True, (1, 1, 1, 1))
    ),
    *(
        Case(
            row, name, each_of(lambda world, args: world.stream.launch(KERNEL, 1, 32, *args(world)), args), error, says
        )
        for row, name, args, error, says in (
            (43, "none", lambda world: (), InvalidTypeError, "takes 3 arguments, 0 given"),
            (43, "too few", lambda world: (world.buffer, 16), InvalidTypeError, "takes 3 arguments, 2 given"),
            (43, "too many", lambda world: (world.buffer, 1, 2, 3), InvalidTypeError, "takes 3 arguments, 4 given"),
            (43, "in a tuple", lambda world: ((world.buffer, 16, 1.0),), InvalidTypeError, "one by one"),
            (43, "float for int", lambda world: (world.buffer, 1.5, 1.0), InvalidTypeError, "1.5"),
            (43, "str for float", lambda world: (world.buffer, 1, "x"), InvalidTypeError, "str"),
            (43, "None for a pointer", lambda world: (None, 1, 1.0), InvalidTypeError, "NoneType"),
            (43, "other dtype", lambda world: (world.buffer.view("i4"), 1, 1.0), InvalidTypeError, "int32"),
            (44, "2**31", lambda world: (world.buffer, 2**31, 1.0), InvalidArgumentError, str(2**31)),
            (44, "-2**31 - 1", lambda world: (world.buffer, -(2**31) - 1, 1.0), InvalidArgumentError, "-2147483649"),
            (44, "1e39 for float", lambda world: (world.buffer, 1, 1e39), InvalidArgumentError, "1e+39"),
            (44, "10**400 for float", lambda world: (world.buffer, 1, 10**400), InvalidArgumentError, "1329 bits"),
            (45, "host array", lambda world: (np.ones(16, np.float32), 16, 1.0), InvalidTypeError, "upload(array)"),
        )
    ),
    *(
        Case(
            row,
            f"{name} for a structure",
            each_of(lambda world, make: world.stream.launch(_STRUCTURE, make(world), n=1), make),
            InvalidTypeError,
            says,
        )
        for row, name, make, says in (
            (43, "floats", lambda world: world.buffer, "use a structured dtype"),
            (45, "host array", lambda world: np.zeros(2, "f4,i4"), "upload(array)"),
            (45, "an item of an array", lambda world: np.zeros(2, "f4,i4")[0], "a pointer takes a buffer"),
        )
    ),
    *(
        Case(46, name, each_of(lambda _, source: Kernel("k", source=source), source), error, says)
        for name, source, error, says in (
            ("None", None, InvalidTypeError, "NoneType"),
            ("int", 7, InvalidTypeError, "int"),
            ("NUL", f"{_SOURCE}\0", InvalidArgumentError, "NUL character at position 30"),
            ("16 MiB and a byte", b" " * ((16 << 20) + 1), InvalidArgumentError, "16777217"),
            ("no UTF-8", b"\xff", InvalidArgumentError, "position 0"),
            ("lone surrogate", "\ud800", InvalidArgumentError, "position 0"),
        )
    ),
    Case(47, "missing", lambda *_: Kernel("nobody", source=_SOURCE), CompileError, "'nobody'"),
    *(
        Case(
            47,
            repr(name),
            each_of(lambda _, name: Kernel(name, source=_SOURCE), name),
            InvalidArgumentError,
            repr(name),
        )
        for name in ("", "1k", "k k", "k<float>", "a::k", "k\0", "k\n", "ключ")
    ),
    Case(
        47,
        "k<float>, which is no template",
        lambda *_: Kernel("k<float>", source=_SOURCE, parameters="float* x"),
        UnsupportedError,
        "is no template",
    ),
    Case(
        47,
        "k<int[2]{1}>",
        lambda *_: Kernel("k<int[2]{1}>", source=_SOURCE, parameters="float* x"),
        InvalidArgumentError,
        "template arguments",
    ),
    Case(47, "name None", lambda *_: Kernel(None, source=_SOURCE), InvalidTypeError, "NoneType"),  # type: ignore[arg-type]
    *(
        Case(
            48,
            repr(option),
            each_of(lambda _, option: Kernel("k", source=_SOURCE, options=[option]), option),
            InvalidArgumentError,
            repr(option),
        )
        for option in ("-I/etc", "--include-path=/etc", "-include", "@file", "-O3", "-DX=1\n#include </etc/passwd>")
    ),
    Case(48, "a string", lambda *_: Kernel("k", source=_SOURCE, options="-lineinfo"), InvalidTypeError, "(option,)"),
    Case(48, "bytes", lambda *_: Kernel("k", source=_SOURCE, options=[b"-G"]), InvalidTypeError, "b'-G'"),  # type: ignore[list-item]
    *(
        Case(
            50,
            line,
            each_of(lambda _, line: Kernel("k", source=f"{line}\n{_SOURCE}", includes=False), line),
            CompileError,
            "line 1: ",
        )
        for line in (
            '#include "/etc/passwd"',
            "#include </etc/passwd>",
            '%:include "/etc/passwd"',
            "#import <x>",
            "#inc\\\nlude <x>",
            '#embed "/etc/passwd"',
        )
    ),
    *(
        Case(
            51,
            name,
            each_of(lambda _, code: Kernel.from_object_code(code, "k", "float* x", host=lambda x: None), code),
            CompileError,
            says,
        )
        for name, code, says in (
            ("nothing", b"", "is no cubin, fatbin, LTO-IR or PTX"),
            ("random", bytes(range(256)), "is no cubin, fatbin, LTO-IR or PTX"),
            ("truncated cubin", b"\x7fELF\x02\x01" + bytes(58), "the cubin of kernel 'k' is truncated"),
            ("truncated fatbin", b"\x50\xed\x55\xba\1\0\x10\0\1" + bytes(7), "the fatbin of kernel 'k' is truncated"),
        )
    ),
]

__all__ = ["CASES"]
