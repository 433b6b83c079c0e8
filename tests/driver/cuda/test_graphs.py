"""Graphs: the calls of libcuda."""

from __future__ import annotations

import contextlib
import struct

import pytest

from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.protocol import CopyNode, EmptyNode, FillNode, KernelNode, Node, Program
from aiocuda.errors import DeviceOutOfMemory, DriverError, InvalidArgumentError, StaleHandleError, WrongDeviceError
from tests.driver.cuda.fake import Fake
from tests.driver.cuda.methods import IMPORTED, Things

_INT = 2**32 - 1
_ONE = (1, 1, 1)


def _words(raw: bytes, form: str) -> tuple[int, ...]:
    return struct.unpack("@" + form, raw)


def test_each_node_waits_for_its_dependencies(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuGraphCreate", 0x6001)
    nodes: list[Node] = [
        EmptyNode(),
        EmptyNode(),
        EmptyNode((0, 1)),
        FillNode(0x1000, bytes(range(8)), 4, (2,)),
        EmptyNode((3, 0)),
    ]
    driver.graph_build(0, nodes)
    adds = [call for call in fake.calls() if call.name.startswith("cuGraphAdd")]
    assert [call.name for call in adds] == ["cuGraphAddEmptyNode"] * 3 + ["cuGraphAddMemsetNode"] * 2 + [
        "cuGraphAddEmptyNode"
    ]
    assert {call.arguments[1] for call in adds} == {0x6001}
    assert [call.arguments[3] for call in adds] == [0, 0, 2, 1, 1, 3]  # two fills stand for one pattern of two words
    assert all(call.arguments[2] == 0 for call in adds[:2])
    assert len(set(fake.waits(3))) == 3  # both of them, and the first node
    contexts = {call.context for call in adds}
    assert len(contexts) == 1
    assert 0 not in contexts


def test_graph_is_brought_to_the_device_when_it_is_built(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuStreamCreateWithPriority", 0x7FAB_0010)
    fake.value("cuGraphInstantiateWithParams", 0x7FAB_0020)
    before = driver.statistics()
    graph = driver.graph_build(0, [])
    flags, stream = struct.unpack_from("@QQ", fake.bytes(32))
    assert (flags, stream) == (2, 0x7FAB_0010)  # CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
    assert fake.names()[fake.names().index("cuGraphInstantiateWithParams") :].count("cuStreamSynchronize") == 1
    assert fake.only("cuStreamSynchronize").starts(0x7FAB_0010)  # a first launch could overtake the upload
    driver.graph_build(0, [])
    assert len(fake.calls("cuStreamCreateWithPriority")) == 1  # kept, and nobody's
    assert driver.statistics()["streams_created"] == before["streams_created"]
    assert driver.statistics()["graphs"] == before["graphs"] + 2
    stream = driver.stream_create(0, 0)
    driver.graph_launch(stream, graph)
    assert fake.only("cuGraphLaunch").starts(0x7FAB_0020, driver.stream_handle(stream))


def test_kernel_arrives_bit_for_bit(driver: CudaDriver, fake: Fake, made: Things) -> None:
    fake.value("cuKernelGetFunction", 0xF0F0)
    function = driver.load(0, Program("kernel", "Pi", image=b"image", symbol="kernel"))
    node = KernelNode(function, (1, 2, 3), (4, 5, 6), 7, (0x7F00_0000_0100, -2))
    graph = driver.graph_build(0, [node])
    for call, expected in (("cuGraphAddKernelNode", (0x7F00_0000_0100, -2)), ("update", (0x1000, 9))):
        if call == "update":
            driver.graph_update(graph, 0, KernelNode(function, (1, 2, 3), (4, 5, 6), 7, expected))
            place = fake.only("cuGraphAddKernelNode")
            assert fake.only("cuGraphExecKernelNodeSetParams").arguments[1] != place.arguments[1]
            raw = fake.bytes(72)
            assert _words(raw[:36], "Q7I") == (0xF0F0, 1, 2, 3, 4, 5, 6, 7)
            assert _words(raw[48:72], "3Q") == (0, 0, 0)
        _, packed = fake.launched()
        assert _words(packed[:12], "Qi") == expected


@pytest.mark.parametrize(("kind", "types"), [("upload", (1, 2)), ("download", (2, 1)), ("copy", (2, 2))])
def test_copy_arrives_bit_for_bit(driver: CudaDriver, fake: Fake, kind: str, types: tuple[int, int]) -> None:
    graph = driver.graph_build(0, [CopyNode(kind, 0x1000, 0x2000, 64)])  # type: ignore[arg-type]
    add = fake.only("cuGraphAddMemcpyNode")
    driver.graph_update(graph, 0, CopyNode(kind, 0x3000, 0x4000, 128))  # type: ignore[arg-type]
    update = fake.only("cuGraphExecMemcpyNodeSetParams")
    assert update.arguments[3] == add.arguments[5] != 0  # the context
    raw = fake.bytes(200)
    source, target = _words(raw[:88], "4Qi4x6Q"), _words(raw[88:176], "4Qi4x6Q")
    for side, address, type_ in ((source, 0x4000, types[0]), (target, 0x3000, types[1])):
        assert side[:5] == (0, 0, 0, 0, type_)
        assert side[5:7] == ((address, 0) if type_ == 1 else (0, address))
        assert side[7:9] == (0, 0)
    assert _words(raw[176:], "3Q") == (128, 1, 1)


@pytest.mark.parametrize(
    ("pattern", "row"),
    [
        (b"\x07", (0x1000, 0, 7, 1, 10, 1)),
        (b"\x01\x02", (0x1000, 0, 0x0201, 2, 10, 1)),
        (b"\x01\x02\x03\x04", (0x1000, 0, 0x04030201, 4, 10, 1)),
        (b"\x01\x02\x03\x04" * 4, (0x1000, 0, 0x04030201, 4, 40, 1)),
        (b"\x01\0\0\0\x02\0\0\0", (0x1004, 8, 2, 4, 1, 10)),  # the last of two columns
    ],
)
def test_fill_arrives_bit_for_bit(driver: CudaDriver, fake: Fake, pattern: bytes, row: tuple[int, ...]) -> None:
    graph = driver.graph_build(0, [FillNode(0x1000, pattern, 1)])
    driver.graph_update(graph, 0, FillNode(0x1000, pattern, 10))
    assert _words(fake.bytes(40), "2Q2I2Q") == row
    assert len(fake.calls("cuGraphAddMemsetNode")) == len(fake.calls("cuGraphExecMemsetNodeSetParams"))


def test_fill_that_takes_more_fills_than_before_is_refused(driver: CudaDriver, fake: Fake) -> None:
    graph = driver.graph_build(0, [FillNode(0x1000, b"\x01\x02\x03\x04" * 2, 1)])
    with pytest.raises(InvalidArgumentError, match="takes 2 fills where the graph has 1"):
        driver.graph_update(graph, 0, FillNode(0x1000, bytes(range(8)), 1))
    assert fake.calls("cuGraphExecMemsetNodeSetParams") == []


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("cuGraphAddMemcpyNode", 1, InvalidArgumentError),
        ("cuGraphInstantiateWithParams", 2, DeviceOutOfMemory),
        ("cuGraphInstantiateWithParams", 910, DriverError),
    ],
)
def test_building_that_fails_leaves_nothing(
    driver: CudaDriver, fake: Fake, call: str, code: int, kind: type[Exception]
) -> None:
    fake.value("cuGraphCreate", 0x6001)
    fake.answer(call, code)
    with pytest.raises(kind, match=call):
        driver.graph_build(0, [CopyNode("copy", 0x1000, 0x2000, 64)])
    assert fake.only("cuGraphDestroy").starts(0x6001)
    assert driver.statistics()["graphs"] == 0
    assert fake.current() == 0


