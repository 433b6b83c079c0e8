"""ContextStatistics: what the parts of a managed context say."""

from __future__ import annotations

from typing import NamedTuple

from .._statistics import DeviceStatistics
from ..coordination._statistics import CoordinatorStatistics
from ..pipeline import PipelineStats
from ..pool import StreamPoolStatistics

__all__ = ["ContextStatistics"]


class ContextStatistics(NamedTuple):
    """A snapshot.

    Attributes
    ----------
    driver
        ``"cuda"``, ``"host"`` or ``"simulated"``.
    asynchronous
        The mode.
    streams_created
        Streams that the driver has made since the context was entered, by its own count; for others who use the same
        driver meanwhile, too. 0 in synchronous mode. What CUDA makes ahead when a device is first opened, and
        notifiers' own streams, are not in it: nobody can enqueue on them.
    device
        The device's figures, since the context was entered.
    pool, coordinator
        Theirs; None before the context was first asked for them.
    steps
        Of the pipeline behind `ManagedContext.triple_buffered_step`; None before the first step.
    pipelines
        Of those that `ManagedContext.pipeline` has made, in that order.
    """

    driver: str
    asynchronous: bool
    streams_created: int
    device: DeviceStatistics
    pool: StreamPoolStatistics | None
    coordinator: CoordinatorStatistics | None
    steps: PipelineStats | None
    pipelines: tuple[PipelineStats, ...]
