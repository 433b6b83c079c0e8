"""Triple buffers with memory of their own in a random program: a loop that waits for no slot, and early ends."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocuda import Operation, Slot, TripleBuffer
from aiocuda.errors import DeviceFault
from tests.simulation import internals
from tests.simulation.kernels import AFFINE

if TYPE_CHECKING:
    from aiocuda import Device, Stream
    from tests.simulation.actions import Actions

__all__ = ["TripleBufferActions"]

_SIZE = 64

_NEXT = {"uploading": "processing", "processing": "downloading", "downloading": "free"}


class TripleBufferActions:
    """The actions with `TripleBuffer`. Checks V10."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return 3 * [self.use]

    async def use(self) -> None:
        """Take items through the slots of a new triple buffer; perhaps leave it while its operations run."""
        actions = self._actions
        actions.count("triple buffer")
        device = actions.device()
        with contextlib.suppress(InterruptedError):
            async with TripleBuffer(1 + actions.below(4), buffers={"x": (_SIZE, np.uint32)}, device=device) as ring:
                try:
                    await _Round(actions, ring, device).run()
                    if actions.below(4) == 0:
                        raise InterruptedError
                except Exception as error:
                    # Recorded here: if the task is cancelled while the ring is closed, it raises the cancellation.
                    actions.checker.errors.record(error)
                    raise


class _Round:
    """The items of one triple buffer, and what each of its slots must be doing."""

    def __init__(self, actions: Actions, ring: TripleBuffer, device: Device) -> None:
        self._actions = actions
        self._checker = actions.checker
        self._ring = ring
        self._streams: list[Stream] = [actions.stream(device) for _ in range(3)]
        self._states: dict[Slot, str] = {}  # of the slots that are taken, in the order in which they were taken
        self._ends: dict[Slot, list[Operation[Any]]] = {}  # the operations that end the last state
        self._results: list[tuple[Operation[Any], Any]] = []  # downloads, and what they must bring

    async def run(self) -> None:
        """Enqueue the work of some slots, and move them on, some times."""
        actions = self._actions
        for _ in range(4 + actions.below(20)):
            for step in (self._upload, self._compute, self._download):
                if actions.below(3):
                    step()
            if actions.below(3) == 0:
                await actions.pause()
            if actions.below(6) == 0:
                self._abandon()
            self._advance()
            if self._checker.driver.fault is not None:
                return

    def _upload(self) -> None:
        array = self._actions.values(_SIZE)
        slot = self._ring.upload_slot(array.copy())
        if (slot is None) != (len(self._states) == len(self._ring)) or slot in self._states:
            self._report(f"{slot!r} was taken while {len(self._states)} slots of {len(self._ring)} were")
        if slot is not None:
            self._states[slot] = "uploading"
            operation = self._streams[0].copy(slot.buffer("x"), array)
            self._checker.borrow(operation, weakref.ref(array))
            self._enter(slot, operation)

    def _compute(self) -> None:
        slot = self._oldest("processing", self._ring.compute_slot())
        if slot is not None:
            self._enter(slot, self._streams[1].launch(AFFINE, 1, 32, slot.buffer("x"), _SIZE, 3, 1))

    def _download(self) -> None:
        slot = self._oldest("downloading", self._ring.download_slot())
        if slot is not None:
            operation = self._streams[2].download(slot.buffer("x", _SIZE, np.uint32))
            self._enter(slot, operation)
            expected = slot.item * np.uint32(3) + np.uint32(1)
            self._results.append((operation, expected))

    def _oldest(self, state: str, found: Slot | None) -> Slot | None:
        """Return the slot that the ring has found: the first of that state without work."""
        expected = next((slot for slot, its in self._states.items() if its == state and slot not in self._ends), None)
        if found is not expected:
            self._report(
                f"the oldest slot without work that is {state} is {expected!r}, and the ring has found {found!r}"
            )
        return found

    def _enter(self, slot: Slot, operation: Operation[Any]) -> None:
        """Let the state end with the operation, and perhaps with one of another stream."""
        ends = [self._actions.follow(operation)]
        if self._actions.below(2):
            ends.append(self._actions.follow(self._actions.choose(self._streams).synchronize()))
        self._ends[slot] = ends
        state: Any = self._states[slot]
        slot.enter(state, until=ends if len(ends) > 1 else ends[0])

    def _abandon(self) -> None:
        if self._ends:
            self._actions.choose(self._ends[self._actions.choose([*self._ends])]).abandon()

    def _advance(self) -> None:
        over = self._over()
        raised = False
        try:
            self._ring.advance()
        except DeviceFault:
            raise
        except Exception as error:  # noqa: BLE001 - its slot is compared
            self._checker.errors.record(error)
            raised = True
        if self._checker.driver.fault is not None:
            return
        states = {slot: slot.state for slot in self._states}
        moved = {slot for slot, state in states.items() if state != self._states[slot]}
        if not over <= moved <= self._over():  # `advance` has made queries
            self._report(f"{len(over)} slots were over, then {len(self._over())}, and {len(moved)} have moved")
        failed = {slot for slot in moved if any(end.state != "done" for end in self._ends[slot])}
        if raised != bool(failed):
            self._report(f"the operations of {len(failed)} slots have failed, and `advance` has raised: {raised}")
        for slot in moved:
            before, after = self._states[slot], "free" if slot in failed else _NEXT[self._states[slot]]
            if states[slot] != after:
                self._report(f"slot {slot.number}, which was {before}, is {states[slot]} instead of {after}")
            if not all(self._is_device_done(end) for end in self._ends[slot]):
                self._report(f"slot {slot.number} is no longer {before}, and the device still is")
            self._states[slot] = after
            del self._ends[slot]
            if after == "free":
                del self._states[slot]
        self._compare()

    def _over(self) -> set[Slot]:
        """Return the slots whose operations have ended, as the loop has seen it."""
        return {slot for slot, ends in self._ends.items() if all(map(internals.device_has_finished, ends))}

    def _is_device_done(self, operation: Operation[Any]) -> bool:
        return internals.has_failed(operation) or self._checker.is_device_done(operation)

    def _compare(self) -> None:
        """Check that the downloads have the bytes of their items."""
        for operation, expected in self._results:
            if operation.state == "done" and not np.array_equal(operation.result(), expected):
                self._report(f"{operation!r} has the bytes of another item")
        self._results = [entry for entry in self._results if not entry[0].done()]

    def _report(self, text: str) -> None:
        self._checker.report(f"V10 {text}")
