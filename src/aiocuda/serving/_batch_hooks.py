"""BatchHooks: calls the hook ``on_batch`` of the listeners of a device."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .._device import Device
from .._device_resources import resources_of
from .._instrument import StartedBatch
from ._batch import Batch
from ._request import Request

__all__ = ["BatchHooks", "End"]

#: A listener, and the function that its hook has returned.
End: TypeAlias = tuple[object, Callable[[Sequence[BaseException | None]], object]]


class BatchHooks:
    """Calls the hook ``on_batch`` of the listeners of a device, for the batches of one batcher.

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

    @property
    def is_wanted(self) -> bool:
        """True if a listener has the hook: then each request keeps the context of its task."""
        listeners = self._device_state.listeners
        return listeners is not None and bool(listeners.batch)

    def begin(self, batch: Batch[Any], requests: Sequence[Request], now: float) -> list[End]:
        """Call the hooks before the function of a batch. Return what to call at its end."""
        listeners = self._device_state.listeners
        if listeners is None or not listeners.batch:
            return []
        started = StartedBatch(
            function=self._function,
            number=batch.number,
            size=batch.size,
            weight=batch.weight,
            contexts=[request.context for request in requests],
            waited_s=[now - request.arrived for request in requests],
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

    def _remove(self, listener: object, error: Exception) -> None:
        """Remove a listener with a hook that has raised, and report the error. No request fails."""
        self._device_state.remove_listener(listener)
        message = f"{listener!r} failed, and listens no more"
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
