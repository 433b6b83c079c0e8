"""Kernels that cuda.core has compiled. The tests marked ``gpu`` compile them; the others use a kernel without code."""

from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import Device, Kernel
from aiocuda.driver.cuda._compiled import plain_name
from aiocuda.driver.protocol import LoadedKernel
from aiocuda.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from aiocuda.testing import SimulatedLoop
from tests.kernels.test_kernel import CountingDriver, as_driver

pytestmark = pytest.mark.slow  # importing cuda.core takes 0.5 s

PARAMETERS = "const float* x, float* out, float by, int n"

SOURCE = """
namespace blas {
template <typename T>
__global__ void scale(const T* x, T* out, T by, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = by * x[i];
}
}
"""


def scale_on_host(x: Any, out: Any, by: Any, n: Any) -> None:
    out[:n] = by * x[:n]


async def scaled(device: Device, kernel: Kernel, count: int = 1000) -> bool:
    """Launch the kernel, and return whether its result is NumPy's."""
    x = np.arange(count, dtype=np.float32)
    async with device.stream() as stream:
        source = await stream.upload(x)
        out = stream.empty_like(source)
        stream.launch(kernel, (count + 255) // 256, 256, source, out, 2.5, count)
        del kernel
        gc.collect()
        result = await stream.download(out)
    return np.array_equal(result, np.float32(2.5) * x)


# Without a GPU


@pytest.fixture(scope="module")
def without_code() -> Callable[..., Any]:
    """Make a ``cuda.core.Kernel`` with a number of parameters. Its handle is NULL, which CUDA refuses."""
    core = pytest.importorskip("cuda.core")

    def make(count: int | None = 4) -> Any:
        def num_arguments(self: object) -> int:
            if count is None:
                raise NotImplementedError("the NVIDIA driver is too old")
            return count

        members = {"num_arguments": property(num_arguments), "handle": property(lambda self: 0)}
        compiled_kernel: Any = type("CompiledKernel", (core.Kernel,), members)
        return compiled_kernel.__new__(compiled_kernel)

    return make


def test_signature_is_that_of_the_parameter_list(without_code: Callable[..., Any]) -> None:
    kernel = Kernel.from_cuda_core(without_code(), PARAMETERS)
    assert repr(kernel) == f"<Kernel kernel({PARAMETERS})>"
    assert kernel.signature.format == "PPfi"
    assert [kernel.writes(index) for index in range(4)] == [False, True, False, False]
    assert kernel.host is None


def test_kernel_without_parameters(without_code: Callable[..., Any]) -> None:
    for parameters in ("", "void"):
        assert Kernel.from_cuda_core(without_code(0), parameters).signature.parameters == ()


def test_loads_the_compiled_kernel_and_compiles_nothing(without_code: Callable[..., Any]) -> None:
    compiled = without_code()
    driver = CountingDriver()
    kernel = Kernel.from_cuda_core(compiled, PARAMETERS, scale_on_host)
    kernel.load(as_driver(driver), 0)
    (program,) = driver.programs
    assert program.loaded == LoadedKernel(0, compiled)
    assert (program.image, program.format, program.read_only) == (None, "PPfi", frozenset({0}))
    assert driver.compiled == []


def test_compiled_kernel_lives_as_long_as_the_kernel(without_code: Callable[..., Any]) -> None:
    compiled = without_code()
    alive = weakref.ref(compiled)
    kernel = Kernel.from_cuda_core(compiled, PARAMETERS)
    del compiled
    gc.collect()
    assert alive() is not None
    del kernel
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("driver", ["host", "simulated"])
def test_host_implementation_runs_without_a_gpu(without_code: Callable[..., Any], driver: str) -> None:
    async def main() -> None:
        async with aiocuda.open_device(driver=driver) as device:  # type: ignore[arg-type]
            assert await scaled(device, Kernel.from_cuda_core(without_code(), PARAMETERS, host=scale_on_host))

    run_on(driver, main)


@pytest.mark.parametrize("driver", ["host", "simulated"])
def test_kernel_without_host_implementation_is_refused_without_a_gpu(
    without_code: Callable[..., Any], driver: str
) -> None:
    async def main() -> None:
        async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:  # type: ignore[arg-type]
            kernel = Kernel.from_cuda_core(without_code(1), "int n")
            with pytest.raises(UnsupportedError, match=r"'kernel' has no host implementation.*from_cuda_core"):
                await stream.launch(kernel, 1, 1, 1)

    run_on(driver, main)


def run_on(driver: str, main: Callable[[], Any]) -> None:
    if driver == "simulated":
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(main())
    else:
        asyncio.run(main())


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        (None, InvalidTypeError, "parameters is a str, .* not None"),
        (b"int n", InvalidTypeError, "parameters is a str, .* not b'int n'"),
        (["int n"], InvalidTypeError, "parameters is a str"),
        ("void f(int n)", InvalidArgumentError, r"parameters is 'void f\(int n\)': write the parameter list only"),
        ("int n) { x }", InvalidArgumentError, "write the parameter list only"),
        ("int n;", InvalidArgumentError, "write the parameter list only"),
        ("Grid grid", UnsupportedError, "parameter 1 of kernel 'kernel', `Grid grid`"),
        ("int n,", UnsupportedError, "parameter 2 of kernel 'kernel', ``"),
        ("int n, int m", InvalidArgumentError, "'int n, int m', which is 2 parameters; .* 'kernel' takes 1: write all"),
        ("", InvalidArgumentError, "'', which is 0 parameters; the compiled kernel 'kernel' takes 1"),
    ],
)
def test_wrong_parameter_lists(
    without_code: Callable[..., Any], parameters: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Kernel.from_cuda_core(without_code(1), parameters)


def test_count_is_not_compared_if_the_nvidia_driver_does_not_return_it(without_code: Callable[..., Any]) -> None:
    assert len(Kernel.from_cuda_core(without_code(None), PARAMETERS).signature.parameters) == 4


def test_host_implementation_must_take_the_parameters(without_code: Callable[..., Any]) -> None:
    with pytest.raises(InvalidTypeError, match="cannot be called as kernel"):
        Kernel.from_cuda_core(without_code(), PARAMETERS, host=lambda x: None)


def test_other_objects_are_refused(without_code: Callable[..., Any]) -> None:
    from cuda import core

    ours = Kernel.from_cuda_core(without_code(1), "int n")
    for thing in (None, 5, "scale", core.Kernel, ours, without_code):
        with pytest.raises(InvalidTypeError, match=r"kernel is a cuda\.core\.Kernel, not .*get_kernel\(name\)"):
            Kernel.from_cuda_core(thing, "int n")
    with pytest.raises(InvalidTypeError, match=r"not an ObjectCode: pass one kernel of it"):
        Kernel.from_cuda_core(core.ObjectCode.from_cubin(b"\x7fELF"), "int n")


def test_it_has_no_source_and_stays_in_its_process(without_code: Callable[..., Any]) -> None:
    kernel = Kernel.from_cuda_core(without_code(1), "int n")
    with pytest.raises(UnsupportedError, match=r"<Kernel kernel\(int n\)> has no source: it was compiled elsewhere"):
        _ = kernel.source
    with pytest.raises(InvalidTypeError, match="belongs to this process"):
        pickle.dumps(kernel)


IMPORTS_NOTHING = """
import sys, aiocuda
try:
    aiocuda.Kernel.from_cuda_core(5, "int n")
except aiocuda.InvalidTypeError:
    pass
assert not [name for name in sys.modules if name.partition(".")[0] == "cuda"]
"""


def test_cuda_core_is_not_imported() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS_NOTHING], check=True, timeout=60)


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("scale", "scale"),
        ("_Z5scalePKfPffi", "scale"),
        ("_ZL5scalePf", "scale"),
        ("_Z5scaleIfEvPKT_PS0_S0_i", "scale"),
        ("_Z5scale4Grid", "scale"),
        ("_ZN4blas5scaleEPKfPffi", "scale"),
        ("_ZN4blas5scaleIfEEvPKT_PS1_S1_i", "scale"),
        ("_ZN4blas5scaleE4Grid", "scale"),
        ("_ZN12_GLOBAL__N_15scaleEv", "scale"),
        ("_Zxyz", "_Zxyz"),
    ],
)
def test_name_without_namespaces_and_types(symbol: str, name: str) -> None:
    assert plain_name(symbol) == name


