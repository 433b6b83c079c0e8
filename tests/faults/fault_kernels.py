"""Kernels that fault, each after a gate that the host opens."""

from __future__ import annotations

import struct
from collections.abc import Generator
from typing import Any

import aiocuda

#: Runs until ``words[1]`` is set, or for so long, and does then what ends CUDA for the process.
_SOURCE = """
extern "C" __global__ void fault(unsigned int *shared, float *p, unsigned long long nanoseconds)
{
    volatile unsigned int *words = shared;
    unsigned long long start, now;
    asm volatile("mov.u64 %%0, %%globaltimer;" : "=l"(start));
    words[0] = 1;
    __threadfence_system();
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %%0, %%globaltimer;" : "=l"(now));
    } while (words[1] == 0 && now - start < nanoseconds);
    %s
}
"""

#: A store that is found again in the compiled code: the compiler writes no illegal instruction.
_MARK = 0x5EADBEE1

#: What each kind does, and which codes CUDA may answer to it.
FAULTS: dict[str, tuple[str, set[int]]] = {
    "illegal": ("p[1ull << 40] = 1.0f;", {700}),
    "misaligned": ("*(volatile float *)((char *)p + 1) = 1.0f;", {716}),
    "trap": ('asm volatile("trap;");', {719}),
    "assert": ('if (p) __assertfail("!p", "fault.cu", 1, "fault", 1);', {710}),
    "instruction": (f"*(volatile unsigned int *)p = {_MARK:#x}u;", {715, 718, 719}),
}


def _twin(words: Any, p: Any, nanoseconds: int) -> Generator[float, float, None]:
    words[0] = 1
    while words[1] == 0:
        yield 0.001
    if len(p):
        raise ZeroDivisionError("this kernel faults on purpose")


def fault_kernel(kind: str) -> aiocuda.Kernel:
    """``fault(words, p, nanoseconds)``; with an empty ``p`` the assertion holds."""
    return aiocuda.Kernel("fault", source=_SOURCE % FAULTS[kind][0], host=_twin)


def spoil(image: bytes) -> bytes:
    """A cubin in which the marked store has become an instruction that there is not.

    An instruction has 16 bytes: its code is in the low 12 bits, the predicate in the next 4 (7 is "always"), and what
    it moves, if that is a constant, in the second word.
    """
    spoiled = bytearray(image)
    found = 0
    for offset, size in _text_sections(image):
        for at in range(offset, offset + size, 16):
            if struct.unpack_from("<I", image, at + 4)[0] == _MARK:
                struct.pack_into("<H", spoiled, at, 0x7FFF)
                found += 1
    if not found:
        raise ValueError("the marked store is not in the compiled kernel: another architecture encodes it elsewhere")
    return bytes(spoiled)


def _text_sections(image: bytes) -> list[tuple[int, int]]:
    """(offset, size) of each section of code, of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    executable = 0x4
    sections = []
    for at in range(table, table + size * count, size):
        kind, flags, _, offset, nbytes = struct.unpack_from("<IQQQQ", image, at + 4)
        if kind == 1 and flags & executable:
            sections.append((offset, nbytes))
    return sections
