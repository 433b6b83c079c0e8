"""Listener: what a profiler and a timeline have in common."""

from __future__ import annotations

import abc
import contextlib
from typing import Any, ClassVar

from .._device import Device
from ..completion._operation import INTERNAL, Operation
from ..errors import InvalidTypeError

__all__ = ["Listener"]


class Listener(abc.ABC):
    """Listens to a device, the times of each operation with it, until its block ends; knows a copy's chunks as such."""

    #: For `aiocuda._instrument.Instrument`: take the times of each operation.
    timing = True

    #: What it is, for messages.
    _noun: ClassVar[str]

    def __init__(self, device: Device) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a {self._noun} listens to an aiocuda.Device, not {type(device).__name__}")
        self.device = device
        self._listening = contextlib.ExitStack()
        self._owners: dict[int, int] = {}  # a chunk's id → its copy's

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                await self.device.drain()
        finally:
            self._listening.close()
            self._owners.clear()
            self._ended()

    def on_submit(self, operation: Operation[Any]) -> None:
        """A stream has accepted an operation, or a chunk of the copy at the head of its queue."""
        owner = operation.part_of
        if owner is not None:
            self._owners[operation.id] = owner.id

    def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
        """It has finished."""
        owner = self._owners.pop(operation.id, None)
        if owner is not None or operation.kind != INTERNAL:  # else it is a mark of the library's own
            self._resolved(operation, owner, start, end)

    @abc.abstractmethod
    def _resolved(self, operation: Operation[Any], owner: int | None, start: int, end: int) -> None:
        """An operation, or a chunk of the copy with this id, has finished."""

    @abc.abstractmethod
    def _ended(self) -> None:
        """It listens no more."""
