"""BatcherOptions: the arguments of a batcher, checked."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from .._base._checks import as_count, check_seconds, is_coroutine_function, is_function, several
from .._base._user_code import add_note, call
from ..device import Device
from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["BatcherOptions"]

#: More batches at a time than this are a mistake: each has a stream.
MAX_CONCURRENT = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class BatcherOptions:
    """The arguments of `MicroBatcher`, checked. The attributes have the names of the arguments."""

    function: Callable[[Any], Any]
    max_batch_size: int
    batch_wait_timeout_s: float
    max_concurrent_batches: int
    max_queued_requests: int
    buckets: tuple[int, ...] | None
    weight: Callable[[Any], int] | None
    device: Device | None

    @classmethod
    def checked(
        cls, function: Any, max_batch_size: Any, batch_wait_timeout_s: Any, max_concurrent_batches: Any,
        max_queued_requests: Any, buckets: Any, weight: Any, device: Any,
    ) -> BatcherOptions:  # fmt: skip
        """Return the options, or raise `InvalidTypeError` or `InvalidArgumentError` with the value and the cure."""
        if not is_function(function) or not is_coroutine_function(function):
            raise InvalidTypeError(
                f"a batcher calls a coroutine function, `async def infer(batch): …`, not {function!r}: "
                "`await batch.stream.download(y)`, `await handle.call('predict', batch.items)` or "
                "`await asyncio.to_thread(model, batch.items)` inside it"
            )
        _check_takes_a_batch(function)
        for name, value, cure in (
            ("batch_wait_timeout_s", batch_wait_timeout_s, "a number of seconds, not None: 0 does not wait"),
            ("max_queued_requests", max_queued_requests, "an integer, not None: leave it out for 1024"),
        ):
            if value is None:
                raise InvalidTypeError(f"{name} is {cure}")
        size = as_count(max_batch_size, "max_batch_size")
        wait = check_seconds(batch_wait_timeout_s, "batch_wait_timeout_s")
        if wait == float("inf"):
            raise InvalidArgumentError(
                "batch_wait_timeout_s is finite: with inf, a request waits until max_batch_size is reached, "
                "which may never be"
            )
        places = as_count(max_concurrent_batches, "max_concurrent_batches")
        if places > MAX_CONCURRENT:
            raise InvalidArgumentError(
                f"max_concurrent_batches is at most {MAX_CONCURRENT}, not {places}", limit=MAX_CONCURRENT
            )
        if weight is not None:
            if not is_function(weight):
                raise InvalidTypeError(f"weight is a function of an item, not {weight!r}")
            if is_coroutine_function(weight):
                raise InvalidTypeError("weight is a plain function of an item: submit_nowait cannot await it")
        if device is not None and not isinstance(device, Device):
            raise InvalidTypeError(
                f"device is an aiocuda.Device or None, not {device!r}: `async with aiocuda.open_device() as device`"
            )
        return cls(
            function, size, wait, places, as_count(max_queued_requests, "max_queued_requests"),
            None if buckets is None else _checked_buckets(buckets, size), weight, device,
        )  # fmt: skip

    def weight_of(self, item: Any) -> int:
        """Return the weight of an item, by the program's function.

        Raises
        ------
        InvalidArgumentError
            The item is heavier than a batch, or its weight is less than 1.
        InvalidTypeError
            The weight is no integer.
        Exception
            The exception of the function.
        """
        if self.weight is None:
            return 1
        try:
            found = call(self.weight, item)
        except Exception as error:
            add_note(error, "weight= of the batcher, called with the item of this request, has raised this")
            raise
        weight = as_count(found, "the weight of an item")
        if weight > self.max_batch_size:
            raise InvalidArgumentError(
                f"an item of weight {weight} fits in no batch: max_batch_size is {self.max_batch_size}",
                weight=weight, limit=self.max_batch_size,
            )  # fmt: skip
        return weight

    def padded(self, weight: int) -> int:
        """Return the smallest bucket that holds a batch of this weight; the weight itself without buckets."""
        if self.buckets is None:
            return weight
        return next(bucket for bucket in self.buckets if bucket >= weight)


def _check_takes_a_batch(function: Callable[..., Any]) -> None:
    """Raise `InvalidTypeError` unless the function can be called with one argument."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(None)  # the call is that of the wrapper
    except ValueError:  # a function in C may have no signature
        return
    except TypeError as error:
        raise InvalidTypeError(
            f"a batcher calls {function!r} with the batch alone: {error}. `async def infer(batch): …` has batch.items, "
            "batch.stream and batch.slot; bind others by functools.partial"
        ) from None


def _checked_buckets(buckets: Any, size: int) -> tuple[int, ...]:
    each = several(buckets, "buckets are integers, like (1, 8, 32)")
    found = tuple(sorted({as_count(bucket, "a bucket") for bucket in each}))
    if not found or found[-1] < size:
        raise InvalidArgumentError(
            f"a batch of max_batch_size={size} fits in none of buckets={buckets!r}: the largest one has to be at "
            f"least {size}",
            buckets=found,
        )
    return found
