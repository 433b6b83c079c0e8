"""What the recording libcuda cannot show: the same driver on a real one. The conformance suite asks for the rest.

What ends a process, or must come before CUDA is initialised, has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.cuda._probe import find
from aiocuda.driver.protocol import CudaSource, Program
from aiocuda.errors import CompileError, InvalidArgumentError, StaleHandleError
from aiocuda.testing.conformance._rig import Rig, address_of
from tests.project.tree import python_path

pytestmark = pytest.mark.gpu

_ROOT = Path(__file__).parents[3]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(CudaDriver.get()) as rig:
        yield rig


def _run(program: str, **environment: str | None) -> str:
    """What a program prints in a process of its own."""
    variables = {**os.environ, "PYTHONPATH": python_path(_ROOT / "src", _ROOT), **environment}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={name: value for name, value in variables.items() if value is not None},
        cwd=_ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def _load(rig: Rig, name: str, format: str, text: str) -> int:
    driver = rig.driver

    def load() -> int:
        image, symbol, *_ = driver.compile(rig.device, CudaSource(name, text))
        return driver.load(rig.device, Program(name, format, image=image, symbol=symbol))

    return int(rig.offload(load))


def test_it_is_found() -> None:
    assert find() is None


@pytest.mark.slow
def test_hidden_gpus_are_not_found() -> None:
    program = "from aiocuda.driver.cuda._probe import find; print(find())"
    printed = _run(program, CUDA_VISIBLE_DEVICES="")
    assert "(100)" in printed
    assert "CUDA_VISIBLE_DEVICES is ''" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "queues", "notifiers"), [(None, 32, 24), ("8", 8, 4)])
def test_hardware_queues(asked: str | None, queues: int, notifiers: int) -> None:
    program = """
        import os
        from aiocuda.driver.cuda._driver import CudaDriver

        driver = CudaDriver.get()
        queues = driver.device_open(0).hardware_queues
        print(queues, driver.notifier_limit(0), os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
    """
    assert _run(program, CUDA_DEVICE_MAX_CONNECTIONS=asked).split() == [str(queues), str(notifiers), str(queues)]


@pytest.mark.slow
def test_context_that_was_active_before() -> None:
    """A log event tells it. A warning comes only once more streams wait for each other than there are queues."""
    program = """
        import asyncio, contextlib, logging, time, warnings
        import aiocuda
        from aiocuda.testing import Latch
        from cuda.bindings import driver as cuda

        class Events(logging.Handler):
            def emit(self, record):
                names.append(record.msg["event"])

        names = []
        logging.getLogger("aiocuda").addHandler(Events())
        logging.getLogger("aiocuda").setLevel("INFO")

        async def busy(device, count, caught, longest):
            async with contextlib.AsyncExitStack() as stack:
                latch = stack.enter_context(Latch(device, seconds=120))
                first, *others = [await stack.enter_async_context(device.stream()) for _ in range(count)]
                latch.hold(first)
                gate = first.fill(first.empty(4), 1)
                for stream in others:
                    stream.wait(gate)
                end = time.monotonic() + longest
                while not caught and time.monotonic() < end:
                    await asyncio.sleep(0.001)
                latch.release()
            return len(caught)

        async def main():
            assert cuda.cuInit(0)[0] == 0
            assert cuda.cuDevicePrimaryCtxRetain(0)[0] == 0
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                async with aiocuda.open_device(driver="cuda") as device:
                    print(device.hardware_queues, names.count("few_hardware_queues"))
                    print(await busy(device, 6, caught, 0.6), await busy(device, 12, caught, 60))
            assert [each.category for each in caught] == [aiocuda.PerformanceWarning], caught
            assert "or set CUDA_DEVICE_MAX_CONNECTIONS=32" in str(caught[0].message)

        asyncio.run(main())
    """
    assert _run(program, CUDA_DEVICE_MAX_CONNECTIONS=None).split() == ["8", "1", "0", "1"]


@pytest.mark.slow
def test_fault_is_latched_for_good() -> None:
    program = """
        import time
        from aiocuda.driver.cuda._driver import CudaDriver
        from aiocuda.driver.protocol import CudaSource, Program
        from aiocuda.errors import DeviceFault

        driver = CudaDriver.get()
        driver.device_open(0)
        text = 'extern "C" __global__ void poke(int *address) { *address = 1; }'
        image, symbol, *_ = driver.compile(0, CudaSource("poke", text))
        function = driver.load(0, Program("poke", "P", image=image, symbol=symbol))
        stream, event = driver.stream_create(0, 0), driver.event_create(0, False)
        driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0)((0x10,))
        driver.event_record(event, stream)
        end = time.monotonic() + 60
        try:
            while time.monotonic() < end:
                driver.event_query(event)
        except DeviceFault as error:
            assert (error.code, error.device) == (700, 0), (error.code, error.device)
        assert driver.fault is not None
        calls = driver.statistics()["calls"]
        for method in (lambda: driver.stream_query(stream), lambda: driver.allocate(0, 64, stream),
                     lambda: driver.stream_create(0, 0), lambda: driver.memory_info(0)):
            try:
                method()
            except DeviceFault as error:
                assert error.code == 700
            else:
                raise AssertionError
        driver.event_destroy(event)
        driver.stream_destroy(stream)
        assert driver.statistics()["calls"] == calls
        print("latched")
    """
    assert _run(program) == "latched\n"


@pytest.mark.slow
def test_child_of_a_process_that_uses_cuda() -> None:
    program = """
        import os, select, sys
        from aiocuda.driver.cuda._driver import CudaDriver
        from aiocuda.errors import ForkedProcessError

        driver = CudaDriver.get()
        driver.device_open(0)
        port = driver.open_port(lambda: None)
        stream, event = driver.stream_create(0, 0), driver.event_create(0, False)
        notifier = driver.notifier(0, port)
        driver.event_record(event, stream)
        notifier.ring(event, 42)
        child = os.fork()
        if not child:
            for method in (lambda: driver.event_query(event), lambda: driver.device_open(0)):
                try:
                    method()
                except ForkedProcessError:
                    continue
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert select.select([port.fileno()], [], [], 10)[0]
        assert port.drain() == [42]
        print("rung")
    """
    assert _run(program) == "rung\n"


@pytest.mark.slow
def test_releasing_the_gil_everywhere() -> None:
    program = """
        from aiocuda.driver.cuda._driver import CudaDriver
        from aiocuda.testing.conformance._rig import Rig, address_of

        with Rig(CudaDriver.get()) as rig:
            rig.witness()
            rig.wait_tags(rig.ring(rig.record(rig.stream())))
        print("done")
    """
    assert _run(program, AIOCUDA_GIL="release") == "done\n"


@pytest.mark.parametrize("words", [(1, 2), (3, 3), (1, 2, 3, 4), (5, 5, 5, 5), (7, 7, 7, 8)])
def test_wide_fill_of_a_million_items(rig: Rig, words: tuple[int, ...]) -> None:
    count, stream = 1_000_003, rig.stream()
    pattern = np.array(words, "<u4")
    target = rig.pinned(count * pattern.nbytes).view("<u4")
    memory = rig.memory(target.nbytes)
    rig.driver.fill(stream, memory, pattern.tobytes(), count)
    rig.driver.download(stream, target.ctypes.data, memory, target.nbytes)
    rig.finish(stream)
    assert (target.reshape(count, len(words)) == pattern).all()


_SHARED = """
extern "C" __global__ void shared(unsigned int *out, unsigned int words)
{
    extern __shared__ unsigned int block[];
    for (unsigned int at = threadIdx.x; at < words; at += blockDim.x) block[at] = at;
    __syncthreads();
    if (threadIdx.x == 0) *out = block[words - 1];
}
"""


def test_dynamic_shared_memory_up_to_the_devices_own(rig: Rig) -> None:
    function = _load(rig, "shared", "PI", _SHARED)
    out, stream = rig.memory(4), rig.stream()
    for nbytes in (1024, rig.properties.default_shared_bytes, rig.properties.max_shared_bytes, 2048):
        rig.driver.launcher(stream, function, (1, 1, 1), (128, 1, 1), nbytes)((out, nbytes // 4))
        rig.finish(stream)
        assert rig.look(out, 1, "u4")[0] == nbytes // 4 - 1
    with pytest.raises(InvalidArgumentError, match="dynamic shared memory"):
        rig.driver.launcher(stream, function, (1, 1, 1), (128, 1, 1), rig.properties.max_shared_bytes + 1024)


@pytest.mark.parametrize("image", [b"not an image\0", b"\x7fELF" + bytes(200), b".version 99.9\n.target sm_90\n\0"])
def test_image_that_is_none(rig: Rig, image: bytes) -> None:
    with pytest.raises(CompileError):
        rig.offload(lambda: rig.driver.load(rig.device, Program("k", "", image=image, symbol="k")))


def test_symbol_that_is_not_there(rig: Rig) -> None:
    driver = rig.driver
    image, *_ = rig.offload(lambda: driver.compile(rig.device, CudaSource("shared", _SHARED)))
    with pytest.raises(CompileError, match="has no symbol 'other'"):
        rig.offload(lambda: driver.load(rig.device, Program("k", "PI", image=image, symbol="other")))


def test_imported_stream(rig: Rig) -> None:
    driver = CudaDriver.get()
    handle = driver.stream_handle(rig.stream())
    driver.stream_import(rig.device, handle)
    try:
        event = rig.record(handle)
        rig.finish_event(event)
        assert driver.stream_query(handle)
        memory = driver.allocate(rig.device, 256, handle)
        rig.affine(handle, memory, 64, 0, 5)
        rig.finish(handle)
        assert (rig.look(memory, 64, "u4") == 5).all()
        driver.deallocate(memory, handle)
    finally:
        driver.stream_destroy(handle)
    with pytest.raises(StaleHandleError):
        driver.stream_query(handle)


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_stream_of_a_device(rig: Rig, handle: int) -> None:
    # No context is current on this thread, and the device's default stream is used all the same.
    driver = CudaDriver.get()
    stream = driver.stream_import(rig.device, handle)
    try:
        memory = rig.memory(256)
        rig.affine(stream, memory, 64, 0, 5)
        rig.finish_event(rig.record(stream))
        rig.finish(stream)
        assert (rig.look(memory, 64, "u4") == 5).all()
    finally:
        driver.stream_destroy(stream)


def test_captured_stream_is_left_alone_when_a_stream_is_made(rig: Rig) -> None:
    from cuda.bindings import driver as cuda

    driver, stream = CudaDriver.get(), rig.stream()
    handle = driver.stream_handle(stream)
    rig.destroy_stream(stream)
    theirs = cuda.CUstream(handle)
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert cuda.cuStreamBeginCapture(theirs, mode)[0] == 0
    try:
        for _ in range(driver.statistics()["streams_kept"] + 2):
            assert not driver.stream_has_handle(rig.stream(), handle)
    finally:
        code, graph = cuda.cuStreamEndCapture(theirs)
    assert code == 0, "the capture was invalidated"
    assert cuda.cuGraphDestroy(graph)[0] == 0


def test_queries_do_not_end_a_capture(rig: Rig) -> None:
    from cuda.bindings import driver as cuda

    driver, stream, other = CudaDriver.get(), rig.stream(), rig.stream()
    event = rig.record(other)
    theirs = cuda.CUstream(driver.stream_handle(stream))
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert cuda.cuStreamBeginCapture(theirs, mode)[0] == 0
    try:
        assert driver.stream_capturing(stream)
        driver.begin_queries()
        try:
            rig.finish_event(event)
        finally:
            driver.end_queries()
    finally:
        code, graph = cuda.cuStreamEndCapture(theirs)
    assert code == 0, "the capture was invalidated"
    assert cuda.cuGraphDestroy(graph)[0] == 0
    assert not driver.stream_capturing(stream)


@pytest.mark.gpu(count=2)
def test_copies_beside_the_context_of_another_device() -> None:
    """PyTorch makes the context of its current device current on the thread, which is another device's."""
    from cuda.bindings import driver as cuda

    driver = CudaDriver.get()
    with Rig(driver, 1) as rig:
        stream, one, other, host = rig.stream(), rig.memory(256), rig.memory(256), rig.small(256)
        event = rig.event()
        code, context = cuda.cuDevicePrimaryCtxRetain(0)
        assert code == 0
        assert cuda.cuCtxPushCurrent(context)[0] == 0
        try:
            for number in (1, 2):
                host[:] = number
                upload = driver.recorded_upload(stream, one, address_of(host), 256) if number == 1 else None
                if upload is None:
                    driver.upload(stream, one, address_of(host), 256)
                else:
                    upload((), event)
                driver.copy(stream, other, one, 256)
                driver.download(stream, address_of(host), other, 256)
                rig.finish(stream)
                assert (host == number).all()
        finally:
            cuda.cuCtxPopCurrent()
            cuda.cuDevicePrimaryCtxRelease(0)
