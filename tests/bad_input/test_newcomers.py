"""Mistakes of newcomers: each has an error, or a warning, that names the cure."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import importlib
import inspect
import pickle
import re
import sys
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
import aiocuda.cluster
import aiocuda.serving
from aiocuda import Device, Kernel, Stream
from aiocuda._base._module_names import MODULE_CURES
from aiocuda._base._names import CURES as CORE_CURES
from aiocuda._core._gather import Gathering
from aiocuda.cluster import ClusterStatistics, ReplicaStatistics
from aiocuda.cluster._cluster import Cluster, ReplicaHandle
from aiocuda.coordination._bracket import Bracket
from aiocuda.coordination._node import Node
from aiocuda.data import Batch as LoadedBatch
from aiocuda.data import DataLoader, LoaderAdvice, Shuffle, SyncArray, SyncBatch, SyncBatches, TensorBatch
from aiocuda.data._names import LOADER_CURES
from aiocuda.data._tensor_batch import FieldMapping
from aiocuda.device.graphs._graph import Capture
from aiocuda.memory._allocator import DeviceMemory
from aiocuda.observe import ProfileReport, StreamProfiler, Timeline
from aiocuda.pipeline import Ticket
from aiocuda.pool._lease import LeasedStream
from aiocuda.serving import Batch, BatcherStatistics, MicroBatcher, OverloadedError
from tests.bad_input import service_mistakes
from tests.bad_input.authors import AUTHORS, NOTES
from tests.bad_input.newcomers import FIELDS, MISTAKES, At, batcher, loader, submit

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def at(device: Device, stream: Stream) -> At:
    buffer = stream.empty(4)
    return At(device, stream, buffer, stream.fill(buffer, 1.0), stream.record())


ALL = MISTAKES | AUTHORS


@pytest.mark.parametrize("mistake", ALL)
async def test_mistake_is_refused_with_its_cure(at: At, mistake: str) -> None:
    make, error, cure = ALL[mistake]
    with pytest.raises(error) as caught:
        result = make(at)
        if inspect.iscoroutine(result):
            await result
    assert type(caught.value) is error
    assert cure in str(caught.value)


@pytest.mark.parametrize("mistake", NOTES)
async def test_use_that_python_refuses_has_a_note(at: At, mistake: str) -> None:
    """In the traceback of a program, whose block of the device the error leaves."""
    call, note = NOTES[mistake]
    with pytest.raises(TypeError) as caught:
        async with aiocuda.open_device(driver="host"):
            result = call(at)
            if inspect.isawaitable(result):
                await result
    assert caught.value.__notes__ == [note]


async def test_use_that_python_refuses_has_a_note_in_a_group(at: At) -> None:
    async def fails() -> None:
        await at.stream

    with pytest.raises(ExceptionGroup) as caught:
        async with aiocuda.open_device(driver="host"), asyncio.TaskGroup() as group:
            group.create_task(fails())
    assert caught.value.exceptions[0].__notes__ == [NOTES["await stream"][1]]


async def test_other_type_errors_have_no_note() -> None:
    def wait_for() -> None: ...

    with pytest.raises(TypeError) as caught:
        async with aiocuda.open_device(driver="host"):
            wait_for(1)  # type: ignore[call-arg]
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("mistake", service_mistakes.MISTAKES)
async def test_mistake_in_a_service_is_refused_with_its_cure(device: Device, stream: Stream, mistake: str) -> None:
    make, error, cure = service_mistakes.MISTAKES[mistake]
    with pytest.raises(error) as caught:
        result = make(service_mistakes.At(device, stream))
        if inspect.iscoroutine(result):
            await result
    assert type(caught.value) is error
    assert cure in str(caught.value)


async def test_weight_that_fails_names_the_parameter() -> None:
    weigh: Any = len
    async with MicroBatcher(submit, max_batch_size=4, weight=weigh) as opened:
        with pytest.raises(TypeError, match=r"has no len\(\)") as caught:
            await opened.submit(5)
    assert caught.value.__notes__ == ["weight= of the batcher, called with the item of this request, has raised this"]


async def test_statistics_keep_what_they_are(device: Device) -> None:
    figures = device.statistics()
    assert dataclasses.asdict(copy.deepcopy(figures)) == dataclasses.asdict(figures)
    assert pickle.loads(pickle.dumps(figures)) == figures
    assert not hasattr(figures, "__cuda_array_interface__")
    async with aiocuda.StreamPool(device) as pool:
        found = pool.statistics()
    assert found[0] == found._asdict()["strategy"] == "load_balanced"
    assert tuple(found)[1:3] == found[1:3]


async def test_errors_have_their_public_names() -> None:
    for module in (aiocuda.cluster, aiocuda.serving):
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, type) and issubclass(thing, aiocuda.AiocudaError):
                assert thing.__module__ in ("aiocuda.errors", module.__name__)


async def test_label_without_a_block_warns() -> None:
    with pytest.warns(RuntimeWarning, match=r"label\('x'\) labels nothing: use `with aiocuda.label\('x'\):`") as caught:
        aiocuda.label("x")
    assert caught[0].filename == __file__


async def test_label_is_entered_by_several_blocks_and_decorates(at: At) -> None:
    block = aiocuda.label("again")
    with block:
        with block:
            inner = at.stream.synchronize()
        outer = at.stream.synchronize()
    decorated = aiocuda.label("decorated")(at.stream.synchronize)
    labels = [each.label for each in (inner, outer, at.stream.synchronize(), decorated(), decorated())]
    assert labels == ["again", "again", None, "decorated", "decorated"]


async def test_what_is_right_is_taken(at: At) -> None:
    assert await submit(deadline_s=60.0) == 1
    assert await submit(deadline_s=float("inf")) == 1
    batcher(batch_wait_timeout_s=10.0)
    marked = asyncio.iscoroutinefunction if sys.version_info < (3, 14) else inspect.iscoroutinefunction
    assert marked(MicroBatcher.submit)
    assert list(inspect.signature(Device).parameters)[:2] == ["driver", "index"]
    assert inspect.signature(aiocuda.Graph.launch).parameters["stream"].default is inspect.Parameter.empty
    assert loader(at, lambda sample, out: None, fields=FIELDS)
    assert loader(at, lambda sample: sample)
    assert not inspect.isawaitable(at.buffer)  # a program may ask that of the result of a function
    async with at.device.pin(np.ones(4)) as pinned:
        assert pinned.shape == (4,)


async def test_batch_with_no_items_is_true() -> None:
    assert Batch([], 0, 0, 0, None, None)


async def test_another_attribute_error_of_the_function_is_left_alone(at: At) -> None:
    async def fails(batch: Any) -> Any:
        return batch.items[0].upload

    with pytest.raises(AttributeError, match="'int' object has no attribute 'upload'"):
        await submit(fails)


# -- names --------------------------------------------------------------------------------------------------------

CURES = {**CORE_CURES, **LOADER_CURES}

CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *(aiocuda.AsyncCoordinator, Batch, BatcherStatistics, Capture, Cluster, Device, DeviceMemory, aiocuda.Event),
        *(aiocuda.DeviceBuffer, aiocuda.EventPool, Gathering),
        *(Bracket, ProfileReport, StreamProfiler, Timeline),
        *(aiocuda.Graph, Kernel, aiocuda.ManagedContext, MicroBatcher, Node, aiocuda.Operation, aiocuda.Pipeline),
        *(aiocuda.Slot, Stream, aiocuda.StreamBarrier, aiocuda.StreamGroup, aiocuda.StreamPool, SyncArray, Ticket),
        *(aiocuda.TripleBuffer, aiocuda.UnifiedBuffer),
        *(ClusterStatistics, OverloadedError, ReplicaStatistics),
        *(DataLoader, FieldMapping, LoaderAdvice, Shuffle, SyncBatch, SyncBatches, TensorBatch),
    )
}

#: Attributes of each instance.
OF_INSTANCES = {("device", "index"), ("device", "memory"), ("device", "properties"), ("timeline", "spans")}

MODULES = ("aiocuda", "aiocuda.serving", "aiocuda.serving.asgi")

#: The words for objects in the cures.
OBJECTS: dict[str, tuple[type, ...]] = {
    "barrier": (aiocuda.StreamBarrier,),
    "advice": (LoaderAdvice,),
    "batch": (Batch, LoadedBatch),
    "batcher": (MicroBatcher,),
    "bracket": (Bracket,),
    "buffer": (aiocuda.DeviceBuffer, aiocuda.UnifiedBuffer),
    "cluster": (Cluster,),
    "context": (aiocuda.ManagedContext,),
    "coordinator": (aiocuda.AsyncCoordinator,),
    "device": (Device,),
    "event": (aiocuda.Event,),
    "graph": (aiocuda.Graph,),
    "group": (aiocuda.StreamGroup,),
    "handle": (ReplicaHandle,),
    "loader": (DataLoader, SyncBatches),
    "memory": (DeviceMemory,),
    "node": (Node,),
    "operation": (aiocuda.Operation,),
    "profiler": (StreamProfiler,),
    "report": (ProfileReport,),
    "timeline": (Timeline,),
    "pipeline": (aiocuda.Pipeline,),
    "pool": (aiocuda.StreamPool, aiocuda.EventPool),
    "ring": (aiocuda.TripleBuffer,),
    "slot": (aiocuda.Slot,),
    "start": (aiocuda.Event,),
    "stream": (Stream, LeasedStream),
    "ticket": (Ticket,),
}


@pytest.mark.parametrize("module", MODULES)
async def test_module_lacks_the_names_of_the_table(module: str) -> None:
    for name, cure in MODULE_CURES[module].items():
        with pytest.raises(AttributeError) as caught:
            getattr(importlib.import_module(module), name)
        assert str(caught.value) == f"module {module!r} has no attribute {name!r}: {cure}"


async def test_decorated_function_of_one_batch_is_taken() -> None:
    async def with_device(items: Any, device: Any) -> Any:
        return items

    @functools.wraps(with_device)
    async def infer(batch: Any) -> Any:
        return await with_device(batch.items, None)

    assert await submit(infer) == 1
    assert MicroBatcher(functools.partial(with_device, device=None), max_batch_size=1)


async def test_table_of_names_has_the_classes() -> None:
    assert CURES.keys() == CLASSES.keys()
    assert MODULE_CURES.keys() == set(MODULES)


@pytest.mark.parametrize("cls", sorted(CLASSES.keys() - {"DeviceBuffer", "UnifiedBuffer"}))
async def test_class_lacks_the_names_of_the_table(cls: str) -> None:
    for name, cure in CURES[cls].items():
        with pytest.raises(AttributeError) as caught:
            getattr(CLASSES[cls], name)
        assert str(caught.value) == f"{cls} has no {name!r}: {cure}"


@pytest.mark.parametrize("kind", ["DeviceBuffer", "UnifiedBuffer"])
async def test_buffer_lacks_the_names_of_the_table(device: Device, stream: Stream, kind: str) -> None:
    buffer = device.unified(4) if kind == "UnifiedBuffer" else stream.empty(4)
    for name, cure in CURES[kind].items():
        with pytest.raises(AttributeError) as caught:
            getattr(buffer, name)
        assert str(caught.value).endswith(f"no attribute {name!r}: {cure}")


@pytest.mark.parametrize("cls", sorted({**CURES, **MODULE_CURES}))
async def test_cures_name_what_is_there(cls: str) -> None:
    for cure in {**CURES, **MODULE_CURES}[cls].values():
        for thing, name in re.findall(r"\b([a-z]+)\.([a-z_]+)", cure):
            if (thing, name) not in OF_INSTANCES and thing in OBJECTS:
                assert any(hasattr(kind, name) for kind in OBJECTS[thing]), cure
        for name in re.findall(r"aiocuda\.([A-Z]\w+)", cure):
            assert getattr(aiocuda, name)
