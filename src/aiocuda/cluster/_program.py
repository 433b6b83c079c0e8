"""Program: a class of the user's program that each replica creates."""

from __future__ import annotations

from typing import NamedTuple

from .._processes._messages import Buffer

__all__ = ["Program"]


class Program(NamedTuple):
    """A class with its arguments, which each replica creates, and creates again after a restart."""

    number: int
    name: str  #: of the class
    data: bytes  #: pickled
    buffers: list[Buffer]
