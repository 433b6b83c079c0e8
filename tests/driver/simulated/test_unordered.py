"""L2: what CUDA does not order comes in either order, and what it orders in that one; content changes at completion."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from aiocuda._base._types import Span
from tests.driver.simulated.kit import Bench

#: Makes ready what an operation of a stream needs; what it returns enqueues it.
Ready: TypeAlias = Callable[[Bench, int], Callable[[], Any]]

SEEDS = 1_000
LEAST = SEEDS // 5


def kernel(bench: Bench, stream: int) -> Callable[[], Any]:
    return functools.partial(bench.launch, stream, lambda: None)


def fill(bench: Bench, stream: int) -> Callable[[], Any]:
    return functools.partial(bench.driver.fill, stream, bench.memory(stream), b"\x01", 64)


def copy(bench: Bench, stream: int) -> Callable[[], Any]:
    return functools.partial(bench.driver.copy, stream, bench.memory(stream), bench.memory(stream), 64)


def upload(bench: Bench, stream: int) -> Callable[[], Any]:
    return functools.partial(bench.upload, stream, bench.memory(stream), bench.pinned(64))


def download(bench: Bench, stream: int) -> Callable[[], Any]:
    return functools.partial(bench.download, stream, bench.pinned(64), bench.memory(stream))


def prefetch(bench: Bench, stream: int) -> Callable[[], Any]:
    address = bench.driver.managed_allocate(0, 64)
    return functools.partial(bench.driver.prefetch, stream, address, 64, 0)


VERBS: list[Ready] = [kernel, fill, copy, upload, download, prefetch]
PAIRS = [(one, other) for index, one in enumerate(VERBS) for other in VERBS[index:]]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda verb: verb.__name__)
def test_two_streams_end_in_either_order(one: Ready, other: Ready) -> None:
    first = 0
    for seed in range(SEEDS):
        bench = Bench(seed)
        left, right = bench.stream(), bench.stream()
        ready = one(bench, left), other(bench, right)
        for enqueue in ready:
            enqueue()
        bench.finish(left, right)
        first += bench.ended()[0] == left
        bench.driver.close()
    assert LEAST <= first <= SEEDS - LEAST


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_end_of_a_long_chain_may_come_before_a_single_operation() -> None:
    """A is given ten kernels, then B one: B's may be first of all, and may be last of all."""
    last = 0
    for seed in range(SEEDS):
        bench = Bench(seed)
        a, b = bench.stream(), bench.stream()
        for _ in range(10):
            bench.launch(a, lambda: None)
        bench.launch(b, lambda: None)
        bench.finish(a, b)
        last += bench.ended()[-1] == b
        bench.driver.close()
    assert LEAST <= last <= SEEDS - LEAST


@pytest.mark.slow
def test_two_devices_end_in_either_order() -> None:
    first = 0
    for seed in range(SEEDS):
        bench = Bench(seed, devices=2)
        here, there = bench.stream(), bench.stream(device=1)
        bench.launch(here, lambda: None)
        bench.launch(there, lambda: None, device=1)
        bench.finish(here, there)
        first += bench.ended()[0] == here
        bench.driver.close()
    assert LEAST <= first <= SEEDS - LEAST


def test_one_stream_keeps_its_order() -> None:
    for seed in range(100):
        bench = Bench(seed)
        stream = bench.stream()
        order: list[int] = []
        for index in range(10):
            bench.launch(stream, functools.partial(order.append, index))
        bench.finish(stream)
        assert order == list(range(10))


def test_a_wait_orders_two_streams() -> None:
    for seed in range(100):
        bench = Bench(seed, devices=2)
        here, there = bench.stream(), bench.stream(device=1)
        order: list[str] = []
        bench.launch(here, functools.partial(order.append, "here"))
        bench.driver.stream_wait(there, bench.record(here))
        bench.launch(there, functools.partial(order.append, "there"), device=1)
        bench.finish(here, there)
        assert order == ["here", "there"]


def test_a_higher_priority_is_not_passed_over() -> None:
    """Two copies wait for an engine that is busy: with every seed, the one of higher priority is next."""
    for seed in range(100):
        bench = Bench(seed, latency=0.05)
        streams = [bench.stream(), bench.stream(priority=0), bench.stream(priority=-5)]
        ready = [upload(bench, stream) for stream in streams]
        ready[0]()
        while not bench.trace[-1].endswith(f"start upload in {streams[0]}"):
            assert bench.driver.run_next()
        for enqueue in ready[1:]:
            enqueue()
        bench.driver.advance_time(60e-6)  # later than any doorbell, sooner than the transfer
        bench.finish(*streams)
        assert bench.ended() == [streams[0], streams[2], streams[1]]


# When content changes


def _over(bench: Bench, device: int = 0) -> tuple[Callable[[], Any], int]:
    """Device memory full of zeros: how to look at it behind the driver's back, and where it is."""
    address = bench.memory(bench.stream(device), device=device)
    look = functools.partial(bench.bytes_of, address, device=device)
    look()[:] = 0
    return look, address


@pytest.mark.parametrize("kind", ["upload", "download", "copy", "fill", "kernel", "peer"])
@pytest.mark.parametrize("seed", range(10))
def test_content_changes_at_completion(seed: int, kind: str) -> None:
    bench = Bench(seed, devices=2, latency=1e-3)
    driver, stream = bench.driver, bench.stream()
    source, sevens = _over(bench)
    source()[:] = 7
    look, target = _over(bench, device=1 if kind == "peer" else 0)
    if kind == "upload":
        bench.upload(stream, target, bench.pinned(64, 7))
    elif kind == "download":
        array = bench.pinned(64)
        look = functools.partial(np.copy, array)
        bench.download(stream, array, sevens)
    elif kind == "copy":
        driver.copy(stream, target, sevens, 64)
    elif kind == "fill":
        driver.fill(stream, target, b"\x07", 64)
    elif kind == "peer":
        driver.copy_peer(stream, target, 1, sevens, 0, 64)
    else:
        bench.launch(stream, lambda data: data.fill(7), Span(target, (64,), "|u1"), format="P")
    assert (look() == 0).all()
    event = bench.record(stream)
    while not driver.event_query(event):
        assert (look() == 0).all()
        assert driver.run_next()
    assert (look() == 7).all()


def test_source_is_read_at_completion() -> None:
    """A program must not write into the source before that. If it does, the device reads the new bytes."""
    bench = Bench(3)
    stream = bench.stream()
    there, source = bench.memory(stream), bench.pinned(64, 1)
    bench.upload(stream, there, source)
    source[:] = 2
    bench.finish(stream)
    assert (bench.bytes_of(there) == 2).all()
