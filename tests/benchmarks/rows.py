"""The rows: measurements, baselines and bounds.

``sizes`` are those of a GPU; ``small`` replaces some of them on the host driver, which shows that a row works and
nothing about its speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .durations import REPEATING, SURPRISING
from .figures import Better, Bound
from .mix import COPY_BYTES

CUPY = "cupy_host_function"
TORCH = "torch_to_thread"
NCCL = "nccl4py"
UVLOOP = "aiocuda_uvloop"
CUPY_POOL = "cupy_pool"
TORCH_ALLOCATOR = "torch_allocator"

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
    devices: int = 1  #: a run of all rows leaves it out where there are fewer
    group: str = ""  #: rows that a run measures only where they or their group are named

    def size(self, small: bool, other: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the sizes of a run; ``other`` replaces those that the row has."""
        own = {**self.sizes, **(self.small if small else {})}
        return own | {name: value for name, value in (other or {}).items() if name in own}


def _streams(count: int, series: int = 1) -> Row:
    return Row(
        name=f"streams_{count}",
        title=f"10 ms kernels × 3 on {count} streams, all awaited",
        module="throughput",
        function="streams",
        unit="ms",
        better="lower",
        baseline="ideal: 3 × the kernel's own time",
        bounds=(
            Bound("ratio", at_most=1.08),
            *((Bound("worst_ratio", at_most=1.04), Bound("longest_ratio", at_most=1.2)) if series > 1 else ()),
        ),
        sizes={
            "streams": count,
            "kernels": 3,
            "seconds": 10e-3,
            "series": series,
            "repeats": 15,
            "peer_repeats": 3,
        },
        small={"streams": 8, "seconds": 5e-3, "series": min(series, 2), "repeats": 2},
        peers=(CUPY,),
    )


def _pageable(direction: str, at_least: float, of_pinned: float) -> Row:
    way = "host to device" if direction == "up" else "device to host"
    return Row(
        name=f"pageable_{direction}",
        title=f"1 GiB of pageable memory, {way}",
        module="transfers",
        unit="GB/s",
        better="higher",
        baseline="the driver's own pageable copy",
        bounds=(
            Bound("ratio", at_least=at_least),
            Bound("pinned_ratio", at_least=of_pinned),
            Bound("longest_turn_ms", at_most=5.0),
        ),
        sizes={"nbytes": GIB, "repeats": 10, "peer_repeats": 5},
        small={"nbytes": 8 * MIB, "repeats": 2},
        peers=(TORCH,),
    )


def _pool(strategy: str, title: str, at_most: float) -> Row:
    return Row(
        name=f"pool_{strategy}",
        title=f"stream pool, mix of kernels and copies, strategy {strategy}: {title}",
        module="pools",
        unit="ms",
        better="lower",
        baseline="round robin",
        bounds=(Bound("ratio", at_most=at_most),),
        sizes={"streams": 8, "items": 60, "nbytes": COPY_BYTES, "repeats": 11},
        small={"streams": 4, "items": 20, "nbytes": MIB, "repeats": 2},
    )


def _short_stages(how: str, of_by_hand: float) -> Row:
    """Five slots, as `Pipeline.advice` returns for such stages."""
    return Row(
        name=f"pipeline_100us{how}",
        title=f"up, compute, down of 100 µs each{', replayed' if how else ''}: speed-up ÷ bound",
        module="pipelines",
        unit="of the bound",
        better="higher",
        baseline="hand-written events on three streams",
        bounds=(Bound("ratio", at_least=of_by_hand), Bound("longest_turn_ms", at_most=5.0)),
        sizes={"iterations": 1000, "depth": 5, "scale": 1.0, "repeats": 8},
        small={"iterations": 20, "scale": 20.0, "repeats": 2},
    )


def _copies(mebibytes: int, microseconds: int, of_by_hand: float) -> Row:
    return Row(
        name=f"pipeline_{mebibytes}mb",
        title=f"{mebibytes} MB up, a kernel of {microseconds} µs, {mebibytes} MB down, depth 3: speed-up ÷ bound",
        module="pipelines",
        unit="of the bound",
        better="higher",
        baseline="hand-written events on three streams",
        bounds=(Bound("ratio", at_least=of_by_hand), Bound("longest_turn_ms", at_most=5.0)),
        sizes={"iterations": 300 if mebibytes > 4 else 1000, "depth": 3, "scale": 1.0, "repeats": 8},
        small={"iterations": 20, "scale": 5.0, "repeats": 2},
    )


