"""Rows 80 and 81: the arguments of a batcher, and of its requests."""

from __future__ import annotations

from typing import Any

from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.serving import Batch, MicroBatcher
from tests.bad_input.case import Case, World, each_of


async def _items(batch: Batch[Any]) -> list[Any]:
    return batch.items


def _argument(name: str, value: Any, error: type[Exception], text: str, **others: Any) -> Case:
    options: dict[str, Any] = {"function": _items, "max_batch_size": 8} | others
    return Case(
        80,
        f"{name} {getattr(value, '__name__', repr(value))}",
        each_of(lambda world, given: MicroBatcher(**{**options, "device": world.device, name: given}), value),
        error,
        text,
    )


def _request(name: str, value: Any, error: type[Exception], text: str) -> Case:
    async def submit(world: World, given: Any) -> None:
        async with MicroBatcher(_items, max_batch_size=8, weight=lambda item: item) as batcher:
            await batcher.submit(**{"item": 1} | {name: given})

    return Case(81, f"{name} {value!r}", each_of(submit, value), error, text)


CASES: list[Case] = [
    *(
        _argument(name, value, InvalidArgumentError, text)
        for name, value, text in (
            ("max_batch_size", 0, "max_batch_size is at least 1, not 0"),
            ("max_batch_size", -3, "-3"),
            ("batch_wait_timeout_s", -1, "batch_wait_timeout_s is 0 seconds or more"),
            ("batch_wait_timeout_s", float("nan"), "nan"),
            ("batch_wait_timeout_s", float("inf"), "finite"),
            ("max_concurrent_batches", 0, "max_concurrent_batches is at least 1"),
            ("max_concurrent_batches", 5000, "at most 1024"),
            ("max_queued_requests", 0, "max_queued_requests is at least 1"),
            ("buckets", (1, 4), "fits in none of buckets=(1, 4)"),
            ("buckets", (), "fits in none of buckets=()"),
            ("buckets", (0, 8), "a bucket is at least 1, not 0"),
        )
    ),
    *(
        _argument(name, value, InvalidTypeError, text)
        for name, value, text in (
            ("function", len, "coroutine function"),
            ("function", None, "coroutine function"),
            ("max_batch_size", 2.0, "max_batch_size is an integer, not 2.0"),
            ("max_batch_size", True, "True"),
            ("batch_wait_timeout_s", "2 ms", "2 ms"),
            ("buckets", 8, "buckets are integers"),
            ("buckets", "18", "buckets are integers"),
            ("weight", 1, "weight is a function"),
            ("weight", _items, "plain function"),
            ("device", "gpu:0", "device is an aiocuda.Device or None, not 'gpu:0'"),
        )
    ),
    *(
        _request(name, value, InvalidArgumentError, text)
        for name, value, text in (
            ("priority", "urgent", "priority is one of critical, high, normal, low, cleanup, not 'urgent'"),
            ("priority", 1, "priority is one of"),
            ("deadline_s", float("nan"), "nan"),
            ("item", 9, "an item of weight 9 fits in no batch: max_batch_size is 8"),
            ("item", 0, "the weight of an item is at least 1, not 0"),
        )
    ),
    *(
        _request(name, value, InvalidTypeError, text)
        for name, value, text in (
            ("deadline_s", "1", "deadline_s is a number of seconds"),
            ("deadline_s", True, "True"),
            ("item", "x", "the weight of an item is an integer, not 'x'"),
            ("item", 1.5, "1.5"),
        )
    ),
]