# With a GPU


def compile_scale(device: Device) -> Any:
    """Compile the kernel for the device, on a thread that ends: cuda.core makes a context current on its thread."""

    def compiled() -> Any:
        from cuda import core

        core.Device(device.index).set_current()
        program = core.Program(SOURCE, "c++", options=core.ProgramOptions(std="c++17"))
        return program.compile("cubin", name_expressions=("blas::scale<float>",)).get_kernel("blas::scale<float>")

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(compiled).result()


@pytest_asyncio.fixture
async def gpu() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="cuda") as device:
        yield device


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_compiled_kernel_is_launched(gpu: Device) -> None:
    kernel = Kernel.from_cuda_core(compile_scale(gpu), PARAMETERS)
    assert repr(kernel) == f"<Kernel scale({PARAMETERS})>"
    assert await scaled(gpu, kernel)
    assert await scaled(gpu, kernel, 10_000)


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_graph_launches_a_compiled_kernel(gpu: Device) -> None:
    kernel = Kernel.from_cuda_core(compile_scale(gpu), PARAMETERS)
    x = np.arange(100, dtype=np.float32)
    async with gpu.stream() as stream:
        source = await stream.upload(x)
        out = stream.empty_like(source)
        async with stream.capture() as graph:
            stream.launch(kernel, 1, 128, source, out, 2.5, 100)
        await graph.launch(stream)
        assert np.array_equal(await stream.download(out), np.float32(2.5) * x)


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_objects_of_cuda_core_are_dropped_before_the_launch(gpu: Device) -> None:
    compiled = compile_scale(gpu)
    kernel = Kernel.from_cuda_core(compiled, PARAMETERS)
    del compiled
    gc.collect()
    assert await scaled(gpu, kernel)


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_kernel_is_dropped_before_its_launch_ends(gpu: Device) -> None:
    for _ in range(3):
        assert await scaled(gpu, Kernel.from_cuda_core(compile_scale(gpu), PARAMETERS))


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_two_kernels_of_one_compiled_kernel(gpu: Device) -> None:
    compiled = compile_scale(gpu)
    for name in ("by", "factor"):
        assert await scaled(gpu, Kernel.from_cuda_core(compiled, PARAMETERS.replace("by", name)))


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_wrong_number_of_parameters_is_refused_before_the_launch(gpu: Device) -> None:
    """At once on a thread with a current context, else by the first launch."""
    compiled = compile_scale(gpu)

    def with_context(parameters: str) -> Kernel:
        from cuda import core

        core.Device(gpu.index).set_current()
        return Kernel.from_cuda_core(compiled, parameters)

    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as without_context:
        for parameters, count in (("const float* x, float* out, float by", 3), (f"{PARAMETERS}, int more", 5)):
            with pytest.raises(InvalidArgumentError, match=f"is {count} parameters; .* 'scale' takes 4") as caught:
                thread.submit(with_context, parameters).result()
            assert (caught.value.expected, caught.value.given) == (4, count)  # type: ignore[attr-defined]
            with pytest.raises(InvalidTypeError, match="kernel 'scale'"):
                another = compile_scale(gpu)  # of which the number is not known yet
                await gpu.load(without_context.submit(Kernel.from_cuda_core, another, parameters).result())


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_wrong_sizes_of_parameters_fail_the_launch(gpu: Device) -> None:
    kernel = Kernel.from_cuda_core(compile_scale(gpu), PARAMETERS.replace("float by", "double by"))
    async with gpu.stream() as stream:
        x, out = stream.empty(10), stream.empty(10)
        with pytest.raises(InvalidTypeError, match="parameter 2 of kernel 'scale' has 4 bytes"):
            await stream.launch(kernel, 1, 10, x, out, 2.5, 10)


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_compiled_kernel_on_the_host_driver(gpu: Device) -> None:
    compiled = compile_scale(gpu)
    async with aiocuda.open_device(driver="host") as device:
        assert await scaled(device, Kernel.from_cuda_core(compiled, PARAMETERS, host=scale_on_host))
        with pytest.raises(UnsupportedError, match="kernel 'scale' has no host implementation"):
            await device.load(Kernel.from_cuda_core(compiled, PARAMETERS))