def _service(rows: int, of_on_loop: float, of_threads: float) -> Row:
    return Row(
        name=f"torch_service_{rows}",
        title=f"64 handlers, each {rows} rows through a small model of PyTorch",
        module="services",
        function="torch_service",
        unit="requests/s",
        better="higher",
        baseline="PyTorch on the loop, which stands still meanwhile",
        bounds=(
            Bound("times_of_to_thread", at_least=of_threads),
            Bound("ratio", at_least=of_on_loop),
            Bound("longest_turn_ms", at_most=15.0),
        ),
        sizes={
            "rows": rows,
            "handlers": 64,
            "streams": 16 if rows < 1000 else 4,
            "requests": 40 if rows < 1000 else 10,
            "repeats": 7,
            "peer_repeats": 5,
        },
        small={"handlers": 8, "streams": 2, "requests": 3, "repeats": 2},
        peers=(CUPY,),
    )


def _lateness(streams: int, seconds: float) -> Row:
    """Each of four ways and six patterns takes ``seconds`` in each run."""
    return Row(
        name=f"lateness_{streams}",
        title=f"lateness of kernels of six patterns of durations, {streams} stream{'s' if streams > 1 else ''}",
        module="lateness",
        function="lateness",
        unit="µs",
        better="lower",
        baseline="a raw host callback",
        bounds=(
            Bound("worst_p99_beyond_raw_ms", at_most=0.3),
            Bound("worst_longest_beyond_raw_ms", at_most=1.0),
            Bound("worst_latency_p99_beyond_raw_ms", at_most=0.1),
            *(Bound(f"worst_{pattern}_p50_ms", at_most=0.15) for pattern in REPEATING),
            *(Bound(f"worst_{pattern}_p50_beyond_raw_ms", at_most=0.2) for pattern in SURPRISING),
            Bound("worst_constant_cores", at_most=0.3),
            *(
                Bound(f"worst_{pattern}_cores_beyond_raw", at_most=0.1)
                for pattern in (*SURPRISING, *REPEATING)
                if pattern != "constant"
            ),
        ),
        sizes={"streams": streams, "slice": seconds, "scale": 1.0, "warmup": 5, "runs": 5},
        small={"streams": min(streams, 4), "slice": 0.03, "scale": 0.2, "warmup": 1, "runs": 2},
        group="waits",
    )


def _workload(name: str, title: str, sizes: Mapping[str, float], small: Mapping[str, float]) -> Row:
    return Row(
        name=f"workload_{name}",
        title=title,
        module="workloads",
        unit="ms",
        better="lower",
        baseline="the synchronous mode of the same program, with equal results",
        bounds=(Bound("ratio", at_most=1.0),),
        sizes={**sizes, "repeats": 7},
        small={**small, "repeats": 2},
        group="workloads",
    )


def _colouring(name: str) -> Row:
    """With 20 colours for 150 vertices, no search ends before its last sweep."""
    return _workload(
        name,
        f"{name.replace('_', ' ')}: a sweep over 32 colourings of a random graph of 150 vertices",
        {"vertices": 150, "colours": 20, "replicas": 32, "sweeps": 400},
        {"vertices": 30, "colours": 4, "replicas": 2, "sweeps": 16},
    )


def _streams_bound(count: int, tasks: float) -> Row:
    return Row(
        name=f"streams_bound_{count}",
        title=f"10 ms kernels × 3 on {count} streams beside 60 idle ones, by gather",
        module="streams_bound",
        function="streams_bound",
        unit="ms",
        better="lower",
        baseline="the bare driver, each stream synchronised",
        bounds=(Bound("worst_gather_of_raw", at_most=1.05), Bound("worst_tasks_of_callbacks", at_most=tasks)),
        sizes={"streams": count, "idle": 60, "kernels": 3, "seconds": 10e-3, "repeats": 5, "runs": 5},
        small={"streams": 8, "idle": 6, "seconds": 5e-3, "repeats": 1, "runs": 2},
        group="waits",
    )


#: Milliseconds of the longest iteration of the loop, by the name of an action in `stalls`.
STALL_LIMITS: Mapping[str, float] = {
    **dict.fromkeys(("pin_64mb", "pinned_1mb", "pinned_256mb"), 15.0),
    "pinned_512mb": 25.0,
    **dict.fromkeys(("unified", "new_streams", "pageable_up", "pageable_down", "graph", "pipeline", "loader"), 15.0),
    **dict.fromkeys(("batcher", "empty_4gb", "load", "first_launch", "trim"), 15.0),
}

