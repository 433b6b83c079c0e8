"""Rows about one operation: how long after its end does the coroutine run again?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter, process_time

from .figures import Measured
from .kernels import empty, nanoseconds, spin
from .peers.raw import own_time
from .peers.rows import keep_busy
from .raw_waits import raw_waits
from .runs import Runs
from .setting import Setting
from .slices import added, idle, open_streams


async def await_empty_kernel(setting: Setting) -> Measured:
    """An idle stream, an empty kernel: microseconds from the call that enqueues it to the line after the await.

    Baseline: the same launch, then ``cuStreamSynchronize``, which spins: the least that the driver allows, and it
    blocks the loop. Bound: p50 at most 1.4 times the baseline's. The two take turns, call by call.
    """
    kernel, stream = empty(), setting.stream()
    bare = setting.raw.stream()
    launch, synchronize = setting.raw.launcher(bare, 0.0), setting.raw.synchronize
    measured = Measured([])
    for _ in range(setting.count("repeats") + 20):
        start = perf_counter()
        await stream.launch(kernel, 1, 1)
        measured.samples.append((perf_counter() - start) * 1e6)

        start = perf_counter()
        launch()
        synchronize(bare)
        measured.baseline.append((perf_counter() - start) * 1e6)
    del measured.samples[:20], measured.baseline[:20]  # kernels are loaded, and clocks rise, in the first ones
    return measured


async def latency_5ms(setting: Setting) -> Measured:
    """Microseconds that awaiting adds to a kernel of 5 ms, and the share of a core that it uses.

    Added: enqueue to resume, minus the kernel's own time. CPU share: the process's CPU time (all threads) ÷ wall time,
    during our samples only. Baseline: spinning ``cuStreamSynchronize``, which uses the whole core. Bounds: p50 at most
    80 µs, with at most 30 % of a core. A core that has just spun is awake, which helps the next measurement: so the
    baseline runs in blocks after ours, never between two of our samples.
    """
    seconds = setting.sizes["seconds"]
    kernel, stream = spin(seconds), setting.stream()
    bare = setting.raw.stream()
    launch = setting.raw.launcher(bare, seconds)
    own = own_time(setting.raw, seconds)
    for _ in range(setting.count("warmup")):  # the policy learns the kernel's duration
        await stream.launch(kernel, 1, 1, nanoseconds(seconds))

    measured = Measured([], figures={"own_ms": own * 1e3})
    cpu = wall = 0.0
    blocks = 3
    for _ in range(blocks):
        cpu_start, wall_start = process_time(), perf_counter()
        for _ in range(-(-setting.count("repeats") // blocks)):
            start = perf_counter()
            await stream.launch(kernel, 1, 1, nanoseconds(seconds))
            measured.samples.append((perf_counter() - start - own) * 1e6)
        cpu += process_time() - cpu_start
        wall += perf_counter() - wall_start
        for _ in range(10):
            start = perf_counter()
            launch()
            setting.raw.synchronize(bare)
            measured.baseline.append((perf_counter() - start - own) * 1e6)
    measured.figures["cpu_share"] = cpu / wall
    return measured


async def busy_loop(setting: Setting) -> Measured:
    """Microseconds that awaiting adds to a 200 µs kernel while another coroutine takes 100 µs of every iteration.

    This is the situation of an overloaded service: a thread that needs the GIL from a busy loop hardly ever gets it.
    Baseline: an event of the bare driver queried once per iteration, the best that a busy loop can do. Bound: p50 at
    most 500 µs.
    """
    seconds = setting.sizes["seconds"]
    kernel, stream = spin(seconds), setting.stream()
    bare, event = setting.raw.stream(), setting.raw.event()
    launch = setting.raw.launcher(bare, seconds)
    own = own_time(setting.raw, seconds)

    async def polled(done: Callable[[object], bool]) -> None:
        launch()
        setting.raw.record(event, bare)
        while not done(event):
            await asyncio.sleep(0)

    measured = Measured([], figures={"own_ms": own * 1e3})
    await stream.launch(kernel, 1, 1, nanoseconds(seconds))
    busy = asyncio.create_task(keep_busy(setting.sizes["busy"]))
    try:
        for _ in range(setting.count("repeats")):
            start = perf_counter()
            await stream.launch(kernel, 1, 1, nanoseconds(seconds))
            measured.samples.append((perf_counter() - start - own) * 1e6)

            start = perf_counter()
            await polled(setting.raw.done)
            measured.baseline.append((perf_counter() - start - own) * 1e6)
    finally:
        busy.cancel()
    return measured


async def kernel_200us(setting: Setting) -> Measured:
    """Microseconds that awaiting adds to a kernel of 200 µs. ``cpu_us`` is the processor time of an await.

    Baseline: a raw host callback; ``spinning_us`` and ``spinning_cpu_us`` are those of ``cuStreamSynchronize``. The
    three alternate in slices of one process. Bound: no later than the raw callback.
    """
    seconds, runs = setting.sizes["seconds"], Runs()
    kernel, stream, bare = spin(seconds), setting.stream(), setting.raw.stream()
    launch, own = setting.raw.launcher(bare, seconds), own_time(setting.raw, seconds)

    async def spinning() -> None:
        launch()
        setting.raw.synchronize(bare)

    measured = Measured([])
    with raw_waits(setting.raw, 1) as (raw,):
        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "": lambda: stream.launch(kernel, 1, 1, nanoseconds(seconds)),
            "raw_": lambda: raw.spin(seconds),
            "spinning_": spinning,
        }
        for wait in ways.values():
            await added(wait, own, setting.sizes["slice"] / 10)  # kernels are loaded
        for _ in range(setting.count("runs")):
            for name, wait in ways.items():
                cpu = process_time()
                late = await added(wait, own, setting.sizes["slice"])
                runs.add({f"{name}us": median(late), f"{name}cpu_us": (process_time() - cpu) / len(late) * 1e6})
                if name == "":
                    measured.samples.extend(late)
                elif name == "raw_":
                    measured.baseline.extend(late)
    measured.figures.update(runs.medians())
    return measured


async def idle_64_streams(setting: Setting) -> Measured:
    """Milliseconds of processor time for each second of an idle loop, with 64 open streams that have had work.

    Baseline: the same loop without the streams; slices alternate. ``beyond_ms`` is the difference of the medians of a
    run's two times three slices, because the driver's own threads work for a millisecond now and then. Bound: at most
    1 ms in each second, in the worst run.
    """
    measured, runs, seconds = Measured([]), Runs(), setting.sizes["slice"]
    for _ in range(setting.count("runs")):
        without, beside = list[float](), list[float]()
        for _ in range(3):
            without.append(await idle(seconds))
            async with open_streams(setting.device, setting.count("streams")):
                await asyncio.sleep(seconds / 5)  # what the work of the streams started has ended
                beside.append(await idle(seconds))
        measured.baseline.extend(without)
        measured.samples.extend(beside)
        runs.add({"beyond_ms": median(beside) - median(without)})
    measured.figures.update(runs.medians() | runs.worst("lower", "beyond_ms"))
    return measured
