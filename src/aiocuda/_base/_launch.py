"""Reads the arguments of a launch: grid and block, or the least number of threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidTypeError
from ._checks import as_count
from ._mistakes import unknown_keyword

__all__ = ["read_launch"]

_NAMES = ("kernel", "grid", "block")


def read_launch(
    called: str, positional: tuple[Any, ...], named: Mapping[str, Any], cure: str, cures: Mapping[str, str]
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Return the kernel, the grid, the block and the kernel's arguments of a launch with keywords.

    Parameters
    ----------
    called
        The function, for errors.
    positional
        Kernel, grid, block and further arguments. The first three are None if they are not given.
    named
        ``kernel``, ``grid``, ``block`` or ``n``. With ``n``, all positional arguments after the kernel are the
        kernel's, and the grid is ⌈n / block⌉: 0 if ``n`` is 0.
    cure, cures
        As of `unknown_keyword`.
    """
    if unknown := named.keys() - {*_NAMES, "n"}:
        raise unknown_keyword(called, unknown, cure, cures)
    rest: list[Any] = list(positional)
    while rest and len(rest) <= len(_NAMES) and rest[-1] is None:
        del rest[-1]
    if "n" in named:
        if "grid" in named:
            raise InvalidTypeError(f"{called} takes n= or grid=, not both: n= decides the grid")
        block = as_count(named.get("block", 256), "block with n=")
        named = {**named, "grid": -(-as_count(named["n"], "n", 0) // block), "block": block}
    first = [named[name] if name in named else rest.pop(0) if rest else None for name in _NAMES]
    return first[0], first[1], first[2], tuple(rest)
