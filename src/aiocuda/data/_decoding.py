"""Decoding of single samples, in threads and in worker processes.

Worker processes import this module: it needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from ._fields import copy_sample

__all__ = ["SampleDecoder"]


class SampleDecoder:
    """Reads and decodes one sample.

    Attributes
    ----------
    source
        Maps an index to a sample; None if the sample is passed with its index.
    decode
        The function of the program: ``decode(sample, out)`` with fields, ``decode(sample)`` without. None passes the
        sample on as it is.
    """

    __slots__ = ("decode", "source")

    def __init__(self, source: Any, decode: Callable[..., Any] | None) -> None:
        self.source = source
        self.decode = decode

    def write(self, index: int, sample: Any, out: Mapping[Any, npt.NDArray[Any]]) -> None:
        """Write a sample into views of its fields."""
        if self.source is not None:
            sample = self.source[index]
        if self.decode is None:
            copy_sample(sample, out)
        else:
            self.decode(sample, out)

    def result(self, index: int, sample: Any) -> Any:
        """Return a decoded sample: the arrays that `collate` stacks."""
        if self.source is not None:
            sample = self.source[index]
        return sample if self.decode is None else self.decode(sample)
