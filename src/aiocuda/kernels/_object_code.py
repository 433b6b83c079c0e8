"""Code that was compiled elsewhere: cubin, fatbin, LTO-IR or PTX."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from ..errors import CompileError, InvalidArgumentError

__all__ = ["check_object_code", "kind_of", "read_object_code"]

_MAGICS = {b"\x7fELF": "cubin", b"\x50\xed\x55\xba": "fatbin", b"\xed\x43\x4e\x7f": "LTO-IR"}
_PTX = re.compile(rb"^[ \t]*\.version[ \t]+\d", re.MULTILINE)
_EM_CUDA, _SHT_NOBITS, _SECTION_BYTES = 190, 8, 64


def kind_of(code: bytes) -> str:
    """Return ``"cubin"``, ``"fatbin"``, ``"LTO-IR"`` or ``"PTX"``; ``""`` for anything else."""
    return _MAGICS.get(code[:4], "PTX" if _PTX.search(code) else "")


def check_object_code(code: bytes, name: str) -> str:
    """Return the kind of the code. `CompileError` if it is none, or not whole: CUDA is not given its size."""
    kind = kind_of(code)
    if not kind:
        raise CompileError(f"the code of kernel {name!r} is no cubin, fatbin, LTO-IR or PTX", log="")
    try:
        end = _end_of_cubin(code) if kind == "cubin" else sum(struct.unpack_from("<HQ", code, 6)) * (kind == "fatbin")
    except (struct.error, ValueError, OverflowError):
        end = len(code) + 1
    if end > len(code):
        raise CompileError(f"the {kind} of kernel {name!r} is truncated, or its code is for no GPU", log="")
    return kind


def _end_of_cubin(code: bytes) -> int:
    """Return the end of everything that the tables of an ELF file refer to. `ValueError` if it is for no GPU."""
    machine, _, _, programs, sections = struct.unpack_from("<HIQQQ", code, 18)
    program_bytes, program_count, section_bytes, section_count = struct.unpack_from("<4H", code, 54)
    if code[4:6] != b"\x02\x01" or machine != _EM_CUDA or section_bytes != _SECTION_BYTES:
        raise ValueError
    ends: list[int] = [programs + program_bytes * program_count, sections + section_bytes * section_count]
    for at in range(sections, ends[1], section_bytes):
        kind, _, _, offset, size = struct.unpack_from("<IQQQQ", code, at + 4)
        ends.append(offset + size * (kind != _SHT_NOBITS))
    return max(ends)


def read_object_code(code: bytes | str, name: str, capability: tuple[int, int]) -> bytes:
    """Return the code, or the content of a file, as CUDA loads it: LTO-IR is linked. **May block.**"""
    if isinstance(code, str):
        try:
            code = Path(code).read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"the code of kernel {name!r} cannot be read: {error}") from error
    if check_object_code(code, name) != "LTO-IR":
        return code
    from ..driver.cuda._compiled import link  # imported here, because few programs link

    return link(code, name, "sm_{}{}".format(*capability))
