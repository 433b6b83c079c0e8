"""The rows: what is measured, against what, and what it must reach.

``sizes`` are those of a GPU; ``small`` ones replace some of them where the host driver stands in for it, which shows
that a row works and nothing about its speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .figures import Better, Bound

CUPY = "cupy_host_function"
TORCH = "torch_to_thread"
UVLOOP = "aiocuda_uvloop"

GIB = 1 << 30
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row. The first bound is the one that a reader looks for."""

    name: str
    title: str
    module: str  #: where the function of the row's name is
    unit: str
    better: Better
    baseline: str
    bounds: tuple[Bound, ...]
    sizes: Mapping[str, float]
    small: Mapping[str, float]
    peers: tuple[str, ...] = ()
    function: str = ""

    def size(self, small: bool) -> dict[str, float]:
        return {**self.sizes, **(self.small if small else {})}


def _streams(count: int) -> Row:
    return Row(
        name=f"streams_{count}",
        title=f"10 ms kernels × 3 on {count} streams, all awaited",
        module="throughput",
        function="streams",
        unit="ms",
        better="lower",
        baseline="ideal: 3 × the kernel's own time",
        bounds=(Bound("ratio", at_most=1.08),),
        sizes={"streams": count, "kernels": 3, "seconds": 10e-3, "repeats": 15, "peer_repeats": 3},
        small={"streams": 8, "seconds": 5e-3, "repeats": 2},
        peers=(CUPY,),
    )


def _pageable(direction: str, at_least: float) -> Row:
    way = "host to device" if direction == "up" else "device to host"
    return Row(
        name=f"pageable_{direction}",
        title=f"1 GiB of pageable memory, {way}",
        module="transfers",
        unit="GB/s",
        better="higher",
        baseline="the driver's own pageable copy",
        bounds=(Bound("ratio", at_least=at_least), Bound("longest_turn_ms", at_most=5.0)),
        sizes={"nbytes": GIB, "repeats": 10, "peer_repeats": 5},
        small={"nbytes": 8 * MIB, "repeats": 2},
        peers=(TORCH,),
    )


