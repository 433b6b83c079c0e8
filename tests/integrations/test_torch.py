"""M2: PyTorch on streams of aiocuda. With CPU tensors on the host driver, with CUDA tensors on a GPU."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import weakref
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import BusyError, Device, InvalidArgumentError, InvalidTypeError, Operation, Stream, UnsupportedError
from aiocuda.lowlevel import queue_of
from tests.helpers import Latch, quickly, until
from tests.integrations.libraries import library, requires

torch = library("torch")
if TYPE_CHECKING:
    from aiocuda.integrations import torch as ours
else:
    ours = library("aiocuda.integrations.torch")

pytestmark = requires("torch")

BUSY = 4096  # a matrix product of this size takes about 3 ms on an H200


@pytest_asyncio.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver=request.param) as opened:
        yield opened


@pytest_asyncio.fixture
async def stream(device: Device) -> AsyncIterator[Stream]:
    async with device.stream() as opened:
        yield opened


@pytest_asyncio.fixture
async def gpu() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="cuda") as opened:
        yield opened


def current() -> Any:
    """Return what belongs to the thread: the current stream and device, and all modes."""
    cuda = torch.cuda.is_initialized()
    return (
        torch.cuda.current_stream() if cuda else None,
        torch.cuda.current_device() if cuda else None,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def model(device: Any) -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)


# -- submit ------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_model_computes_the_same_as_on_the_loop(stream: Stream) -> None:
    where = ours.device_of(stream)
    assert where.type == ("cuda" if stream.device.driver.name == "cuda" else "cpu")
    network, x = model(where), torch.arange(640.0, device=where).reshape(10, 64) / 640
    with torch.no_grad():
        expected = network(x)
        outcome = await quickly(ours.submit(stream, network, x))
    assert torch.allclose(outcome, expected)
    assert not outcome.requires_grad


@pytest.mark.asyncio
async def test_modes_of_the_caller_hold_in_the_function(stream: Stream) -> None:
    def modes() -> Any:
        return current()[2:]

    if stream.device.driver.name == "cuda":
        torch.cuda.init()  # before, PyTorch has no current stream that could be compared
    before = current()
    contexts = [
        torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", cache_enabled=False), torch.enable_grad(),
    ]  # fmt: skip
    if stream.device.driver.name == "cuda":
        contexts.append(torch.autocast("cuda"))
    for context in contexts:
        with context:
            expected = modes()
            operation = ours.submit(stream, modes)
        assert await quickly(operation) == expected
    with torch.inference_mode():
        operation = ours.submit(stream, torch.ones, 3)
    assert (await quickly(operation)).is_inference()
    assert current() == before


@pytest.mark.asyncio
async def test_function_that_changes_modes_changes_nothing(stream: Stream) -> None:
    def change() -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        if stream.device.driver.name == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())
        raise KeyError(1)

    before = current()
    with pytest.raises(KeyError):
        await quickly(ours.submit(stream, change))
    if stream.device.driver.name == "cuda":
        torch.set_grad_enabled(before[2])  # only the stream is ours: the rest belongs to the function
        torch.set_autocast_enabled("cpu", before[5])
    assert current() == before


@dataclasses.dataclass
class Answer:
    logits: Any
    extra: dict[str, Any]


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
async def test_nested_results(stream: Stream) -> None:
    x = torch.ones(4, device=ours.device_of(stream))

    def nested(x: Any) -> Any:
        sparse = torch.eye(4, device=x.device).to_sparse()
        return Answer(x + 1, {"pair": (x + 2, [x + 3]), "sparse": sparse, "csr": sparse.to_sparse_csr(), "n": 7})

    answer = await quickly(ours.submit(stream, nested, x))
    assert answer.logits.tolist() == [2.0] * 4
    assert answer.extra["pair"][1][0].tolist() == [4.0] * 4
    assert answer.extra["sparse"].to_dense().trace() == 4
    assert answer.extra["n"] == 7


@pytest.mark.asyncio
async def test_results_that_no_other_code_may_write_are_recorded(stream: Stream) -> None:
    """Leaves that require gradients, and tensors made in inference mode."""
    where = ours.device_of(stream)

    def leaf() -> Any:
        return torch.ones(3, device=where, requires_grad=True)

    def inferred() -> Any:
        with torch.inference_mode():
            return torch.ones(3, device=where)

    assert (await quickly(ours.submit(stream, leaf))).requires_grad
    assert (await quickly(ours.submit(stream, inferred))).is_inference()


@pytest.mark.asyncio
async def test_wrong_arguments(stream: Stream) -> None:
    async def coroutine() -> None:
        pass

    wrong: Any = 7
    no_coroutine: Any = print
    uses: list[tuple[Callable[[], object], str]] = [
        (lambda: ours.submit(stream, coroutine), "is a coroutine function: submit the parts between its awaits"),
        (lambda: ours.submit(stream, wrong), "submit takes a function that enqueues work, not 7"),
        (lambda: ours.submit(wrong, coroutine), r"is a coroutine function"),
        (lambda: ours.submit(wrong, print), r"this takes an aiocuda\.Stream, not 7"),
        (lambda: ours.on(wrong), r"this takes an aiocuda\.Stream, not 7"),
        (lambda: ours.on(stream)(no_coroutine), "takes a coroutine function, `async def`"),
        (lambda: ours.wait(wrong), r"wait takes a stream, an event, a tensor, .* not 7"),
        (lambda: ours.replay(stream, wrong), r"replay takes a torch\.cuda\.CUDAGraph, not 7"),
    ]
    for use, message in uses:
        with pytest.raises(InvalidTypeError, match=message):
            use()


@pytest.mark.asyncio
async def test_log_events_name_the_function(stream: Stream) -> None:
    operation = ours.submit(stream, model, "cpu")
    assert "model" in repr(operation) or operation.kind == "submit"
    await quickly(operation)


# -- wait --------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_wait_without_work_of_a_gpu() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("PyTorch has used a GPU in this process")
    for waiting in (ours.wait(), ours.wait(torch.ones(3)), aiocuda.wait(torch.ones(3))):
        assert waiting.done()
        await quickly(waiting)


# -- on ----------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_each_coroutine_has_its_own_state(device: Device) -> None:
    """With blocks across awaits, several at a time, in random order; a bystander sees the default."""
    before = current()
    on_gpu = device.driver.name == "cuda"
    kinds = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "not inference": lambda: torch.inference_mode(False),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "grad": torch.enable_grad,
    }
    if on_gpu:
        kinds["cast"] = lambda: torch.autocast("cuda", torch.float16)
        kinds["stream"] = lambda: torch.cuda.stream(torch.cuda.Stream())

    async def work(script: random.Random, stream: Stream) -> None:
        async def nest(depth: int) -> None:
            for _ in range(script.randrange(1, 4)):
                expected = current()
                await asyncio.sleep(0)
                assert current() == expected
                with kinds[script.choice(list(kinds))]():
                    inside = current()
                    try:
                        await asyncio.sleep(0)
                        assert current() == inside
                        if depth < 3:
                            await nest(depth + 1)
                        assert current() == inside
                        if script.random() < 0.2:
                            raise KeyError(depth)
                    except KeyError:
                        assert current() == inside
                assert current() == expected

        if on_gpu:
            assert stream_handle(stream) == torch.cuda.current_stream().cuda_stream
        await nest(0)
        assert current()[2:] == before[2:]

    async def bystander(done: asyncio.Event) -> None:
        while not done.is_set():
            assert current() == before
            await asyncio.sleep(0)

    done = asyncio.Event()
    watching = asyncio.create_task(bystander(done))
    streams = [device.stream() for _ in range(5)]
    for seed in range(60):
        script = random.Random(seed)
        count = script.randrange(2, 6)
        tasks = [
            asyncio.create_task(ours.on(each)(work)(random.Random(seed * 10 + number), each))
            for number, each in enumerate(streams[:count])
        ]
        if script.random() < 0.4:
            await asyncio.sleep(0)
            tasks[0].cancel()
        results = await quickly(asyncio.gather(*tasks, return_exceptions=True))
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), (seed, results)
        assert current() == before, seed
    done.set()
    await watching
    for each in streams:
        await each.aclose()


@pytest.mark.asyncio
async def test_closed_coroutine_runs_its_cleanup_in_its_own_state(stream: Stream) -> None:
    seen: list[Any] = []
    before = current()

    @ours.on(stream)
    async def work() -> None:
        with torch.no_grad():
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                seen.append(torch.is_grad_enabled())

    coroutine = work()
    coroutine.send(None)
    assert current() == before
    coroutine.close()
    assert seen == [False]
    assert current() == before


@pytest.mark.asyncio
async def test_closed_stream_is_refused(device: Device) -> None:
    stream = device.stream()
    work = ours.on(stream)(asyncio.sleep)
    await stream.aclose()
    with pytest.raises(aiocuda.ClosedError):
        await work(0)


def stream_handle(stream: Stream) -> int:
    queue = queue_of(stream)
    return queue.driver.stream_handle(queue.handle)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def busy(x: Any) -> Any:
    """Enqueue some milliseconds of work."""
    for _ in range(3):
        x = x @ x
        x = x / x.norm()
    return x


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_function_runs_on_our_stream_after_the_work_of_the_caller(gpu: Device) -> None:
    async with gpu.stream() as stream:
        theirs = torch.cuda.Stream()
        x = torch.zeros(BUSY, BUSY, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(theirs):
            busy(torch.ones(BUSY, BUSY, device="cuda"))
            x.fill_(7)
            operation = ours.submit(stream, lambda x: (torch.cuda.current_stream().cuda_stream, x.sum()), x)
            assert torch.cuda.current_stream() == theirs
        handle, total = await quickly(operation)
        assert handle == stream_handle(stream)
        assert total.item() == 7.0 * BUSY * BUSY


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_two_thousand_kernels_in_one_call(gpu: Device) -> None:
    """The second call waits on the host while the first is on the device; the loop is held by the calls only."""
    async with gpu.stream() as stream:
        x = torch.zeros(64, device="cuda")

        def many(x: Any) -> None:
            for _ in range(2000):
                x += 1

        operations = [ours.submit(stream, many, x) for _ in range(5)]
        states = [operation.state for operation in operations]
        await quickly(aiocuda.gather(*operations))
        assert states.count("queued") >= 2
        assert x.tolist() == [10_000.0] * 64


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_buffer_is_exported_in_the_function(gpu: Device) -> None:
    async with gpu.stream() as stream, gpu.stream() as other:
        buffer = stream.empty(1 << 20, np.float32)
        stream.fill(buffer, 3)

        def double(buffer: Any) -> Any:
            tensor = torch.from_dlpack(buffer)
            tensor.mul_(2)
            return tensor.sum()

        total = await quickly(ours.submit(stream, double, buffer))
        assert total.item() == 6.0 * (1 << 20)
        stream.fill(buffer, 1)
        other.wait(stream)
        assert (await quickly(other.download(buffer)) == 1).all()


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_stream_methods_raise_in_the_function(gpu: Device) -> None:
    async with gpu.stream() as stream:
        with pytest.raises(BusyError, match=r"inside a function of Stream\.submit"):
            await quickly(ours.submit(stream, stream.synchronize))


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_inputs_may_be_dropped_after_submit(gpu: Device) -> None:
    async with gpu.stream() as stream:
        with Latch(gpu) as latch:
            latch.hold(stream)
            x = torch.full((1 << 20,), 3.0, device="cuda")
            seen = weakref.ref(x)
            operation = ours.submit(stream, lambda x: x.sum(), x)
            del x
            y = torch.full((1 << 20,), 9.0, device="cuda")  # would take the memory of x
            torch.cuda.current_stream().synchronize()
            assert seen() is not None
            latch.release()
            assert (await quickly(operation)).item() == 3.0 * (1 << 20)
        await until(lambda: seen() is None)
        assert y.sum().item() == 9.0 * (1 << 20)


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_results_may_be_used_and_dropped_on_the_stream_of_the_caller(gpu: Device) -> None:
    """Their memory is reused after the work of the caller's stream."""
    async with gpu.stream() as stream:
        totals = []
        for number in range(50):
            result = await quickly(ours.submit(stream, torch.full, (1 << 20,), float(number), device="cuda"))
            busy(torch.ones(1024, 1024, device="cuda"))
            totals.append(result.sum())
            del result
        assert [total.item() for total in totals] == [float(number) * (1 << 20) for number in range(50)]


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_capture_of_the_caller_is_refused(gpu: Device) -> None:
    async with gpu.stream() as stream:
        x = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            x += 1
            with pytest.raises(BusyError, match="PyTorch's current stream is being captured"):
                ours.submit(stream, torch.ones, 3)
            with pytest.raises(UnsupportedError, match="is being captured"):
                ours.wait()
        graph.replay()
        torch.cuda.synchronize()
        assert x.tolist() == [1.0] * 4


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_capture_across_an_await_is_refused(gpu: Device) -> None:
    async with gpu.stream() as stream:
        graph = torch.cuda.CUDAGraph()

        @ours.on(stream)
        async def work() -> str:
            x = torch.zeros(4, device="cuda")
            await stream.synchronize()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                x += 1
                with pytest.raises(BusyError, match="end the capture before the await"):
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
            return "done"

        assert await quickly(work()) == "done"
        await quickly(ours.replay(stream, graph))


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_replay(gpu: Device) -> None:
    async with gpu.stream() as stream:
        x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            y.copy_(x * 2)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y.copy_(x * 2)
        for number in range(20):
            ours.submit(stream, x.fill_, float(number))
            await quickly(ours.replay(stream, graph))
            assert y.tolist() == [2.0 * number] * 4
    async with aiocuda.open_device(driver="host") as host, host.stream() as stream:
        with pytest.raises(UnsupportedError, match="PyTorch computes on a GPU"):
            ours.replay(stream, graph)


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_wait_for_tensors_streams_and_events(gpu: Device) -> None:
    theirs = torch.cuda.Stream()
    x = torch.ones(BUSY, BUSY, device="cuda")
    event, early = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    waits: list[tuple[Callable[[], Operation[None]], Any]] = [
        (lambda: ours.wait(x), torch.cuda.default_stream()),
        (lambda: ours.wait(), torch.cuda.default_stream()),
        (lambda: ours.wait(torch.ones(3)), torch.cuda.default_stream()),
        (lambda: ours.wait(theirs), theirs),
        (lambda: ours.wait(event), theirs),
    ]
    for wait, stream in waits:
        with torch.cuda.stream(stream):
            early.record()
            busy(x)
            event.record(stream)
        operation = wait()
        ended = operation.done()
        assert event.query() or not ended
        await quickly(operation)
        assert event.query()
    with pytest.raises(InvalidArgumentError, match="never recorded"):
        ours.wait(torch.cuda.Event())


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_late_event_delays_no_other_wait(gpu: Device) -> None:
    async with gpu.stream() as held, gpu.stream() as free:
        with Latch(gpu) as latch:
            latch.hold(held)
            await latch.held()
            late, early = torch.cuda.Event(), torch.cuda.Event()
            late.record(torch.cuda.ExternalStream(stream_handle(held)))
            first = ours.wait(late)
            early.record(torch.cuda.ExternalStream(stream_handle(free)))
            await quickly(ours.wait(early))
            assert not first.done()
            latch.release()
            await quickly(first)


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_wait_needs_no_open_device() -> None:
    x = torch.ones(BUSY, BUSY, device="cuda")
    torch.cuda.synchronize()
    busy(x)
    event = torch.cuda.current_stream().record_event()
    await quickly(ours.wait())
    assert event.query()


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_upload_is_there_when_the_next_step_begins(gpu: Device) -> None:
    async with gpu.stream() as stream:
        array = np.arange(1 << 22, dtype=np.float32)

        @ours.on(stream)
        async def work() -> float:
            buffer = await stream.upload(array)
            total = torch.from_dlpack(buffer).double().sum()
            stream.fill(buffer, 0)  # after the sum, in the order of the stream
            await ours.wait()
            return float(total.item())

        assert await quickly(work()) == float(array.astype(np.float64).sum())


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_close_of_the_stream_waits_for_the_work_of_a_coroutine(gpu: Device) -> None:
    event = torch.cuda.Event()
    x = torch.ones(BUSY, BUSY, device="cuda")
    torch.cuda.synchronize()
    async with gpu.stream() as stream:

        @ours.on(stream)
        async def work() -> None:
            busy(x)
            event.record()
            await asyncio.sleep(0)

        await work()
        assert not event.query()
    assert event.query()


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_autocast_uses_no_cast_of_another_stream(gpu: Device) -> None:
    """PyTorch caches the casts of weights for all streams of the thread."""
    network = torch.nn.Linear(2048, 2048, bias=False, device="cuda")
    torch.nn.init.constant_(network.weight, 1 / 2048)
    x = torch.ones(256, 2048, device="cuda")
    torch.cuda.synchronize()
    async with gpu.stream() as first, gpu.stream() as second:
        with torch.autocast("cuda", torch.float16):
            for _ in range(50):
                results = await quickly(aiocuda.gather(ours.submit(first, network, x), ours.submit(second, network, x)))
                for result in results:
                    assert torch.allclose(result, torch.ones_like(result), rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_triton_kernel(gpu: Device) -> None:
    pytest.importorskip("triton")
    from tests.integrations.triton_kernel import add_one

    async with gpu.stream() as stream:
        x = torch.zeros(1000, device="cuda")
        for number in range(3):
            await quickly(ours.submit(stream, add_one, x))
            assert x.tolist() == [number + 1.0] * 1000


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_nothing_is_left_behind(gpu: Device) -> None:
    async with gpu.stream() as stream:
        x = torch.ones(1000, device="cuda")

        @ours.on(stream)
        async def work() -> Any:
            await asyncio.sleep(0)
            return x + 1

        for round_ in range(3):
            for _ in range(20):
                await quickly(ours.submit(stream, torch.add, x, x))
                await quickly(work())
                await quickly(ours.wait(x))
            gc.collect()
            torch.cuda.synchronize()
            if round_ == 0:
                before = torch.cuda.memory_allocated(), gpu.statistics().streams, gpu.statistics().events
        assert (torch.cuda.memory_allocated(), gpu.statistics().streams, gpu.statistics().events) == before
