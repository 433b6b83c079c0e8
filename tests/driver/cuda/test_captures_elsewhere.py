"""Calls of any thread leave the captures of other libraries valid, in CUDA's strictest mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.protocol import CopyNode, CudaSource, FillNode, Node, Program
from aiocuda.testing.conformance._rig import Rig, address_of

pytestmark = pytest.mark.gpu

_BYTES = 1 << 20

#: By name: prepares a call before the capture, and returns it.
_CALLS: dict[str, Callable[[Rig], Callable[[], object]]] = {}


def _named(prepare: Callable[[Rig], Callable[[], object]]) -> Callable[[Rig], Callable[[], object]]:
    _CALLS[prepare.__name__.strip("_")] = prepare
    return prepare


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(CudaDriver.get()) as rig:
        yield rig


@_named
def _pin_and_unpin(rig: Rig) -> Callable[[], object]:
    memory = np.zeros(_BYTES, np.uint8)

    def call() -> None:
        rig.driver.pin(address_of(memory), memory.nbytes)
        rig.driver.unpin(address_of(memory))

    return call


@_named
def _pinned(rig: Rig) -> Callable[[], object]:
    return lambda: rig.driver.pinned_deallocate(rig.driver.pinned_allocate(_BYTES))


@_named
def _managed(rig: Rig) -> Callable[[], object]:
    return lambda: rig.driver.managed_deallocate(rig.driver.managed_allocate(rig.device, _BYTES))


@_named
def _allocate(rig: Rig) -> Callable[[], object]:
    stream = rig.stream()
    return lambda: rig.driver.deallocate(rig.driver.allocate(rig.device, 1 << 28, stream), stream)


@_named
def _trim(rig: Rig) -> Callable[[], object]:
    stream = rig.stream()
    rig.driver.deallocate(rig.driver.allocate(rig.device, 1 << 28, stream), stream)
    rig.finish(stream)
    return lambda: rig.driver.pool_trim(rig.device, 0)


@_named
def _sizes(rig: Rig) -> Callable[[], object]:
    return lambda: (rig.driver.memory_info(rig.device), rig.driver.pool_reserved(rig.device))


@_named
def _locate(rig: Rig) -> Callable[[], object]:
    address = rig.memory(256)
    return lambda: rig.driver.locate(address)


@_named
def _stream(rig: Rig) -> Callable[[], object]:
    return lambda: rig.driver.stream_destroy(rig.driver.stream_create(rig.device, 0))


@_named
def _streams_ahead(rig: Rig) -> Callable[[], object]:
    count = rig.driver.statistics()["streams_kept"] + 70
    return lambda: rig.driver.stream_reserve(rig.device, count)


@_named
def _event(rig: Rig) -> Callable[[], object]:
    stream, other = rig.stream(), rig.stream()

    def call() -> None:
        event = rig.driver.event_create(rig.device, True)
        rig.driver.event_record(event, stream)
        rig.driver.stream_wait(other, event)
        rig.driver.event_destroy(event)

    return call


@_named
def _elapsed(rig: Rig) -> Callable[[], object]:
    stream, first, last = rig.stream(), rig.event(timing=True), rig.event(timing=True)
    for event in (first, last):
        rig.driver.event_record(event, stream)
    rig.finish(stream)
    return lambda: rig.driver.event_elapsed_ms(first, last)


@_named
def _copies(rig: Rig) -> Callable[[], object]:
    stream, memory, host = rig.stream(), rig.memory(_BYTES), address_of(rig.small(_BYTES))

    def call() -> None:
        rig.driver.upload(stream, memory, host, _BYTES)
        rig.driver.fill(stream, memory, b"\1", _BYTES)
        rig.driver.copy(stream, memory, memory + _BYTES // 2, _BYTES // 2)
        rig.driver.download(stream, host, memory, _BYTES)

    return call


@_named
def _pageable_copies(rig: Rig) -> Callable[[], object]:
    stream, memory, host = rig.stream(), rig.memory(_BYTES), np.zeros(_BYTES, np.uint8)

    def call() -> None:
        rig.driver.upload(stream, memory, address_of(host), _BYTES)
        rig.driver.download(stream, address_of(host), memory, _BYTES)

    return call


@_named
def _prefetch(rig: Rig) -> Callable[[], object]:
    stream, memory = rig.stream(), rig.managed(_BYTES)
    return lambda: rig.driver.prefetch(stream, address_of(memory), _BYTES, rig.device)


@_named
def _advise(rig: Rig) -> Callable[[], object]:
    memory = rig.managed(_BYTES)

    def call() -> None:
        rig.driver.advise(address_of(memory), _BYTES, "set_read_mostly", rig.device)
        rig.driver.managed_attributes(address_of(memory), _BYTES)

    return call


@_named
def _launch(rig: Rig) -> Callable[[], object]:
    stream, memory = rig.stream(), rig.memory(256)
    return lambda: rig.affine(stream, memory, 64, 2, 1)


@_named
def _load(rig: Rig) -> Callable[[], object]:
    source = CudaSource("captured_elsewhere", 'extern "C" __global__ void captured_elsewhere(int n) {}')

    def call() -> None:
        image, symbol, *_ = rig.driver.compile(rig.device, source)
        rig.driver.load(rig.device, Program("captured_elsewhere", "i", image=image, symbol=symbol))

    return call


@_named
def _graph(rig: Rig) -> Callable[[], object]:
    stream, memory, host = rig.stream(), rig.memory(_BYTES), address_of(rig.small(_BYTES))
    nodes: list[Node] = [FillNode(memory, b"\1", 64), CopyNode("upload", memory, host, 64, after=(0,))]

    def call() -> None:
        graph = rig.driver.graph_build(rig.device, nodes)
        rig.driver.graph_update(graph, 0, FillNode(memory, b"\2", 64))
        rig.driver.graph_launch(stream, graph)
        rig.driver.graph_destroy(graph)

    return call


@_named
def _notify(rig: Rig) -> Callable[[], object]:
    event, notifier = rig.record(rig.stream()), rig.driver.notifier(rig.device, rig.port)
    return lambda: notifier.ring(event, rig.tag())


@_named
def _notifier(rig: Rig) -> Callable[[], object]:
    return lambda: rig.driver.notifier(rig.device, rig.port)


@pytest.mark.parametrize("name", _CALLS)
def test_calls_of_other_threads_do_not_end_a_capture(name: str, rig: Rig) -> None:
    from cuda.bindings import driver as cuda

    call = _CALLS[name](rig)
    theirs = cuda.CUstream(rig.driver.stream_handle(rig.stream()))
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert cuda.cuStreamBeginCapture(theirs, mode)[0] == 0
    failed: Exception | None = None
    try:
        rig.offload(call)
    except Exception as error:  # noqa: BLE001 - told after the end of the capture
        failed = error
    finally:
        code, graph = cuda.cuStreamEndCapture(theirs)
    assert failed is None
    assert code == 0, "the capture was invalidated"
    assert cuda.cuGraphDestroy(graph)[0] == 0