_STALLS = {"seconds": 0.5, "scale": 1.0, "streams": 60, "runs": 2}
_FEW_STALLS = {"seconds": 0.01, "scale": 1 / 256, "streams": 6, "runs": 1}
_STALL_BOUNDS = tuple(Bound(f"worst_{name}_ms", at_most=limit) for name, limit in STALL_LIMITS.items())

_STALL_ROWS = (
    Row(
        name="stalls_busy",
        title=f"longest iteration of the loop in {len(STALL_LIMITS)} actions, beside long kernels and a beat of 2 ms",
        module="stalls",
        unit="ms",
        better="lower",
        baseline="no action",
        bounds=tuple(
            bound for bound in _STALL_BOUNDS if bound.figure not in ("worst_load_ms", "worst_first_launch_ms")
        ),
        sizes=_STALLS,
        small=_FEW_STALLS,
        group="stalls",
    ),
    Row(
        name="stalls_idle",
        title="longest iteration of the loop in the same actions, on an idle device",
        module="stalls",
        unit="ms",
        better="lower",
        baseline="no action",
        bounds=_STALL_BOUNDS,
        sizes=_STALLS,
        small=_FEW_STALLS,
        group="stalls",
    ),
    Row(
        name="stalls_driver",
        title="longest launch of a thread, while another one makes a call of CUDA that does not wait",
        module="raw_stalls",
        unit="ms",
        better="lower",
        baseline="no call",
        bounds=(Bound("free_launch_ms", at_most=5.0),),
        sizes={"seconds": 0.5, "scale": 1.0},
        small={"seconds": 0.01, "scale": 1 / 256},
        group="stalls",
    ),
    Row(
        name="stalls_peers",
        title="longest iteration of the loop in the first copy between two devices, beside a kernel of 0.5 s",
        module="stalls",
        unit="ms",
        better="lower",
        baseline="the second copy",
        bounds=(Bound("p50", at_most=15.0),),
        sizes={"seconds": 0.5, "nbytes": MIB},
        small={"seconds": 0.01},
        devices=2,
        group="stalls_x2",
    ),
    Row(
        name="stalls_driver_peers",
        title="longest launch of a thread, while another one lets a device access the memory of another one",
        module="raw_stalls",
        unit="ms",
        better="lower",
        baseline="no call",
        bounds=(Bound("p50", at_most=5.0),),
        sizes={"seconds": 0.5},
        small={"seconds": 0.01},
        devices=2,
        group="stalls_x2",
    ),
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
        name="launch",
        title="a launch that is not awaited",
        module="throughput",
        unit="µs",
        better="lower",
        baseline="launch and event record by the bare driver",
        bounds=(Bound("c_ratio", at_most=1.6),),
        sizes={"launches": 200, "repeats": 60},
        small={"launches": 50, "repeats": 2},
    ),
    Row(
        name="host_time",
        title="a launch over a driver that does nothing",
        module="host_time",
        unit="µs",
        better="lower",
        baseline="the driver's two calls",
        bounds=(Bound("p50", at_most=3.0),),
        sizes={"launches": 200, "repeats": 40},
        small={"launches": 50, "repeats": 2},
    ),
    Row(
        name="listening",
        title="a launch with a label, over a driver that does nothing",
        module="listening",
        unit="ns",
        better="lower",
        baseline="a launch without a label",
        bounds=(Bound("p50", at_most=60.0), Bound("three_listeners_ns", at_most=1000.0)),
        sizes={"launches": 200, "warmup": 50, "repeats": 100},
        small={"launches": 50, "warmup": 10, "repeats": 5},
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
        name="ops_8x16_asyncio",
        title="awaited operations, 8 streams with 16 in flight each, by asyncio.gather",
        module="throughput",
        unit="ops/s",
        better="higher",
        baseline="aiocuda.gather",
        bounds=(Bound("c_ratio", at_least=0.30),),
        sizes={"streams": 8, "in_flight": 16, "rounds": 40, "repeats": 20},
        small={"rounds": 2, "repeats": 2},
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
    _streams(64, series=5),  # the streams share hardware queues: what comes in between shows here first
    _streams(128),
    _service(64, of_on_loop=0.9, of_threads=2.3),
    _service(8192, of_on_loop=1.0, of_threads=1.35),
    Row(
        name="torch_serving",
        title="256 handlers, each one row through a small model of PyTorch, in batches of at most 32",
        module="serving_torch",
        unit="requests/s",
        better="higher",
        baseline="asyncio.to_thread for each request",
        bounds=(Bound("ratio", at_least=1.0), Bound("times_of_batched", at_least=1.0)),
        sizes={"handlers": 256, "requests": 40, "repeats": 7, "open_seconds": 1.0},
        small={"handlers": 64, "requests": 5, "repeats": 2, "open_seconds": 0.1},
    ),
    Row(
        name="service_freeze",
        title="p99 over HTTP, 128 connections, a small model of PyTorch in batches",
        module="frozen_service",
        unit="ms",
        better="lower",
        baseline="the same service with freeze=False",
        bounds=(
            Bound("ratio", at_most=0.35),
            Bound("p50_ratio", at_most=1.0),
            Bound("open_p50_ratio", at_most=1.0),
        ),
        sizes={"connections": 128, "seconds": 3.0, "open_seconds": 2.0, "repeats": 2},
        small={"connections": 8, "seconds": 0.4, "open_seconds": 0.4, "repeats": 1},
    ),
    Row(
        name="cluster_local",
        title="a call with 1 KB to a replica on this machine",
        module="clusters",
        unit="ms",
        better="lower",
        baseline="asyncio streams over a socket pair to a process",
        bounds=(Bound("p50", at_most=0.5), Bound("array_gb_s", at_least=1.0)),
        sizes={"nbytes": 64 << 20, "copies": 15, "repeats": 2000, "warmup": 200},
        small={},
    ),
    Row(
        name="cluster_losses",
        title="from a fault or SIGKILL of a replica under load until it serves again",
        module="cluster_losses",
        unit="s",
        better="lower",
        baseline="to open the cluster, with its objects",
        bounds=(
            Bound("p50", at_most=5.0),
            Bound("longest_call_s", at_most=2.0),
            Bound("memory_lost_mib", at_most=64.0),
        ),
        sizes={"rounds": 20},
        small={"rounds": 2},
    ),
    Row(
        name="cluster_dask",
        title="a call with 1 KB to a replica on a Dask worker of this machine",
        module="clusters",
        unit="ms",
        better="lower",
        baseline="a call of a plain actor of distributed",
        bounds=(Bound("p50", at_most=1.5), Bound("direct_ms", at_most=1.5)),
        sizes={"repeats": 1000, "warmup": 100},
        small={},
    ),
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
    _pageable("up", 2.5, 0.70),
    _pageable("down", 2.0, 0.85),
    Row(
        name="empty_free",
        title="stream.empty of 1 MiB + free, warm",
        module="memory",
        unit="µs",
        better="lower",
        baseline="cuMemAllocAsync + cuMemFreeAsync",
        bounds=(Bound("p50", at_most=4.0),),
        sizes={"nbytes": MIB, "burst": 100, "repeats": 300, "peer_repeats": 300},
        small={"repeats": 20},
        peers=(CUPY_POOL, TORCH_ALLOCATOR),
    ),
    Row(
        name="free_in_flight",
        title="free of a buffer that 100 ms of work are about to use",
        module="memory",
        unit="µs",
        better="lower",
        baseline="cuMemFreeAsync",
        bounds=(Bound("p50", at_most=50.0), Bound("other_stream_us", at_most=50.0)),
        sizes={"nbytes": MIB, "seconds": 0.1, "buffers": 32, "repeats": 6},
        small={"seconds": 10e-3, "repeats": 2},
    ),
    Row(
        name="reuse_ping_pong",
        title="one block used by two streams in turn, behind 100 ms of work",
        module="memory",
        unit="µs",
        better="lower",
        baseline="the same two fills and two waits by hand",
        bounds=(Bound("host_waits", at_most=0), Bound("blocks", at_most=1)),
        sizes={"nbytes": MIB, "seconds": 0.1, "turns": 50, "repeats": 10},
        small={"seconds": 20e-3, "repeats": 2},
    ),
    Row(
        name="graph_launch",
        title="upload, empty kernel, download: one launch of a graph",
        module="graphs",
        unit="µs",
        better="lower",
        baseline="the same by three verbs",
        bounds=(Bound("ratio", at_most=0.75),),
        sizes={"nbytes": 4096, "launches": 50, "repeats": 200},
        small={"launches": 20, "repeats": 5},
    ),
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
        name="unified_prefetch",
        title="64 MB of managed memory that the host wrote, read by a kernel behind the prefetch that is suggested",
        module="unified",
        unit="GB/s",
        better="higher",
        baseline="the same without the prefetch: moved on demand",
        bounds=(Bound("ratio", at_least=1.0),),
        sizes={"nbytes": 64 * MIB, "repeats": 15},
        small={"nbytes": MIB, "repeats": 2},
    ),
    _pool("load_balanced", "p99 of all items", 0.8),
    _pool("priority", "p99 of the critical items", 0.5),
    _pool("workload", "time of the whole", 1.0),
    Row(
        name="barrier_16",
        title="barrier over 16 streams, enqueue to resume",
        module="pools",
        unit="µs",
        better="lower",
        baseline="hub events by hand, spinning",
        bounds=(Bound("ratio", at_most=2.0),),
        sizes={"streams": 16, "repeats": 300},
        small={"repeats": 20},
    ),
    Row(
        name="cancel_waiters",
        title="10 000 waiters of one operation, cancelled in the order of their coming",
        module="waiters",
        unit="ms",
        better="lower",
        baseline="as many waiters of an asyncio.Event, cancelled in that order",
        bounds=(Bound("ratio", at_most=2.0), Bound("reverse_ratio", at_most=2.0)),
        sizes={"waiters": 10_000, "repeats": 15},
        small={"repeats": 3},
    ),
    Row(
        name="pipeline_bound",
        title="up, compute, down of 2-5-2, 5-5-5, 1-10-1 and 10-1-10 ms: speed-up, where it is least near to its bound",
        module="pipelines",
        unit="of the bound",
        better="higher",
        baseline="hand-written events on three streams",
        bounds=(
            Bound("p50", at_least=0.97),
            *(Bound(f"of_bound_{mix}", at_least=0.97) for mix in ("2_5_2", "5_5_5", "1_10_1", "10_1_10")),
            *(Bound(f"of_by_hand_{mix}", at_least=0.98) for mix in ("2_5_2", "5_5_5", "1_10_1", "10_1_10")),
            Bound("longest_turn_ms", at_most=5.0),
        ),
        sizes={"iterations": 100, "depth": 3, "scale": 1.0, "repeats": 5},
        small={"iterations": 20, "repeats": 1},
    ),
    Row(
        name="pipeline_1ms",
        title="up, compute, down of 1 ms each: speed-up ÷ bound",
        module="pipelines",
        unit="of the bound",
        better="higher",
        baseline="hand-written events on three streams",
        bounds=(Bound("ratio", at_least=0.98), Bound("longest_turn_ms", at_most=5.0)),
        sizes={"iterations": 200, "depth": 3, "scale": 1.0, "repeats": 8},
        small={"iterations": 20, "scale": 2.0, "repeats": 2},
    ),
    _short_stages("", 0.90),
    _short_stages("_replay", 0.97),
    _copies(4, 100, 0.85),
    _copies(16, 320, 0.94),
    Row(
        name="pipeline_30us",
        title="an item of three 30 µs kernels, depth 5",
        module="pipelines",
        unit="µs",
        better="lower",
        baseline="the kernel's own time",
        bounds=(Bound("ratio", at_most=1.6),),
        sizes={"iterations": 1000, "depth": 5, "seconds": 30e-6, "repeats": 10},
        small={"iterations": 50, "seconds": 1e-3, "repeats": 2},
    ),
    Row(
        name="pipeline_iteration",
        title="an iteration of 4 KB up, an empty kernel, 4 KB down",
        module="pipelines",
        unit="µs",
        better="lower",
        baseline="hand-written events on three streams",
        bounds=(Bound("p50", at_most=100.0), Bound("replayed_us", at_most=100.0)),
        sizes={"iterations": 1000, "depth": 4, "repeats": 10},
        small={"iterations": 100, "repeats": 2},
    ),
    Row(
        name="pipeline_stages",
        title="an item and stage, of six stages that launch an empty kernel",
        module="pipelines",
        unit="µs",
        better="lower",
        baseline="of three such stages",
        bounds=(Bound("ratio", at_most=1.3),),
        sizes={"iterations": 1000, "depth": 4, "repeats": 10},
        small={"iterations": 100, "repeats": 2},
    ),
    Row(
        name="pipeline_advice",
        title="the same four mixes: time at depth 3 ÷ time as the pipeline advises, the least",
        module="pipelines",
        unit="×",
        better="higher",
        baseline="as it was",
        bounds=(Bound("p50", at_least=0.99),),
        sizes={"iterations": 50, "depth": 3, "scale": 1.0, "repeats": 5},
        small={"iterations": 6, "scale": 2.0, "repeats": 1},
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
        name="all_reduce_256mb",
        title="all-reduce of three buffers of 256 MB on one device",
        module="coordination",
        unit="ms",
        better="lower",
        baseline="a copy of as many bytes within the device",
        bounds=(Bound("ratio", at_most=1.3),),
        sizes={"bytes": 256 << 20, "buffers": 3, "repeats": 20},
        small={"bytes": 1 << 20, "repeats": 2},
    ),
    Row(
        name="all_reduce_devices",
        title="all-reduce of 256 MB on each of two devices",
        module="coordination",
        unit="ms",
        better="lower",
        baseline="copies of as many bytes between the devices",
        bounds=(Bound("ratio", at_most=1.5),),
        sizes={"bytes": 256 << 20, "small_bytes": 1 << 20, "repeats": 20, "peer_repeats": 20},
        small={"bytes": 1 << 20, "small_bytes": 1 << 10, "repeats": 2},
        peers=(NCCL,),
        devices=2,
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
    _lateness(1, 0.3),
    _lateness(16, 0.22),
    _streams_bound(8, tasks=1.06),
    _streams_bound(32, tasks=1.06),
    _streams_bound(64, tasks=1.06),
    _streams_bound(128, tasks=1.15),
    Row(
        name="stuck_host_function",
        title="lateness while another library's Python host function takes 20 ms, again and again",
        module="lateness",
        unit="ms",
        better="lower",
        baseline="a raw host callback",
        bounds=(Bound("worst_latest_ms", at_most=3.0),),
        sizes={"streams": 4, "held": 20e-3, "slice": 0.6, "scale": 1.0, "runs": 5},
        small={"streams": 2, "slice": 0.05, "scale": 0.2, "runs": 2},
        group="waits",
    ),
    Row(
        name="kernel_200us",
        title="latency added to a 200 µs kernel",
        module="latency",
        unit="µs",
        better="lower",
        baseline="a raw host callback",
        bounds=(Bound("ratio", at_most=1.0),),
        sizes={"seconds": 200e-6, "slice": 0.3, "runs": 5},
        small={"slice": 0.05, "runs": 2},
        group="waits",
    ),
    Row(
        name="idle_64_streams",
        title="processor time of an idle loop with 64 open streams, for each second",
        module="latency",
        unit="ms",
        better="lower",
        baseline="the loop without the streams",
        bounds=(Bound("worst_beyond_ms", at_most=1.0),),
        sizes={"streams": 64, "slice": 0.5, "runs": 5},
        small={"slice": 0.05, "runs": 2},
        group="waits",
    ),
    Row(
        name="torch_submit",
        title="64 handlers, each 64 rows through a small model of PyTorch, by submit on four streams",
        module="torch_submit",
        unit="requests/s",
        better="higher",
        baseline="PyTorch on the loop with the same switch of streams, an event and sleep(0)",
        bounds=(Bound("worst_of_switched", at_least=0.90),),
        sizes={"rows": 64, "handlers": 64, "streams": 4, "slice": 0.3, "launches": 500, "repeats": 3, "runs": 5},
        small={"handlers": 8, "slice": 0.03, "launches": 50, "repeats": 1, "runs": 2},
        group="waits",
    ),
    *map(_colouring, ("annealing", "conflict_repair", "reservoir")),
    _workload(
        "quantum",
        "quantum: a time step of a wave function of 256 × 256 points, measured every ten steps",
        {"points": 256, "steps": 1000},
        {"points": 64, "steps": 20},
    ),
    *_STALL_ROWS,
)

ROWS: dict[str, Row] = {row.name: row for row in _ALL}

#: Rows that belong together, by the name that measures them all.
GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(row.name for row in _ALL if row.group == group) for group in {row.group: None for row in _ALL} if group
}


def size(text: str) -> tuple[str, float]:
    """Return the name and the value of ``NAME=VALUE``, an argument of the command line."""
    name, _, value = text.partition("=")
    if not any(name in row.sizes for row in _ALL):
        raise ValueError(f"no row has a size {name!r}")
    return name, float(value)
