"""The methods about graphs. A graph is built node by node, never by capturing a stream.

All calls release the GIL. Building a graph holds locks of the NVIDIA driver for milliseconds, and runs on a worker
thread. A launch puts an unknown number of entries into the hardware queue, which may be full. An update may wait for a
launch in another thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Sequence
from typing import NamedTuple

from ...errors import InvalidArgumentError, WrongDeviceError
from ..protocol import CopyNode, EmptyNode, FillNode, KernelNode, Node, check_nodes, check_update
from . import _abi
from ._code import CudaCode
from ._core import OpenDevice, RelaxedCapture, StreamInfo
from ._entry import Word, word
from ._streams import CudaStreams

__all__ = ["CudaGraphs"]


class _Packed(NamedTuple):
    """The parameters of a node, and the objects that their addresses point to."""

    structure: ctypes.Structure
    alive: object

    @property
    def address(self) -> int:
        return ctypes.addressof(self.structure)


@dataclasses.dataclass(slots=True)
class _Graph:
    """An executable graph, and the graph that it was instantiated from. An update needs the nodes of the latter."""

    device: int
    nodes: list[Node]
    cuda_nodes: list[tuple[int, ...]]  #: ``CUgraphNode`` of each node; several for a fill whose words differ
    template: int  #: ``CUgraph``
    executable: int  #: ``CUgraphExec``
    word: Word = dataclasses.field(init=False)  #: the same, converted for hot calls

    def __post_init__(self) -> None:
        self.word = word(self.executable)


class CudaGraphs(CudaStreams, CudaCode):
    """`aiocuda.driver.protocol.Graphs`."""

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library)
        self._graphs: dict[int, _Graph] = {}
        self._uploads: dict[int, StreamInfo] = {}  # by device: the stream that uploads graphs
        self._uploads_lock = threading.Lock()

    def graph_build(self, device: int, nodes: Sequence[Node]) -> int:
        opened = self.opened(device)
        check_nodes(nodes)
        stream = self._upload_stream(device)
        template, executable = ctypes.c_uint64(), ctypes.c_uint64()
        with opened.current, RelaxedCapture(self):
            code = self.release_gil.cuGraphCreate(ctypes.byref(template), 0)
            self.check_code("cuGraphCreate", code, device)
            try:
                cuda_nodes: list[tuple[int, ...]] = []
                for node in nodes:
                    before = [each for other in node.after for each in cuda_nodes[other]]
                    cuda_nodes.append(self._add(opened, template.value, node, before))
                how = _abi.CUDA_GRAPH_INSTANTIATE_PARAMS(_abi.CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD, stream.handle)
                code = self.release_gil.cuGraphInstantiateWithParams(
                    ctypes.byref(executable), template.value, ctypes.addressof(how)
                )
                self.check_code("cuGraphInstantiateWithParams", code, device)
                # CUDA puts no launch behind the upload. On a busy GPU a first launch overtook it, and faulted.
                code = self.release_gil.cuStreamSynchronize(stream.handle)
                if code:
                    self.release_gil.cuGraphExecDestroy(executable.value)
                    self.fail("cuStreamSynchronize", code, device)
            except BaseException:
                self.release_gil.cuGraphDestroy(template.value)
                raise
        self.call_count += 1
        graph = next(self.handles)
        self._graphs[graph] = _Graph(device, list(nodes), cuda_nodes, template.value, executable.value)
        return graph

    def graph_update(self, graph: int, index: int, node: Node) -> None:
        known = self._graph(graph)
        opened = self.opened(known.device)
        check_update(known.nodes, index, node)
        cuda_nodes, calls = known.cuda_nodes[index], self.release_gil
        call, code = "", 0
        with opened.current:
            if isinstance(node, KernelNode):
                call, packed = "cuGraphExecKernelNodeSetParams", self._kernel(opened, node)
                code = calls.cuGraphExecKernelNodeSetParams(known.executable, cuda_nodes[0], packed.address)
            elif isinstance(node, CopyNode):
                call, packed = "cuGraphExecMemcpyNodeSetParams", _copy(node)
                code = calls.cuGraphExecMemcpyNodeSetParams(
                    known.executable, cuda_nodes[0], packed.address, opened.primary
                )
            elif isinstance(node, FillNode):
                call, fills = "cuGraphExecMemsetNodeSetParams", _fills(node)
                if len(fills) != len(cuda_nodes):
                    raise InvalidArgumentError(
                        f"{node!r} takes {len(fills)} fills where the graph has {len(cuda_nodes)}: build another graph"
                    )
                for each, fill in zip(cuda_nodes, fills, strict=True):
                    code = code or calls.cuGraphExecMemsetNodeSetParams(
                        known.executable, each, fill.address, opened.primary
                    )
            if code:
                self.fail(call, code, known.device)
        self.call_count += 1

    def graph_launch(self, stream: int, graph: int) -> None:
        info, known = self.stream_info(stream), self._graph(graph)
        if info.device != known.device:
            self.check()
            raise WrongDeviceError(f"the graph is of device {known.device}, the stream of device {info.device}")
        # This call must release the GIL. The calls of imported and default streams do.
        calls = self.release_gil if info.calls is self.keep_gil else info.calls
        code = calls.cuGraphLaunch(known.word, info.word)
        if code:
            self.fail("cuGraphLaunch", code, info.device)
        self.call_count += 1

    def graph_destroy(self, graph: int) -> None:
        if self.has_faulted:
            return
        known = self._graph(graph)
        del self._graphs[graph]
        with self.opened(known.device).current, RelaxedCapture(self):
            code = self.release_gil.cuGraphExecDestroy(known.executable)
            if code:
                self.fail_release("cuGraphExecDestroy", code, known.device)
            code = self.release_gil.cuGraphDestroy(known.template)
            if code:
                self.fail_release("cuGraphDestroy", code, known.device)
        self.call_count += 1

    def _graph(self, graph: int) -> _Graph:
        try:
            return self._graphs[graph]
        except KeyError:
            raise self.unknown_handle("graph", graph) from None

    def _upload_stream(self, device: int) -> StreamInfo:
        """Return the stream that uploads graphs to a device, so that the first launch need not. Never destroyed."""
        with self._uploads_lock:
            if device not in self._uploads:
                self._uploads[device] = self.make_stream(device, 0)
            return self._uploads[device]

    def _add(self, opened: OpenDevice, template: int, node: Node, before: list[int]) -> tuple[int, ...]:
        """Add a node that waits for others, and return its ``CUgraphNode`` handles."""
        calls, out = self.release_gil, ctypes.c_uint64()
        place, count = ctypes.byref(out), len(before)
        waits = (ctypes.c_uint64 * count)(*before) if count else None
        if isinstance(node, EmptyNode):
            call, code = "cuGraphAddEmptyNode", calls.cuGraphAddEmptyNode(place, template, waits, count)
        elif isinstance(node, KernelNode):
            packed = self._kernel(opened, node)
            call = "cuGraphAddKernelNode"
            code = calls.cuGraphAddKernelNode(place, template, waits, count, packed.address)
        elif isinstance(node, CopyNode):
            packed = _copy(node)
            call = "cuGraphAddMemcpyNode"
            code = calls.cuGraphAddMemcpyNode(place, template, waits, count, packed.address, opened.primary)
        else:
            call, made = "cuGraphAddMemsetNode", []
            for packed in _fills(node):
                code = calls.cuGraphAddMemsetNode(place, template, waits, count, packed.address, opened.primary)
                if code:
                    break
                made.append(out.value)
            else:
                return tuple(made)
        self.check_code(call, code, opened.index)
        return (out.value,)

    def _kernel(self, opened: OpenDevice, node: KernelNode) -> _Packed:
        known = self._functions.get(node.function)
        if known is None:
            raise self.unknown_handle("function", node.function)
        if known.device != opened.index:
            raise WrongDeviceError(
                f"kernel {known.name!r} is loaded on device {known.device}, the graph is of device {opened.index}"
            )
        if node.shared_bytes > known.dynamic_limit:
            self._raise_limit(known, node.shared_bytes)
        buffer = ctypes.create_string_buffer(max(known.pack.size, 1))
        if known.offsets:
            known.pack.pack_into(buffer, 0, *node.values)
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(known.offsets))(*(start + offset for offset in known.offsets))
        parameters = ctypes.addressof(pointers) if known.offsets else None
        structure = _abi.CUDA_KERNEL_NODE_PARAMS(
            known.handle, *node.grid, *node.block, node.shared_bytes, parameters, None, None, None
        )
        return _Packed(structure, (buffer, pointers))


def _copy(node: CopyNode) -> _Packed:
    """Return the parameters of a copy of contiguous bytes. Managed memory counts as device memory."""
    structure = _abi.CUDA_MEMCPY3D(WidthInBytes=node.nbytes, Height=1, Depth=1)
    for side, address, on_host in (
        ("src", node.source, node.kind == "upload"),
        ("dst", node.target, node.kind == "download"),
    ):
        setattr(structure, side + "MemoryType", _abi.CU_MEMORYTYPE_HOST if on_host else _abi.CU_MEMORYTYPE_DEVICE)
        setattr(structure, side + ("Host" if on_host else "Device"), address)
        setattr(structure, side + "Pitch", node.nbytes)
        setattr(structure, side + "Height", 1)
    return _Packed(structure, None)


def _fills(node: FillNode) -> list[_Packed]:
    """Return the parameters of a fill: one row; or one column for each word, if the pattern's words differ."""
    size = len(node.pattern)
    if size not in (1, 2, 4, 8, 16):
        raise InvalidArgumentError(f"a fill pattern has 1, 2, 4, 8 or 16 bytes, not {size}", size=size)
    words = [int.from_bytes(node.pattern[at : at + 4], "little") for at in range(0, size, 4)]
    make = _abi.CUDA_MEMSET_NODE_PARAMS
    if len(set(words)) == 1:
        row = make(node.target, 0, words[0], min(size, 4), node.count * len(words), 1)
        return [_Packed(row, None)]
    return [_Packed(make(node.target + 4 * at, size, word, 4, 1, node.count), None) for at, word in enumerate(words)]
