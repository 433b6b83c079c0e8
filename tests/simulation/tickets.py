"""Tickets of pipelines in a random program: slots, results, the end of the pipeline, and the order of its stages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aiocuda import AiocudaError, BusyError, ClosedError, Device, Operation, Pipeline, Stage
from tests.simulation.error_log import PlannedError
from tests.simulation.kernels import AFFINE

if TYPE_CHECKING:
    from aiocuda.pipeline import Ticket
    from tests.simulation.actions import Actions

__all__ = ["TicketActions"]

_SIZE = 64

#: Two orders of the stages between upload and download, and what an item becomes in each.
_ORDERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("triple", "add"): lambda item: item * np.uint32(3) + np.uint32(7),
    ("add", "triple"): lambda item: (item + np.uint32(7)) * np.uint32(3),
}


class _LeftError(Exception):
    """Leaves the block of a pipeline."""


class TicketActions:
    """Actions with `Pipeline.submit` and `Pipeline.set_order`. Checks V10, P31 and P39."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return 3 * [self.run_pipeline]

    async def run_pipeline(self) -> None:
        """Submit items to a pipeline, twice, perhaps in another order of its stages; or leave it by an exception."""
        actions = self._actions
        items = _Items(actions, actions.device())
        try:
            async with items.pipeline:
                for order in actions.choose(sorted(_ORDERS)), actions.choose(sorted(_ORDERS)):
                    items.set_order(order)
                    await items.submit(1 + actions.below(6))
                    if actions.below(4) == 0:
                        items.expect_end()
                        raise _LeftError
                    await items.compare()
        except _LeftError:
            items.check_end()
        items.check_kept()


