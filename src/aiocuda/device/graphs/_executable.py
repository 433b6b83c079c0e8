"""ExecutableGraph: a graph as the driver has it."""

from __future__ import annotations

import asyncio
from typing import Any

from ..._base._failure import Failure, raisable
from ..._core import Estimate, Ring, StreamOperation
from ...completion._reactor import Reactor
from .._resources import DeviceResources
from ._nodes import GraphNode

__all__ = ["ExecutableGraph"]


class ExecutableGraph:
    """A graph that a worker thread builds, or has built. It is the gate of launches until it is ``built``.

    Launches hold it until they have been submitted. When nothing holds it any more, it is destroyed. ``error`` is the
    reason if it could not be built, ``estimate`` predicts the time of one launch.
    """

    __slots__ = ("__weakref__", "_applied", "_futures", "_handle", "_nodes", "_reactor", "_resources", "_waiting",
                 "built", "error", "estimate")  # fmt: skip

    def __init__(self, resources: DeviceResources, reactor: Reactor, nodes: tuple[GraphNode, ...]) -> None:
        self._resources = resources
        self._reactor = reactor
        self._nodes: list[GraphNode] = list(nodes)  # as the driver has them
        self._applied: tuple[GraphNode, ...] | None = nodes  # the same, if all of them came from one launch
        self._handle: int | None = None
        self._waiting: dict[Ring, None] = {}
        self._futures: list[asyncio.Future[None]] = []
        self.built = False
        self.estimate = Estimate()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Build it, once the memory that it copies from and to is page-locked, and its kernels are loaded."""
        for node in self._nodes:
            for block in node.blocks:
                region = block.region
                if region is not None and region.error is not None:
                    self._finished(None, raisable(region.error))
                    return
                if region is not None and not region.locked:
                    region.when_locked(self.start, self._reactor.loop)
                    return
        driver, index = self._resources.driver, self._resources.index
        kernels = [node.kernel for node in self._nodes if node.kernel is not None]
        missing = [kernel for kernel in kernels if kernel.loaded(driver, index) is None]
        try:
            if missing:
                self._resources.loop_states.here().start_load(missing, self._loaded)
            else:
                self._reactor.jobs.start(self._build, self._finished)
        except Exception as error:  # noqa: BLE001 - the device was closed meanwhile: waiters get the error
            self._finished(None, error)

    def _loaded(self, result: None, error: BaseException | None) -> None:
        if error is None:
            self.start()
        else:
            self._finished(None, error)

    def _build(self) -> None:
        """Build it. Blocks: only on a worker thread. It sets the handle here, since the loop may have been closed."""
        resources = self._resources
        nodes = [node.for_driver(resources) for node in self._nodes]
        self._handle = resources.driver.graph_build(resources.index, nodes)
        resources.graphs.made.add(self._handle)

    def _finished(self, result: None, error: BaseException | None) -> None:
        self.built, self.error = error is None, error
        waiting, self._waiting = self._waiting, {}
        for queue in waiting:
            queue.rare.host_queue.pump()
            queue.attend()
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Wait until it is built. Raises the error if it could not be."""
        if not self.built and self.error is None:
            future: asyncio.Future[None] = self._reactor.loop.create_future()
            self._futures.append(future)
            await future
        if self.error is not None:
            raise raisable(self.error)

    def wanted_by(self, queue: Ring) -> ExecutableGraph:
        """Wake this queue when it is built."""
        self._waiting[queue] = None
        return self

    def ready(self, operation: StreamOperation[Any] | None) -> bool:
        """True once it is built. Raises the error if it could not be."""
        if self.error is not None:
            raise raisable(self.error)
        return self.built

    def failure(self) -> Failure | None:
        return None  # `ready` raises the error

    def launch(self, stream: int, nodes: tuple[GraphNode, ...]) -> None:
        """Launch it on the driver's stream, with the nodes as they were when the launch was enqueued."""
        handle = self._handle
        assert handle is not None  # else the gate would not have opened
        driver = self._resources.driver
        if nodes is not self._applied:
            self._applied = None
            for index, (wanted, present) in enumerate(zip(nodes, self._nodes, strict=True)):
                if wanted is not present:
                    driver.graph_update(handle, index, wanted.for_driver(self._resources))
                    self._nodes[index] = wanted
            self._applied = nodes
        driver.graph_launch(stream, handle)

    def __del__(self) -> None:
        # A finaliser may run on any thread, in the middle of other code, so it only adds to a list.
        if self._handle is not None:
            self._resources.graphs.dropped.append(self._handle)
