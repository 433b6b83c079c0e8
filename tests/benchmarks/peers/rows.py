"""The rows, for any peer: the same steps as ours, over `Peer.submit`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeAlias

from ..figures import Measured
from ..services import LAYERS, WIDTH
from ..turns import TurnMeter
from . import Peer

Sizes: TypeAlias = Mapping[str, float]


async def _added(peer: Peer, stream: Any, seconds: float, repeats: int, own: float) -> list[float]:
    """Microseconds from enqueue to resume, beyond the kernel's own time."""
    samples = []
    for _ in range(repeats):
        start = perf_counter()
        await peer.submit(stream, seconds)
        samples.append((perf_counter() - start - own) * 1e6)
    return samples


async def await_empty_kernel(peer: Peer, sizes: Sizes, turns: TurnMeter) -> Measured:
    stream = peer.stream()
    await _added(peer, stream, 0.0, 20, 0.0)  # as for ours: what the first ones load is not counted
    return Measured(await _added(peer, stream, 0.0, int(sizes["peer_repeats"]), 0.0))


async def latency_5ms(peer: Peer, sizes: Sizes, turns: TurnMeter) -> Measured:
    stream, seconds = peer.stream(), sizes["seconds"]
    own = peer.own_time(seconds)
    await peer.submit(stream, seconds)
    cpu, wall = process_time(), perf_counter()
    samples = await _added(peer, stream, seconds, int(sizes["peer_repeats"]), own)
    return Measured(samples, figures={"cpu_share": (process_time() - cpu) / (perf_counter() - wall)})


async def busy_loop(peer: Peer, sizes: Sizes, turns: TurnMeter) -> Measured:
    stream, seconds = peer.stream(), sizes["seconds"]
    own = peer.own_time(seconds)
    await peer.submit(stream, seconds)
    busy = asyncio.create_task(keep_busy(sizes["busy"]))
    try:
        return Measured(await _added(peer, stream, seconds, int(sizes["peer_repeats"]), own))
    finally:
        busy.cancel()


async def all_reduce_devices(peer: Any, sizes: Sizes, turns: TurnMeter) -> Measured:
    large = await _timed(peer.all_reduce(int(sizes["bytes"])), int(sizes["peer_repeats"]))
    small = await _timed(peer.all_reduce(int(sizes["small_bytes"])), int(sizes["peer_repeats"]))
    return Measured(large, figures={"small_us": median(small) * 1e3})


async def _timed(start: Callable[[], Awaitable[object]], repeats: int) -> list[float]:
    """Milliseconds of each, without the first three."""
    samples = []
    for _ in range(repeats + 3):
        began = perf_counter()
        await start()
        samples.append((perf_counter() - began) * 1e3)
    return samples[3:]


async def keep_busy(seconds: float) -> None:
    """Take ``seconds`` of every turn of the loop, until cancelled."""
    while True:
        end = perf_counter() + seconds
        while perf_counter() < end:
            pass
        await asyncio.sleep(0)


async def ops_8x16(peer: Peer, sizes: Sizes, turns: TurnMeter) -> Measured:
    async def worker(stream: Any) -> None:
        for _ in range(int(sizes["rounds"])):
            await asyncio.gather(*[peer.submit(stream, 0.0) for _ in range(int(sizes["in_flight"]))])

    streams = [peer.stream() for _ in range(int(sizes["streams"]))]
    operations = sizes["streams"] * sizes["rounds"] * sizes["in_flight"]
    samples = []
    for _ in range(int(sizes["peer_repeats"]) + 1):
        start = perf_counter()
        await asyncio.gather(*[worker(stream) for stream in streams])
        samples.append(operations / (perf_counter() - start))
    return Measured(samples[1:])  # the first one loads the kernel


async def chain_500(peer: Peer, sizes: Sizes, turns: TurnMeter) -> Measured:
    stream = peer.stream()
    return Measured(await _all_awaited(peer, [stream], int(sizes["kernels"]), sizes))


