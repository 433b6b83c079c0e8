"""One call of every method of the driver, for tests of all methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.protocol import CopyNode, EmptyNode, FillNode, KernelNode, Launcher, Notifier, Port, Program
from tests.driver.cuda.fake import Fake

IMPORTED = 0x5EED0

#: Methods that release or restore something. They do not fail after a fault.
RELEASING = {
    "stream_destroy",
    "event_destroy",
    "deallocate",
    "pinned_deallocate",
    "unpin",
    "managed_deallocate",
    "end_queries",
    "graph_destroy",
}

#: Methods that never use a device.
HOST_ONLY = {
    "now",
    "open_port",
    "offload",
    "worker_threads",
    "blame",
    "statistics",
    "versions",
    "close",
    "compile",
    "argument",
    "stream_handle",
    "stream_has_handle",
}


@dataclasses.dataclass(frozen=True)
class Things:
    stream: int
    spare: int
    event: int
    other: int
    function: int
    launch: Launcher
    port: Port
    notifier: Notifier
    graph: int


def things(driver: CudaDriver, fake: Fake) -> Things:
    """One of each, on devices 0 and 1."""
    for device in (0, 1):
        driver.device_open(device)
    fake.parameters((0, 8), (8, 4))
    fake.value("cuDeviceCanAccessPeer", 1)
    driver.stream_import(0, IMPORTED)
    stream = driver.stream_create(0, 0)
    function = driver.load(0, Program("kernel", "Pi", image=b"image", symbol="kernel"))
    port = driver.open_port(lambda: None)
    made = Things(
        stream=stream,
        spare=driver.stream_create(0, 0),
        event=driver.event_create(0, True),
        other=driver.event_create(0, True),
        function=function,
        launch=driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0),
        port=port,
        notifier=driver.notifier(0, port),
        graph=driver.graph_build(0, [EmptyNode(), FillNode(0x1000, b"\x01", 64, (0,))]),
    )
    fake.forget()
    return made


def methods(driver: CudaDriver, made: Things) -> dict[str, Callable[[], object]]:
    """name → a call that works. In this order they work one after the other."""
    program = Program("kernel", "Pi", image=b"image", symbol="kernel")
    stream, event, other = made.stream, made.event, made.other

    def recorded_launch() -> None:
        driver.recorded_launch(stream, made.function, (1, 1, 1), (1, 1, 1), 0)((0x1000, 7), event)

    return {
        "device_count": lambda: driver.device_count(),
        "device_open": lambda: driver.device_open(0),
        "priority_range": lambda: driver.priority_range(0),
        "stream_reserve": lambda: driver.stream_reserve(0, 2),
        "stream_create": lambda: driver.stream_create(0, -1),
        "stream_default": lambda: driver.stream_default(0),
        "stream_import": lambda: driver.stream_import(0, IMPORTED),
        "stream_priority": lambda: driver.stream_priority(stream),
        "stream_query": lambda: driver.stream_query(stream),
        "stream_synchronize": lambda: driver.stream_synchronize(stream),
        "stream_wait": lambda: driver.stream_wait(stream, event),
        "waiter": lambda: driver.waiter((stream,))(event),
        "recorded_wait": lambda: driver.recorded_wait(stream)((other,), event),
        "stream_capturing": lambda: driver.stream_capturing(stream),
        "event_create": lambda: driver.event_create(0, False),
        "event_record": lambda: driver.event_record(event, stream),
        "recorder": lambda: driver.recorder(stream)(event),
        "event_query": lambda: driver.event_query(event),
        "event_elapsed_ms": lambda: driver.event_elapsed_ms(event, other),
        "begin_queries": lambda: driver.begin_queries(),
        "end_queries": lambda: driver.end_queries(),
        "memory_info": lambda: driver.memory_info(0),
        "locate": lambda: driver.locate(0x1000),
        "allocate": lambda: driver.allocate(0, 64, stream),
        "deallocate": lambda: driver.deallocate(0x1000, stream),
        "pool_reserved": lambda: driver.pool_reserved(0),
        "pool_trim": lambda: driver.pool_trim(0, 0),
        "pinned_allocate": lambda: driver.pinned_allocate(64),
        "pinned_deallocate": lambda: driver.pinned_deallocate(0x1000),
        "pin": lambda: driver.pin(0x1000, 64),
        "unpin": lambda: driver.unpin(0x1000),
        "managed_allocate": lambda: driver.managed_allocate(0, 64),
        "managed_deallocate": lambda: driver.managed_deallocate(0x1000),
        "upload": lambda: driver.upload(stream, 0x1000, 0x2000, 64),
        "download": lambda: driver.download(stream, 0x1000, 0x2000, 64),
        "copy": lambda: driver.copy(stream, 0x1000, 0x2000, 64),
        "copy_peer": lambda: driver.copy_peer(stream, 0x1000, 1, 0x2000, 0, 64),
        "fill": lambda: driver.fill(stream, 0x1000, b"\x01", 64),
        "prefetch": lambda: driver.prefetch(stream, 0x1000, 64, -1),
        "advise": lambda: driver.advise(0x1000, 64, "set_accessed_by", 1),
        "managed_attributes": lambda: driver.managed_attributes(0x1000, 64),
        "load": lambda: driver.load(0, program),
        "launcher": lambda: driver.launcher(stream, made.function, (1, 1, 1), (1, 1, 1), 1 << 17),
        "launch": lambda: made.launch((0x1000, 7)),
        "recorded_launch": recorded_launch,
        "recorded_upload": lambda: driver.recorded_upload(stream, 0x1000, 0x2000, 64)((), event),
        "recorded_download": lambda: driver.recorded_download(stream, 0x1000, 0x2000, 64)((), event),
        "graph_build": lambda: driver.graph_build(
            0,
            [
                CopyNode("upload", 0x1000, 0x2000, 64),
                KernelNode(made.function, (1, 1, 1), (1, 1, 1), 1 << 18, (0x1000, 7), (0,)),
            ],
        ),
        "graph_update": lambda: driver.graph_update(made.graph, 1, FillNode(0x1000, b"\x02", 64)),
        "graph_launch": lambda: driver.graph_launch(stream, made.graph),
        "graph_destroy": lambda: driver.graph_destroy(made.graph),
        "notifier_limit": lambda: driver.notifier_limit(0),
        "notifier": lambda: driver.notifier(0, made.port),
        "ring": lambda: made.notifier.ring(event, 5),
        "event_destroy": lambda: driver.event_destroy(other),
        "stream_destroy": lambda: driver.stream_destroy(made.spare),
    }
