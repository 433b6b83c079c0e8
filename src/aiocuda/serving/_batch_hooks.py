"""BatchHooks: calls the hooks ``on_batch`` and ``on_outcome`` of the listeners of a device."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..completion import EndedRequest, StartedBatch
from ..device import Device
from ..lowlevel import resources_of
from ._batch import Batch
from ._request import Request, RequestRecord

__all__ = ["BatchHooks", "End"]

#: A listener, and the function that its hook has returned.
End: TypeAlias = tuple[object, Callable[[Sequence[BaseException | None]], object]]

#: The numbers of the batchers of the process.
_NUMBERS = itertools.count(1)


class BatchHooks:
    """Calls the hooks ``on_batch`` and ``on_outcome`` of the listeners of a device, for one batcher.

    Parameters
    ----------
    device
        The device of the batcher.
    function
        Its function, for the name.
    """

    def __init__(self, device: Device, function: Callable[..., Any]) -> None:
        self._device_state = resources_of(device).device_state
        while isinstance(function, functools.partial):
            function = function.func
        self._function = getattr(function, "__name__", type(function).__name__)
        self._number = next(_NUMBERS)

    def record(self) -> RequestRecord | None:
        """Return the record of a new request; None if no listener has a hook. Called in the task of its caller."""
        listeners = self._device_state.listeners
        return RequestRecord() if listeners is not None and (listeners.batch or listeners.outcome) else None

    def formed(self, requests: Sequence[Request], now: float) -> None:
        """Note that a batch was formed."""
        if self._device_state.listeners is None:
            return
        for request in requests:
            if request.record is not None:
                request.record.formed(now - request.arrived)

    def begin(self, batch: Batch[Any], requests: Sequence[Request], now: float) -> list[End]:
        """Call the hooks before the function of a batch. Return what to call at its end."""
        listeners = self._device_state.listeners
        if listeners is None:
            return []
        for request in requests:
            if request.record is not None:
                request.record.began(batch.number)
        if not listeners.batch:
            return []
        started = StartedBatch(
            function=self._function,
            number=batch.number,
            size=batch.size,
            weight=batch.weight,
            contexts=[None if request.record is None else request.record.context for request in requests],
            waited_s=[now - request.arrived for request in requests],
            batcher=self._number,
        )
        ends: list[End] = []
        for listener, hook in listeners.batch:
            try:
                end: Any = hook(started)
            except Exception as error:  # noqa: BLE001 - the loop's exception handler gets it
                self._remove(listener, error)
            else:
                if end is not None:
                    ends.append((listener, end))
        return ends

    def end(self, ends: Sequence[End], errors: Sequence[BaseException | None]) -> None:
        """Call the functions that the hooks have returned."""
        for listener, end in ends:
            try:
                end(errors)
            except Exception as error:  # noqa: BLE001 - the loop's exception handler gets it
                self._remove(listener, error)

    def ended(self, request: Request, record: RequestRecord, *, cancelled: bool, now: float) -> None:
        """Call the hooks for a request that has its outcome."""
        listeners = self._device_state.listeners
        if listeners is None or not listeners.outcome:
            return
        ended = EndedRequest(
            batcher=self._number,
            function=self._function,
            number=request.id,
            label=request.label,
            outcome="cancelled" if cancelled else record.outcome,
            seconds=now - request.arrived,
            waited_s=record.waited,
            batch=record.batch,
        )
        for listener, hook in listeners.outcome:
            try:
                hook(ended)
            except Exception as error:  # noqa: BLE001 - the loop's exception handler gets it
                self._remove(listener, error)

    def _remove(self, listener: object, error: Exception) -> None:
        """Remove a listener with a hook that has raised, and report the error. No request fails."""
        self._device_state.remove_listener(listener)
        message = f"{listener!r} failed, and listens no more"
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
