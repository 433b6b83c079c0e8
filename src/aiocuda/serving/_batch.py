"""Batch: the items of one call. RunningBatch: its requests. BatchHooks: calls the listeners for it."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from .._base._deadlock import Holder
from .._base._generic import Generic, Item
from .._base._mistakes import lacks, refuses
from .._base._types import ProcessLocal
from ..completion import EndedRequest, StartedBatch
from ..device import Device
from ..errors import InvalidArgumentError, StaleHandleError
from ..lowlevel import resources_of
from ..pipeline import Slot
from ..stream import Stream
from ._requests import Request
from ._results import is_failure

__all__ = ["Batch", "BatchHooks", "End", "RunningBatch"]

T = TypeVar("T")

#: A listener, and the function that its hook has returned.
End: TypeAlias = tuple[object, Callable[[Sequence[BaseException | None]], object]]

#: The numbers of the batchers of the process.
_NUMBERS = itertools.count(1)


@lacks
@refuses(
    **dict.fromkeys(
        ("__iter__", "__len__", "__getitem__", "__array__"), "is no list: batch.items is, of batch.size items"
    )
)
class Batch(ProcessLocal, Generic[Item]):
    """The items of one call, in the order in which they are served.

    Attributes
    ----------
    items : list
        One for each request, as it was passed to ``submit``.
    weight : int
        The sum of the items' weights; without ``weight=``, the number of items.
    padded : int
        The smallest of ``buckets`` that is not below the weight; without ``buckets=``, the weight.
    number : int
        Counts the batches of the batcher, from 0.
    slot : aiocuda.pipeline.Slot
        Memory that stays with the stream, from batch to batch: ``slot.buffer(name, shape, dtype)`` on the device,
        ``slot.pinned(name, shape, dtype)`` on the host. Parts of results in it are copied. If anything else refers to
        it when the next batch begins, the slot takes other memory.
    stream : Stream
        A stream that no other running batch uses. A batch ends when the work on it is done.

    Without ``device=``, ``slot`` and ``stream`` raise `InvalidArgumentError`. After the end of the batch they raise
    `StaleHandleError`: they serve other requests.
    """

    __slots__ = ("_slot", "_stream", "items", "number", "padded", "weight")

    def __init__(
        self, items: Iterable[Item], number: int, weight: int, padded: int, slot: Slot | None, stream: Stream | None
    ) -> None:
        self.items = list(items)
        self.number = number
        self.weight = weight
        self.padded = padded
        self._slot = slot
        self._stream = stream

    @property
    def slot(self) -> Slot:
        return self._checked("slot", self._slot)

    @property
    def stream(self) -> Stream:
        return self._checked("stream", self._stream)

    def _checked(self, name: str, value: T | None) -> T:
        """Return the slot or the stream. Raise unless the batcher has a device and the batch runs."""
        if value is None or self._slot is None:
            raise InvalidArgumentError(f"batch.{name} needs a device, and this batcher has none: pass device= to it")
        try:
            _ = self._slot.item
        except StaleHandleError:
            raise StaleHandleError(
                f"batch {self.number} has ended, and its {name} serves other requests: await the work before the "
                "function returns, or give the task a stream and memory of its own, by `device.stream()` and "
                "`device.pinned(…)`"
            ) from None
        return value

    @property
    def size(self) -> int:
        """The number of items."""
        return len(self.items)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Batch {self.number}: {self.size} items, weight {self.weight}, padded to {self.padded}>"


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

    def context(self) -> contextvars.Context | None:
        """Return the context of the caller, for a new request; None if no listener has a hook."""
        listeners = self._device_state.hot.listeners
        return contextvars.copy_context() if listeners is not None and (listeners.batch or listeners.outcome) else None

    def begin(self, running: RunningBatch, batch: Batch[Any], now: float) -> None:
        """Call the hooks before the function of a batch. The batch keeps what to call at its end."""
        listeners = self._device_state.hot.listeners
        if listeners is None:
            return
        requests = running.requests
        for request in requests:
            request.batch = batch.number
        if not listeners.batch:
            return
        started = StartedBatch(
            function=self._function,
            number=batch.number,
            size=batch.size,
            weight=batch.weight,
            contexts=[request.context for request in requests],
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
        running.ends = ends

    def end(self, running: RunningBatch, found: Iterable[Any], error: BaseException | None) -> None:
        """Call the functions that the hooks have returned: with the outcomes, or with the error of the function."""
        ends, running.ends = running.ends, ()
        errors: Sequence[BaseException | None] = [error] * len(running.requests)
        if error is None:
            errors = [outcome if is_failure(outcome) else None for outcome in found]
        for listener, end in ends:
            try:
                end(errors)
            except Exception as error:  # noqa: BLE001 - the loop's exception handler gets it
                self._remove(listener, error)

    def ended(self, request: Request, *, cancelled: bool, now: float) -> None:
        """Call the hooks for a request that has its outcome."""
        listeners = self._device_state.hot.listeners
        if listeners is None or not listeners.outcome:
            return
        ended = EndedRequest(
            batcher=self._number,
            function=self._function,
            number=request.id,
            label=request.label,
            outcome="cancelled" if cancelled else request.outcome,
            seconds=now - request.arrived,
            waited_s=request.waited,
            batch=request.batch,
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


class RunningBatch:
    """The requests of a batch, from its formation to its end.

    Attributes
    ----------
    number : int
        Counts the batches of the batcher, from 0.
    requests : sequence of Request
        In the order of the items.
    began : float
        The loop's time.
    predicted : float
        The seconds that it will take; 0 if that is not known.
    weight : int
        The weight of the requests.
    holder : Holder or None
        Of its place, while its function runs.
    ends : sequence
        What the listeners of the device want called at its end. Only `BatchHooks` uses it.
    """

    __slots__ = ("began", "ends", "holder", "number", "predicted", "requests", "weight")

    def __init__(
        self, number: int, requests: Sequence[Request], weight: int, began: float, predicted: float | None
    ) -> None:
        self.number = number
        self.requests = requests
        self.weight = weight
        self.began = began
        self.predicted = predicted or 0.0
        self.holder: Holder | None = None
        self.ends: Sequence[End] = ()
        for request in requests:
            request.waited = began - request.arrived

    def label(self) -> str | None:
        """Return the different labels of the requests, joined by commas; None if no request has one."""
        labels: dict[str, None] = {}
        for request in self.requests:
            if request.label is not None:
                labels[request.label] = None
        return ", ".join(labels) or None

    def drop_ended(self, now: float) -> None:
        """Drop the requests that have an outcome, or whose deadline has passed."""
        for request in self.requests:
            if not request.waits(now):
                self.requests = [request for request in self.requests if request.waits(now)]
                self.weight = sum(request.weight for request in self.requests)
                break

    def remaining(self, now: float) -> float:
        """Return the predicted seconds until it ends."""
        return max(0.0, self.began + self.predicted - now)
