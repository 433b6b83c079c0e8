"""`PICTURES`: every picture of the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from tests.benchmarks.machine import ROOT

from . import (
    batching,
    cancellation,
    cluster_loss,
    completion,
    coordination,
    even_latencies,
    fault,
    hardware_queues,
    latency,
    layers,
    loaders,
    memory,
    operation,
    overlap,
    triple_buffer,
    which_one,
)

__all__ = ["FOLDER", "PICTURES", "Picture"]

FOLDER: Final = ROOT / "docs" / "pictures"


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A picture and its source."""

    draw: Callable[[], str]
    is_fixed: bool = False  #: drawn from files of the repository, so it is the same each time


#: By the name of the file.
PICTURES: Final = {
    "overlap": Picture(overlap.draw),
    "operation": Picture(operation.draw),
    "triple-buffer": Picture(triple_buffer.draw),
    "fault": Picture(fault.draw),
    "memory": Picture(memory.draw),
    "cancellation": Picture(cancellation.draw),
    "batching": Picture(batching.draw),
    "coordination": Picture(coordination.draw),
    "cluster-loss": Picture(cluster_loss.draw),
    "which-one": Picture(which_one.draw, is_fixed=True),
    "hardware-queues": Picture(hardware_queues.draw, is_fixed=True),
    "completion": Picture(completion.draw, is_fixed=True),
    "latency-against-load": Picture(latency.draw, is_fixed=True),
    "even-latencies": Picture(even_latencies.draw, is_fixed=True),
    "loaders": Picture(loaders.draw, is_fixed=True),
    "layers": Picture(layers.draw, is_fixed=True),
}
