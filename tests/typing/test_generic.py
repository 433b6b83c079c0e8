"""Classes that are generic for type checkers take their arguments at run time, too; missing ones are Any."""

from __future__ import annotations

import pickle
import typing
from typing import Any, Generic, TypeVar

import numpy as np
import pytest

from aiocuda import Device, Pipeline, Stage
from aiocuda.pipeline import PipelineRun, Ticket
from aiocuda.serving import Batch, MicroBatcher

T = TypeVar("T")


class Numbers(Pipeline[int, T]):
    """A pipeline of numbers."""


class Typed(MicroBatcher[T, float], Generic[T]):
    """A batcher with numbers as its results."""


@pytest.mark.parametrize(
    ("alias", "origin", "arguments"),
    [
        (Pipeline[int, float], Pipeline, (int, float)),
        (Pipeline[int], Pipeline, (int,)),
        (MicroBatcher[np.ndarray, float], MicroBatcher, (np.ndarray, float)),
        (MicroBatcher[str], MicroBatcher, (str,)),
        (Batch[str], Batch, (str,)),
        (Ticket[str], Ticket, (str,)),
        (PipelineRun[str], PipelineRun, (str,)),
        (Numbers[float], Numbers, (float,)),
        (Typed[str], Typed, (str,)),
    ],
)
def test_arguments_at_run_time(alias: Any, origin: type, arguments: tuple[type, ...]) -> None:
    assert (typing.get_origin(alias), typing.get_args(alias)) == (origin, arguments)
    assert pickle.loads(pickle.dumps(alias)) == alias
    hints = typing.get_type_hints(type("Program", (), {"__annotations__": {"each": alias | None}}))
    assert hints == {"each": alias | None}


@pytest.mark.asyncio
async def test_objects_of_an_alias_are_of_the_class(device: Device) -> None:
    async def double(slot: Any) -> int:
        return 2 * int(slot.item)

    stages = [Stage("double", double)]
    for pipeline in (Pipeline[int](device, stages), Pipeline[int, int](device, stages), Numbers[int](device, stages)):
        assert isinstance(pipeline, Pipeline)
        assert await pipeline.execute_iteration(2) == 4

    async def infer(batch: Batch[int]) -> list[int]:
        return batch.items

    async with MicroBatcher[int](infer, max_batch_size=1) as batcher:
        assert type(batcher) is MicroBatcher
        assert await batcher.submit(3) == 3
