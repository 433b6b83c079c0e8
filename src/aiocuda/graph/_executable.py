"""Executable: a graph as the driver has it; and all of those that one device has."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..completion._device_state import DeviceState
from ..completion._failure import Failure, raisable
from ..completion._operation import Operation
from ..completion._prediction import Estimate
from ..completion._reactor import Reactor
from ..completion._stream_queue import StreamQueue
from ._steps import Step

if TYPE_CHECKING:
    from typing import Any

    from .._device import Device

__all__ = ["Executable", "Graphs"]


class Graphs:
    """The driver's graphs of one device. A finaliser leaves a handle in `dropped`, and does no more."""

    __slots__ = ("_driver", "dropped", "made")

    def __init__(self, device_state: DeviceState) -> None:
        self._driver = device_state.driver
        self.made: set[int] = set()
        self.dropped: list[int] = []

    def watch(self, reactor: Reactor) -> None:
        """From now on this loop, too, gives back what is left."""
        if not any(getattr(sweep, "func", None) == self.sweep for sweep in reactor.sweeps):
            reactor.sweeps = (*reactor.sweeps, functools.partial(self.sweep, reactor))
        self.sweep(reactor)

    def sweep(self, reactor: Reactor) -> None:
        """Give back what finalisers have left, on a worker. After a fault there is nobody to give it to."""
        graphs: list[int] = []
        while self.dropped:
            try:
                graphs.append(self.dropped.pop())
            except IndexError:
                break  # another loop was quicker
        if graphs and self._driver.fault is None:
            reactor.jobs.start(functools.partial(self._destroy, graphs), reactor.jobs.report_unawaited)

    def _destroy(self, graphs: list[int]) -> None:
        """On a worker."""
        for graph in graphs:
            self.made.discard(graph)
            self._driver.graph_destroy(graph)

    def abandon(self) -> None:
        """The device may still run them, and nobody will know when it has done: nothing goes back."""
        self.made.clear()
        self.dropped.clear()

    def close(self) -> Callable[[], None]:
        """The device is closed and drained: everything goes back. What is left to be done may block."""
        made = sorted(self.made)
        self.abandon()
        return functools.partial(self._destroy, made)


class Executable:
    """One graph: being built on a worker, built, or not to be had. It is the gate of launches that come before.

    Operations hold it until their turn has come; when nobody does any more, the driver gets it back.
    """

    __slots__ = ("__weakref__", "_applied", "_device", "_graphs", "_handle", "_reactor", "_steps", "_told", "_waiting",
                 "built", "error", "estimate")  # fmt: skip

    def __init__(self, device: Device, reactor: Reactor, graphs: Graphs, steps: tuple[Step, ...]) -> None:
        self._device = device
        self._reactor = reactor
        self._graphs = graphs
        self._steps: list[Step] = list(steps)  # as the driver has them
        self._applied: tuple[Step, ...] | None = steps  # the same, where all of them came from one launch
        self._handle: int | None = None
        self._waiting: dict[StreamQueue, None] = {}
        self._told: list[asyncio.Future[None]] = []
        self.built = False
        self.estimate = Estimate()
        self.error: BaseException | None = None

    # -- built ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build it, once the memory that it copies from and to is page-locked."""
        for step in self._steps:
            for block in step.blocks:
                region = block.region
                if region is not None and region.error is not None:
                    self._finished(None, raisable(region.error))
                    return
                if region is not None and not region.locked:
                    region.when_locked(self.start, self._reactor.loop)
                    return
        try:
            self._reactor.jobs.start(self._build, self._finished)
        except Exception as error:  # noqa: BLE001 - the device has been closed meanwhile: who waits is told
            self._finished(None, error)

    def _build(self) -> None:
        """On a worker. It keeps the handle by itself: nobody may be left to be told."""
        device = self._device
        nodes = [step.for_driver(device) for step in self._steps]
        self._handle = device.driver.graph_build(device.index, nodes)
        self._graphs.made.add(self._handle)

    def _finished(self, result: None, error: BaseException | None) -> None:
        self.built, self.error = error is None, error
        waiting, self._waiting = self._waiting, {}
        for queue in waiting:
            queue.host_queue.pump()
            queue.attend()
        told, self._told = self._told, []
        for future in told:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Return once it is built; raise why it could not be."""
        if not self.built and self.error is None:
            told: asyncio.Future[None] = self._reactor.loop.create_future()
            self._told.append(told)
            await told
        if self.error is not None:
            raise raisable(self.error)

    # -- the gate of early launches ------------------------------------------------------------------------------

    def wanted_by(self, queue: StreamQueue) -> Executable:
        """This queue has a launch that waits for it."""
        self._waiting[queue] = None
        return self

    def ready(self, operation: Operation[Any] | None) -> bool:
        """Is it built? Raises why it could not be."""
        if self.error is not None:
            raise raisable(self.error)
        return self.built

    def failure(self) -> Failure | None:
        """None: its own failure is raised."""
        return None

    # -- launched ------------------------------------------------------------------------------------------------

    def launch(self, stream: int, steps: tuple[Step, ...]) -> None:
        """Give it to the driver's stream, with these steps: what they were when the launch was enqueued."""
        handle = self._handle
        assert handle is not None  # else the gate would not have opened
        driver = self._device.driver
        if steps is not self._applied:
            self._applied = None
            for index, (wanted, there) in enumerate(zip(steps, self._steps, strict=True)):
                if wanted is not there:
                    driver.graph_update(handle, index, wanted.for_driver(self._device))
                    self._steps[index] = wanted
            self._applied = steps
        driver.graph_launch(stream, handle)

    def __del__(self) -> None:
        # A finaliser runs on any thread, in the middle of anything, so it does this one thing.
        if self._handle is not None:
            self._graphs.dropped.append(self._handle)