class _Items:
    """The items and tickets of one pipeline."""

    def __init__(self, actions: Actions, device: Device) -> None:
        self._actions = actions
        self._checker = actions.checker
        self._depth = 1 + actions.below(3)
        self._awaits = actions.below(2) == 1  # in the first stage
        self._to_pinned = actions.below(2) == 1  # results lie in the memory of the slot, and are copied
        self._fails: set[int] = set()  # numbers of the items for which a stage raises
        self._begun: set[int] = set()
        self._values: dict[int, npt.NDArray[np.uint32]] = {}
        self._expected = _ORDERS["triple", "add"]
        self._tickets: dict[int, Ticket] = {}
        self._crowds: list[list[Ticket]] = []  # unfinished tickets, where an item begins although they have all slots
        self._kept: list[tuple[int, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]] = []
        self._left: list[int] = []  # the numbers of the items that were unfinished when the block was left
        stages = [
            Stage("up", self._upload_later if self._awaits else self._upload),
            Stage("triple", lambda slot: self._launch(slot, 3, 0)),
            Stage("add", lambda slot: self._launch(slot, 1, 7)),
            Stage("down", self._download),
        ]
        self.pipeline = Pipeline(device, stages, self._depth)

    # -- stages --------------------------------------------------------------------------------------------------

    def _upload(self, slot: Any) -> Operation[Any]:
        self._begun.add(slot.item)
        others = self._tickets.keys() & self._begun - {slot.item}
        unfinished = [self._tickets[number] for number in others if not self._tickets[number].done()]
        if len(unfinished) >= self._depth:
            self._crowds.append(unfinished)
        operation: Operation[Any] = slot.stream.copy(slot.buffer("x", _SIZE, np.uint32), self._values[slot.item])
        return operation

    async def _upload_later(self, slot: Any) -> Operation[Any]:
        await self._actions.pause()
        return self._upload(slot)

    def _launch(self, slot: Any, factor: int, summand: int) -> Operation[Any]:
        if slot.item in self._fails:
            raise PlannedError
        operation: Operation[Any] = slot.stream.launch(
            AFFINE, 1, 32, slot.buffer("x", _SIZE, np.uint32), _SIZE, factor, summand
        )
        return operation

    def _download(self, slot: Any) -> Operation[Any]:
        out = slot.pinned("y", _SIZE, np.uint32) if self._to_pinned else None
        operation: Operation[Any] = slot.stream.download(slot.buffer("x", _SIZE, np.uint32), out=out)
        return operation

    # -- what the program does -----------------------------------------------------------------------------------

    def set_order(self, order: tuple[str, str]) -> None:
        """Change the order of the stages."""
        self.pipeline.set_order(("up", *order, "down"))
        self._expected = _ORDERS[order]

    async def submit(self, count: int) -> None:
        """Submit items. Some calls are cancelled, and some items fail."""
        actions = self._actions
        actions.operation_count += 4 * count
        for _ in range(count):
            number = len(self._values)
            self._values[number] = actions.values(_SIZE)
            if actions.below(6) == 0:
                self._fails.add(number)
            call = asyncio.create_task(self.pipeline.submit(number))
            is_late = False
            if actions.below(4) == 0:
                await actions.pause()
                is_late = call.cancel()
            try:
                await asyncio.wait({call})
            finally:  # a cancellation of this task leaves the call its ticket
                call.cancel()
            if not call.cancelled():
                self._tickets[number] = call.result()
            elif is_late and number in self._begun:
                self._checker.report(f"V10 item {number} has begun, and its call was cancelled")
            if actions.below(3) == 0:
                await actions.pause()
            if any(not ticket.done() for ticket in self._tickets.values()):
                self._expect_busy()

    def _expect_busy(self) -> None:
        """The order cannot be changed while items are in flight."""
        try:
            self.pipeline.set_order(("up", "triple", "add", "down"))
        except (BusyError, ClosedError):
            return
        self._checker.report("V10 the order of stages was changed while items were in flight")

    async def compare(self) -> None:
        """Await all tickets, in any order, and compare their results."""
        failures: list[Exception] = []
        while self._tickets:
            number = self._actions.choose(sorted(self._tickets))
            try:
                result = await self._tickets[number]
            except PlannedError:
                if number not in self._fails:
                    self._checker.report(f"V10 item {number} has failed with the error of another item")
            except AiocudaError as error:
                self._checker.errors.record(error)
                failures.append(error)
            else:
                expected = self._expected(self._values[number])
                if not np.array_equal(result, expected):
                    self._checker.report(f"V10 the result of a ticket does not belong to its item {number}")
                self._kept.append((number, result, expected))
            del self._tickets[number]
            if self._actions.below(4) == 0:
                await self._actions.pause()
        if self.pipeline.ring.busy and not self._checker.driver.upsets.happened:
            self._checker.report("V10 a slot is busy, and all items have ended")
        if failures:
            raise failures[0]

    def expect_end(self) -> None:
        """Expect that an exception, which leaves the block, ends the unfinished items."""
        self._left = [number for number, ticket in self._tickets.items() if not ticket.done()]

    def check_end(self) -> None:
        """Check the tickets after the block was left by an exception."""
        is_upset = bool(self._checker.driver.upsets.happened)
        for number, ticket in self._tickets.items():
            if not ticket.done():
                if not is_upset:
                    self._checker.report(f"P31 item {number} has not ended, and its pipeline was left")
                continue
            error = ticket.exception()
            if isinstance(error, AiocudaError):
                self._checker.errors.record(error)
            if number in self._left and not isinstance(error, ClosedError) and not is_upset:
                self._checker.report(f"P31 item {number} went on to its end, and its pipeline was left")
        if self.pipeline.ring.busy and not is_upset:
            self._checker.report("V10 a slot is busy, and its pipeline was left")

    def check_kept(self) -> None:
        """Compare all results again: later items have used the slots. Count the items that had a slot together."""
        for crowd in self._crowds:  # the slot of an item that fails is free before its ticket is done
            count = 1 + sum(ticket.done() and ticket.exception() is None for ticket in crowd)
            if count > self._depth:
                self._checker.report(f"V10 {count} items were in the {self._depth} slots of a pipeline")
        for number, result, expected in self._kept:
            if not np.array_equal(result, expected):
                self._checker.report(f"P39 the result of item {number} has changed since it was returned")
