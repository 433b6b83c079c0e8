"""``output="torch"``: batches as PyTorch's own tensors, on the host driver and on a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import BusyError, Device, InvalidArgumentError, InvalidTypeError
from aiocuda.data import DataLoader, TensorBatch, sync_loader, sync_to_device, to_device
from tests.data.samples import FIELDS, refuses_fives, write

torch: Any = None
with contextlib.suppress(ImportError):
    torch = importlib.import_module("torch")

#: Not by a skip of the whole file: the reference names tests of it.
pytestmark = pytest.mark.skipif(torch is None, reason="could not import 'torch'")

DRIVERS: Any = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest_asyncio.fixture
async def device(driver: Any) -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver=driver) as opened:
        yield opened


class Pair(NamedTuple):
    left: Any
    right: Any


# -- DataLoader ------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 1, "executor": "process"}], ids=["thread", "process"])
async def test_fields_become_tensors_of_their_own(device: Device, options: Any) -> None:
    """They live on when the loader has ended, its memory is free at once, and nothing has to be kept."""
    options |= {"fields": FIELDS, "decode": write, "batch_size": 4, "output": "torch"}
    async with DataLoader(device, range(10), **options) as loader:
        batches: list[Any] = [batch async for batch in loader]
        assert loader.statistics().kept == 0
        if device.driver.name == "host":
            assert not device.memory.exports.held
    assert [batch.indices for batch in batches] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    for batch in batches:
        assert type(batch) is TensorBatch
        assert batch.keep() is batch.used_on(object()) is batch
        batch.free()
        wanted = torch.tensor(batch.indices)
        assert torch.equal(batch["y"].cpu(), 2 * wanted)
        assert torch.equal(batch["x"].cpu(), wanted[:, None, None].expand(-1, 2, 3).float())
        assert (batch["x"].dtype, batch["y"].dtype) == (torch.float32, torch.int64)
        assert batch["x"].device.type == ("cuda" if device.driver.name == "cuda" else "cpu")
        assert not batch["x"]._is_view()
    copy = pickle.loads(pickle.dumps(batches[0]))
    assert torch.equal(copy["x"], batches[0]["x"])
    assert (copy.number, copy.indices) == (0, (0, 1, 2, 3))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_each_process_has_its_own_random_numbers() -> None:
    """The server of the processes has imported PyTorch, whose import seeds its generator."""
    options: Any = {"batch_size": 4, "workers": 2, "executor": "process", "output": "torch"}
    decode = importlib.import_module("tests.data.torch_samples").seed
    async with aiocuda.open_device(driver="host") as device:
        async with DataLoader(device, range(64), decode=decode, **options) as loader:
            seeds = {tuple(row) async for batch in loader for row in batch[0].tolist()}
    assert len(seeds) == len({process for process, _ in seeds}) == len({seed for _, seed in seeds}) == 2


@pytest.mark.asyncio
async def test_fields_without_names_unpack(device: Device) -> None:
    fields: Any = [((2,), np.float32), ((), np.bool_), ((0, 3), np.uint8), ((), "f2")]
    source = [(np.full(2, n), n % 2 == 1, np.empty((0, 3)), n / 2) for n in range(3)]
    async with DataLoader(device, source, fields=fields, batch_size=3, output="torch") as loader:
        async for x, odd, empty, half in loader:
            assert x.cpu().tolist() == [[0, 0], [1, 1], [2, 2]]
            assert (odd.dtype, odd.cpu().tolist()) == (torch.bool, [False, True, False])
            assert (empty.dtype, tuple(empty.shape)) == (torch.uint8, (3, 0, 3))
            assert (half.dtype, half.cpu().tolist()) == (torch.float16, [0, 0.5, 1])


def nested(sample: int) -> Any:
    return {
        "image": np.full((2, 2), sample, np.uint8),
        "meta": {"name": f"n{sample}", "none": None, "size": sample, "pair": Pair(sample, str(sample))},
        "bf16": torch.full((3,), sample, dtype=torch.bfloat16),
        "grad": torch.full((), float(sample), requires_grad=True),
        "boxes": [np.full(2, sample), [sample, sample]],
        "empty": torch.empty(0),
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 1, "executor": "process"}], ids=["thread", "process"])
async def test_what_decode_returns_keeps_its_form(device: Device, options: Any) -> None:
    async with DataLoader(device, range(3), decode=nested, batch_size=2, output="torch", **options) as loader:
        batches: list[Any] = [batch async for batch in loader]
    for batch, samples in zip(batches, ([0, 1], [2]), strict=True):
        assert batch["image"][:, 0, 0].tolist() == samples
        meta = batch["meta"]
        assert (meta["name"], meta["none"]) == ([f"n{sample}" for sample in samples], [None] * len(samples))
        assert meta["size"].tolist() == samples
        assert type(meta["pair"]) is Pair
        assert meta["pair"].right == [str(sample) for sample in samples]
        assert meta["pair"].left.tolist() == samples
        assert (batch["bf16"].dtype, batch["bf16"][:, 1].tolist()) == (torch.bfloat16, samples)
        assert (batch["grad"].requires_grad, batch["grad"].tolist()) == (False, samples)
        assert type(batch["boxes"]) is list
        assert [part[:, 1].tolist() for part in batch["boxes"]] == [samples, samples]
        assert tuple(batch["empty"].shape) == (len(samples), 0)


@pytest.mark.asyncio
async def test_batches_without_memory_and_of_skipped_samples(device: Device) -> None:
    async with DataLoader(device, ["a", "b"], batch_size=2, output="torch") as loader:
        texts: Any = await anext(aiter(loader))
        assert texts == {0: ["a", "b"]}
    options: Any = {"fields": FIELDS, "decode": refuses_fives, "batch_size": 4, "on_error": "skip"}
    async with DataLoader(device, range(8), output="torch", **options) as loader:
        assert [batch["y"].tolist() async for batch in loader] == [[2, 4, 6], [8, 12, 14]]


@pytest.mark.asyncio
async def test_samples_that_make_no_batch(device: Device) -> None:
    source = [torch.zeros(2), torch.zeros(3)]
    async with DataLoader(device, source, batch_size=2, output="torch") as loader:
        with pytest.raises(ValueError, match="part 0 has tensors of different shapes"):
            await anext(aiter(loader))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("first", "other", "match"),
    [
        ({"m": {"x": 1}}, {"m": {"x": 1, "y": 2}}, r"keys of part 'm': \['x', 'y'\] in sample 2, and \['x'\] in"),
        ({"m": {"x": 1, "y": 2}}, {"m": {"x": 1}}, r"keys of part 'm': \['x'\] in sample 2"),
        ({"m": {"x": {}}}, {"m": {"x": {"y": 1}}}, r"keys of part \('m', 'x'\): \['y'\] in sample 2, and \[\] in"),
        ({"m": ["a", 1]}, {"m": ["a", 1, 2]}, r"keys of part 'm': 3 items in sample 2, and 2 items in sample 0"),
        ({"m": {"x": 1}}, {"m": 1}, r"keys of part 'm': int in sample 2, and \['x'\] in sample 0"),
        ({"m": 1}, {}, r"different keys: \[\] in sample 2, and \['m'\] in sample 0"),
    ],
)
async def test_samples_of_different_form_make_no_batch(device: Device, first: Any, other: Any, match: str) -> None:
    async with DataLoader(device, [first, first, other], batch_size=3, output="torch") as loader:
        with pytest.raises(InvalidArgumentError, match=match) as caught:
            await anext(aiter(loader))
        assert caught.value.__dict__["index"] == 2


@pytest.mark.asyncio
async def test_keys_may_look_like_paths(device: Device) -> None:
    def sample(number: int) -> Any:
        return {
            ("a", 0): number,
            "a": [number + 10, {"deep": number + 20, ("deep", 1): number + 30}, "text"],
            ("a", 1, "deep"): number + 40,
            "b": {0: number + 50, (0, 1): [torch.tensor(number + 60), "text"], 1: number + 70},
        }

    def check(batch: Any) -> None:
        number = batch["a", 0].item()
        first, second, _ = batch["a"]
        found = [first, second["deep"], second["deep", 1], batch["a", 1, "deep"], batch["b"][0], batch["b"][0, 1][0]]
        assert [int(each) - number for each in [*found, batch["b"][1]]] == [10, 20, 30, 40, 50, 60, 70]

    async with DataLoader(device, range(2), decode=sample, output="torch") as loader:
        async for batch in loader:
            check(batch)
    source = [{key: value if type(value) is not int else torch.tensor(value) for key, value in sample(7).items()}]
    async with to_device(source, device, output="torch") as batches:
        check(await anext(batches))


@pytest.mark.asyncio
async def test_collate_returns_what_is_delivered(device: Device) -> None:
    def collate(samples: list[Any]) -> Any:
        return {"x": torch.tensor(samples), "names": [str(sample) for sample in samples]}

    async with DataLoader(device, range(2), collate=collate, batch_size=2, output="torch") as loader:
        batch: Any = await anext(aiter(loader))
    assert batch["x"].tolist() == [0, 1]
    assert batch["names"] == ["0", "1"]


# -- to_device -------------------------------------------------------------------------------------------------------


def odd_batches() -> Iterator[Any]:
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    yield {
        "last": base.to(memory_format=torch.channels_last),
        "gaps": base[:, ::2, 1:],
        "expanded": torch.tensor([[1], [2]]).expand(2, 3),
        "bf16": base.to(torch.bfloat16),
        "fp8": base.to(torch.float8_e4m3fn),
        "bool": base > 3,
        "zero": torch.tensor(7),
        "conj": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 4),
        "numpy": np.arange(6).reshape(2, 3)[:, ::2],
        "rest": [1, "a", None, 2.5, (torch.ones(2), {"deep": np.float32(3)})],
    }


def check_odd(batch: Any, kind: str) -> None:
    (wanted,) = odd_batches()
    for name in ("last", "gaps", "expanded", "bf16", "fp8", "bool", "zero", "conj", "empty"):
        found, expected = batch[name], wanted[name]
        assert (found.dtype, found.shape, found.device.type) == (expected.dtype, expected.shape, kind), name
        assert torch.equal(found.cpu().float() if name == "fp8" else found.cpu(),
                           expected.float() if name == "fp8" else expected), name  # fmt: skip
        assert not found._is_view()
    assert batch["last"].is_contiguous(memory_format=torch.channels_last)
    assert batch["numpy"].tolist() == [[0, 2], [3, 5]]
    number, text, none, real, (ones, deep) = batch["rest"]
    assert (number, text, none, real, deep["deep"]) == (1, "a", None, 2.5, 3)
    assert ones.tolist() == [1, 1]


def place(driver: str) -> str:
    return "cuda" if driver == "cuda" else "cpu"


@pytest.mark.asyncio
async def test_batches_of_every_form_arrive(device: Device) -> None:
    async with to_device(odd_batches(), device, output="torch") as batches:
        found = [batch async for batch in batches]
    for batch in found:
        check_odd(batch, place(device.driver.name))
    async with to_device(odd_batches(), device, output="torch") as batches:
        check_odd(await anext(batches), place(device.driver.name))


def test_a_plain_loop_gets_tensors(driver: Any) -> None:
    with sync_to_device(odd_batches(), driver=driver, output="torch") as batches:
        found = list(batches)
    for batch in found:
        check_odd(batch, place(driver))


def test_a_plain_loop_of_a_loader(driver: Any) -> None:
    """Its tensors are used after the loop, and its state goes on after those that were delivered."""
    options: Any = {"fields": FIELDS, "decode": write, "batch_size": 2, "driver": driver, "output": "torch"}
    with sync_loader(range(7), **options) as loader:
        batches = iter(loader)
        first: list[Any] = [next(batches), next(batches)]
        state = loader.state_dict()
        assert loader.statistics().kept == 0
    with sync_loader(range(7), **options) as loader:
        loader.load_state_dict(state)
        rest: list[Any] = list(loader)
    assert [batch["y"].tolist() for batch in first + rest] == [[0, 2], [4, 6], [8, 10], [12]]
    assert [batch.number for batch in first + rest] == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_tensors_are_those_of_the_consumers_mode(device: Device) -> None:
    async with DataLoader(device, range(4), output="torch") as loader:
        batches: Any = aiter(loader)
        with torch.inference_mode():
            assert (await anext(batches))[0].is_inference()
        x = (await anext(batches))[0]
        assert not x.is_inference()
        weight = torch.ones(1, device=x.device, requires_grad=True)
        (weight * x).sum().backward()
        assert weight.grad.item() == x.item()


@pytest.mark.asyncio
async def test_other_outputs_are_refused(device: Device) -> None:
    output: Any = "jax"
    for make in (lambda: DataLoader(device, range(2), output=output), lambda: to_device([1], device, output=output)):
        with pytest.raises(InvalidArgumentError, match="output is 'torch', or None for a Batch, not 'jax'"):
            make()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("output", "match"),
    [("torch", r"part 0 has sparse tensors: return tensor.to_dense\(\) from decode="), (None, r"Tensor.to_dense\(\)")],
)
async def test_sparse_tensors_are_refused(device: Device, output: Any, match: str) -> None:
    async with DataLoader(device, [torch.eye(3).to_sparse()], output=output) as loader:
        with pytest.raises(InvalidTypeError, match=match):
            await anext(aiter(loader))


# -- streams of a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_a_stream_that_is_captured_gets_no_batch_and_loses_none() -> None:
    async with aiocuda.open_device(driver="cuda") as device:
        async with DataLoader(device, range(3), output="torch") as loader:
            batches: Any = aiter(loader)
            assert (await anext(batches))[0].item() == 0
            graph, stream, x = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.ones(1, device="cuda")
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                x.add_(1)  # PyTorch warns of an empty graph
                with pytest.raises(BusyError, match="is being captured into a graph"):
                    await anext(batches)
                graph.capture_end()
            assert (await anext(batches))[0].item() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [2000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_no_step_on_a_side_stream_reads_another_batch(steps: int) -> None:
    """Each step is queued on one of four streams behind work, and reads its batch late: checksums are compared."""
    size = 1 << 16
    source = [np.full(size, number % 251, np.uint8) for number in range(256)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    sums = torch.zeros(steps, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()

    def consume() -> None:
        with sync_loader(range(steps), decode=lambda at: source[at % 256], workers=2, output="torch",
                         driver="cuda") as loader:  # fmt: skip
            for batch in loader:
                number = batch.number
                with torch.cuda.stream(streams[number % 4]):
                    x: Any = batch[0]
                    if number % 3 == 0:  # a tensor of the consumer's stream that another one uses
                        x.record_stream(streams[number % 4])
                    streams[number % 4].wait_stream(torch.cuda.default_stream())
                    torch.cuda._sleep(20_000)
                    sums[number] = x.sum(dtype=torch.int64)
                    if number % 3:
                        x.record_stream(streams[number % 4])

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert sums.tolist() == [size * (number % 256 % 251) for number in range(steps)]


@pytest.mark.gpu(count=2)
@pytest.mark.asyncio
async def test_the_current_device_may_be_another_one() -> None:
    async with aiocuda.open_device(driver="cuda", index=1) as device:
        async with DataLoader(device, range(2), output="torch") as loader:
            with torch.cuda.device(0):
                async for batch in loader:
                    tensor: Any = batch[0]
                    assert tensor.device == torch.device("cuda", 1)
                    assert torch.cuda.current_device() == 0
                    await asyncio.sleep(0)
