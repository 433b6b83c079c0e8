"""Advice: which strategy a record of completion times speaks for."""

from __future__ import annotations

from typing import NamedTuple

from ._strategy import LoadBalanced, RoundRobin, Strategy, WorkloadSplit
from ._workload import Record

__all__ = ["Optimisation", "advise"]

#: Fewer recorded leases for copies and for kernels than this say nothing; those that did both never do.
FEWEST = 32


class Optimisation(NamedTuple):
    """What `aiocuda.StreamPool.optimize` did, and the two recorded figures that decided."""

    before: str  #: the strategy's name
    after: str
    memory_seconds: float  #: that leases for copies took, together
    compute_seconds: float  #: that leases for kernels took, together


def advise(strategy: Strategy, record: Record, prioritised: bool) -> tuple[Strategy, Optimisation]:
    """The strategy that the record speaks for; the same one where it says nothing."""
    memory, compute = record.seconds("memory"), record.seconds("compute")
    after = strategy
    enough = record.count("memory", "compute") >= FEWEST
    if enough and not prioritised and isinstance(strategy, (RoundRobin, LoadBalanced, WorkloadSplit)):
        wanted = WorkloadSplit if memory > compute else LoadBalanced
        if not isinstance(strategy, wanted):
            after = wanted()
    return after, Optimisation(strategy.name, after.name, memory, compute)