_ALL = (
    Row(
        name="await_empty_kernel",
        title="an empty kernel on an idle stream, enqueue to resume",
        module="latency",
        unit="µs",
        better="lower",
        baseline="cuStreamSynchronize, spinning",
        bounds=(Bound("ratio", at_most=1.4),),
        sizes={"repeats": 3000, "peer_repeats": 500},
        small={"repeats": 50},
        peers=(CUPY, TORCH),
    ),
    Row(
        name="ops_8x16",
        title="awaited operations, 8 streams with 16 in flight each",
        module="throughput",
        unit="ops/s",
        better="higher",
        baseline="bare enqueue, nothing awaited",
        bounds=(Bound("p50", at_least=150_000), Bound(f"times_{CUPY}", at_least=4.0)),
        sizes={"streams": 8, "in_flight": 16, "rounds": 40, "repeats": 20, "peer_repeats": 5},
        small={"rounds": 2, "repeats": 2},
        peers=(CUPY, TORCH, UVLOOP),
    ),
    Row(
        name="chain_500",
        title="500 × 20 µs kernels in one stream, each awaited by its own task",
        module="throughput",
        unit="ms",
        better="lower",
        baseline="the same chain awaited once",
        bounds=(Bound("ratio", at_most=1.08),),
        sizes={"kernels": 500, "seconds": 20e-6, "repeats": 30, "peer_repeats": 10},
        small={"kernels": 40, "seconds": 200e-6, "repeats": 2},
        peers=(CUPY,),
    ),
    Row(
        name="latency_5ms",
        title="latency added to a 5 ms kernel",
        module="latency",
        unit="µs",
        better="lower",
        baseline="cuStreamSynchronize, spinning",
        bounds=(Bound("p50", at_most=80.0), Bound("cpu_share", at_most=0.30)),
        sizes={"seconds": 5e-3, "repeats": 300, "warmup": 20, "peer_repeats": 100},
        small={"repeats": 10, "warmup": 2},
        peers=(CUPY, TORCH),
    ),
    _streams(32),
    _streams(64),
    _streams(128),
    Row(
        name="busy_loop",
        title="latency added to a 200 µs kernel while another coroutine takes 100 µs of every turn",
        module="latency",
        unit="µs",
        better="lower",
        baseline="an event queried in every turn",
        bounds=(Bound("p50", at_most=500.0),),
        sizes={"seconds": 200e-6, "busy": 100e-6, "repeats": 300, "peer_repeats": 3},
        small={"repeats": 10},
        peers=(CUPY, TORCH),
    ),
    Row(
        name="burst_20000",
        title="20 000 launches, sleep(0) every 256",
        module="throughput",
        unit="ms",
        better="lower",
        baseline="bare enqueue of the same launches",
        bounds=(
            Bound("ratio", at_most=1.5),
            Bound("held_ratio", at_most=1.5),
            Bound("longest_call_ms", at_most=1.0),
            Bound("longest_turn_ms", at_most=5.0),
        ),
        sizes={"launches": 20_000, "every": 256, "held": 0.3, "repeats": 5, "peer_repeats": 2},
        small={"launches": 600, "held": 0.02, "repeats": 1},
        peers=(CUPY,),
    ),
    _pageable("up", 2.5),
    _pageable("down", 2.0),
    Row(
        name="triple_buffer",
        title="64 MB up, 1.25 ms kernel, 64 MB down, overlapped",
        module="transfers",
        unit="iterations/s",
        better="higher",
        baseline="hand-written events on three streams",
        bounds=(Bound("ratio", at_least=0.97),),
        sizes={"nbytes": 64 * MIB, "seconds": 1.25e-3, "iterations": 80, "depth": 3, "repeats": 8},
        small={"nbytes": MIB, "iterations": 8, "repeats": 2},
    ),
    Row(
        name="coordinator_overhead",
        title="what the coordinator adds to an enqueue, per operation",
        module="coordination",
        unit="µs",
        better="lower",
        baseline="Stream.launch of the same kernels",
        bounds=(Bound("p50", at_most=8.0),),
        sizes={"launches": 2000, "repeats": 20},
        small={"launches": 200, "repeats": 3},
    ),
    Row(
        name="coordinator_scale",
        title="per operation of a graph of 100 000 over 16 streams",
        module="coordination",
        unit="µs",
        better="lower",
        baseline="per operation of a graph of 1 000",
        bounds=(Bound("ratio", at_most=1.3), Bound("most_waiting", at_most=128)),
        sizes={"launches": 100_000, "few": 1000, "streams": 16, "repeats": 3},
        small={"launches": 2000, "few": 200, "repeats": 1},
    ),
    Row(
        name="diamond",
        title="20 diamonds of four 50 µs kernels, by a coordinator",
        module="coordination",
        unit="ms",
        better="lower",
        baseline="hand-written events on two streams",
        bounds=(Bound("ratio", at_most=1.05),),
        sizes={"seconds": 50e-6, "iterations": 20, "repeats": 30},
        small={"seconds": 1e-3, "iterations": 4, "repeats": 2},
    ),
    Row(
        name="critical_behind_low",
        title="a critical 50 µs kernel behind 1 000 low ones",
        module="coordination",
        unit="ms",
        better="lower",
        baseline="the kernels in flight, one after the other",
        bounds=(Bound("places", at_most=2), Bound("ratio", at_most=1.0)),
        sizes={"seconds": 50e-6, "launches": 1000, "in_flight": 64, "repeats": 20},
        small={"seconds": 1e-3, "launches": 60, "in_flight": 8, "repeats": 2},
    ),
)

ROWS: dict[str, Row] = {row.name: row for row in _ALL}
