"""Serving: requests of many tasks computed in batches on one device. See its README.md in the repository."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .._base._mistakes import lacking
from ..errors import DeadlineError
from ._batch import Batch
from ._batcher import MicroBatcher
from ._errors import BatchError, OverloadedError
from ._statistics import BatcherStatistics

__all__ = ["Batch", "BatchError", "BatcherStatistics", "DeadlineError", "MicroBatcher", "OverloadedError"]

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept misspelt names
    __getattr__ = partial(lacking, __name__)