def test_upload_that_fails_leaves_nothing(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuGraphCreate", 0x6001)
    fake.value("cuGraphInstantiateWithParams", 0x6002)
    fake.answer("cuStreamSynchronize", 2)
    with pytest.raises(DeviceOutOfMemory, match="cuStreamSynchronize"):
        driver.graph_build(0, [])
    assert fake.only("cuGraphExecDestroy").starts(0x6002)
    assert fake.only("cuGraphDestroy").starts(0x6001)


def test_both_graphs_are_given_back(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuGraphCreate", 0x6001)
    fake.value("cuGraphInstantiateWithParams", 0x6002)
    graph = driver.graph_build(0, [])
    driver.graph_destroy(graph)
    assert fake.only("cuGraphExecDestroy").starts(0x6002)
    assert fake.only("cuGraphDestroy").starts(0x6001)
    with pytest.raises(StaleHandleError):
        driver.graph_destroy(graph)


def test_more_shared_memory_is_asked_for(driver: CudaDriver, fake: Fake, made: Things) -> None:
    driver.graph_build(0, [KernelNode(made.function, _ONE, _ONE, 1 << 17, (0, 0))])
    assert fake.only("cuFuncSetAttribute").arguments[2] & _INT == 1 << 17


def test_what_is_of_another_device_is_refused(driver: CudaDriver, fake: Fake, made: Things) -> None:
    fake.forget()
    with pytest.raises(WrongDeviceError, match="loaded on device 0, the graph is of device 1"):
        driver.graph_build(1, [KernelNode(made.function, _ONE, _ONE, 0, (0, 0))])
    with pytest.raises(WrongDeviceError, match="the graph is of device 0, the stream of device 1"):
        driver.graph_launch(driver.stream_create(1, 0), made.graph)
    assert fake.calls("cuGraphLaunch") == []


@pytest.mark.parametrize("outcome", [0, 1])
def test_graph_calls_do_not_end_a_capture(driver: CudaDriver, fake: Fake, outcome: int) -> None:
    """Building a graph, and giving it back, allocates: in a thread whose capture mode is stricter that is an error."""
    fake.capture_mode(1)
    graph = driver.graph_build(0, [])
    names = [name for name in fake.names() if "Ctx" not in name]
    assert names.index("cuThreadExchangeStreamCaptureMode") < names.index("cuGraphCreate")
    fake.answer("cuGraphExecDestroy", outcome)
    with contextlib.suppress(InvalidArgumentError):
        driver.graph_destroy(graph)
    assert fake.names().count("cuThreadExchangeStreamCaptureMode") == 4
    assert fake.capture_mode() == 1


def test_graph_launch_on_an_imported_stream(driver: CudaDriver, fake: Fake, made: Things) -> None:
    driver.graph_launch(IMPORTED, made.graph)
    launch = fake.only("cuGraphLaunch")
    assert launch.arguments[1] == IMPORTED
    assert not launch.kept_gil