async def streams(peer: Peer, sizes: Sizes, turns: TurnMeter) -> Measured:
    many = [peer.stream() for _ in range(int(sizes["streams"]))]
    ideal = sizes["kernels"] * peer.own_time(sizes["seconds"]) * 1e3
    return Measured(await _all_awaited(peer, many, int(sizes["kernels"]), sizes), figures={"ideal_ms": ideal})


async def _all_awaited(peer: Peer, many: list[Any], kernels: int, sizes: Sizes) -> list[float]:
    """Milliseconds for ``kernels`` in each of many streams, each awaited."""
    for stream in many:
        await peer.submit(stream, sizes["seconds"])
    samples = []
    for _ in range(int(sizes["peer_repeats"])):
        start = perf_counter()
        await asyncio.gather(*[peer.submit(stream, sizes["seconds"]) for _ in range(kernels) for stream in many])
        samples.append((perf_counter() - start) * 1e3)
    return samples


async def burst_20000(peer: Peer, sizes: Sizes, turns: TurnMeter) -> Measured:
    """The burst after a kernel of 0.3 s: a hardware queue holds about 1 021 entries."""
    stream = peer.stream()
    await peer.submit(stream, 1e-3)
    await peer.submit(stream, 0.0)
    samples, longest = [], 0.0
    turns.reset()
    for _ in range(int(sizes["peer_repeats"])):
        start = perf_counter()
        peer.launch(stream, sizes["held"])
        for number in range(int(sizes["launches"])):
            before = perf_counter()
            peer.launch(stream, 0.0)
            longest = max(longest, perf_counter() - before)
            if number % int(sizes["every"]) == 0:
                await asyncio.sleep(0)
        await peer.submit(stream, 0.0)
        samples.append((perf_counter() - start) * 1e3)
    return Measured(samples, figures={"longest_call_ms": longest * 1e3, "longest_turn_ms": turns.longest() * 1e3})


async def pageable_up(peer: Any, sizes: Sizes, turns: TurnMeter) -> Measured:
    return await _pageable(peer.copies("up", int(sizes["nbytes"])), sizes, turns)


async def pageable_down(peer: Any, sizes: Sizes, turns: TurnMeter) -> Measured:
    return await _pageable(peer.copies("down", int(sizes["nbytes"])), sizes, turns)


async def _pageable(copy: Callable[[], Awaitable[object]], sizes: Sizes, turns: TurnMeter) -> Measured:
    await copy()
    samples = []
    turns.reset()
    for _ in range(int(sizes["peer_repeats"])):
        start = perf_counter()
        await copy()
        samples.append(sizes["nbytes"] / (perf_counter() - start) / 1e9)
    return Measured(samples, figures={"longest_turn_ms": turns.longest() * 1e3})


async def torch_service(peer: Any, sizes: Sizes, turns: TurnMeter) -> Measured:
    """Requests per second of all handlers, each with a stream; the same matrices as the model of PyTorch."""
    requests = [peer.service(int(sizes["rows"]), WIDTH, LAYERS) for _ in range(int(sizes["handlers"]))]

    async def handler(request: Callable[[], Awaitable[None]]) -> None:
        for _ in range(int(sizes["requests"])):
            await request()

    rates = []
    for _ in range(int(sizes["peer_repeats"]) + 1):
        turns.reset()
        start = perf_counter()
        await asyncio.gather(*[handler(request) for request in requests])
        rates.append(len(requests) * sizes["requests"] / (perf_counter() - start))
    return Measured(rates[1:], figures={"longest_turn_ms": turns.longest() * 1e3})


async def empty_free(peer: Any, sizes: Sizes, turns: TurnMeter) -> Measured:
    """Microseconds of making an array of bytes and dropping it, in bursts."""
    burst = int(sizes["burst"])
    once: Callable[[], object] = peer.empty_free(int(sizes["nbytes"]))
    for _ in range(burst):
        once()
    samples = []
    for _ in range(int(sizes["peer_repeats"])):
        start = perf_counter()
        for _ in range(burst):
            once()
        samples.append((perf_counter() - start) / burst * 1e6)
    return Measured(samples)
