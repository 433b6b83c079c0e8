"""Eight programs, each against NumPy: their host implementations on the host driver, their kernels on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, Kernel, Stream
from aiocuda.driver.cuda._compiler import compile_cuda
from tests.driver.cuda.test_compiler import needs_nvrtc
from tests.helpers import quickly

#: Programs by name: each launches its kernels on the stream, and compares the result with NumPy.
PROGRAMS: dict[str, Callable[[Device, Stream], Awaitable[None]]] = {}


def program(function: Callable[[Device, Stream], Awaitable[None]]) -> Callable[[Device, Stream], Awaitable[None]]:
    PROGRAMS[function.__name__] = function
    return function


def numbers(count: int, dtype: Any = np.float32, below: int = 1000) -> Any:
    return np.random.default_rng(count).integers(0, below, count).astype(dtype)


# 1


def axpy_on_host(a: Any, x: Any, y: Any, n: int) -> None:
    y[:n] += a * x[:n]


AXPY = Kernel(
    "axpy",
    source="""
__global__ void axpy(float a, const float* x, float* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
""",
    host=axpy_on_host,
    options=["-fmad=false"],  # as NumPy, which rounds twice
)


@program
async def axpy(device: Device, stream: Stream) -> None:
    x, y = np.random.default_rng(1).random((2, 100_003), np.float32)
    dx, dy = await stream.upload(x), await stream.upload(y)
    stream.launch(AXPY, 0.7, dx, dy, x.size - 3, n=x.size - 3)
    y[:-3] += np.float32(0.7) * x[:-3]
    assert np.array_equal(await stream.download(dy), y)


# 2


def blur_on_host(image: Any, out: Any, rows: int, columns: int) -> None:
    out[1:-1, 1:-1] = image[:-2, 1:-1] + image[2:, 1:-1] + image[1:-1, :-2] + image[1:-1, 2:] - 4 * image[1:-1, 1:-1]


STENCIL = Kernel(
    "laplace",
    source="""
__global__ void laplace(const float* image, float* out, int rows, int columns)
{
    int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row < 1 || column < 1 || row >= rows - 1 || column >= columns - 1) return;
    int i = row * columns + column;
    out[i] = image[i - columns] + image[i + columns] + image[i - 1] + image[i + 1] - 4 * image[i];
}
""",
    host=blur_on_host,
)


@program
async def stencil(device: Device, stream: Stream) -> None:
    image = numbers(300 * 501).reshape(300, 501)
    out = stream.zeros(image.shape)
    stream.launch(STENCIL, (-(-501 // 32), -(-300 // 8)), (32, 8), await stream.upload(image), out, *image.shape)
    expected = np.zeros_like(image)
    for axis in (0, 1):
        for step in (-1, 1):
            expected += np.roll(image, step, axis) - image
    expected[[0, -1]] = expected[:, [0, -1]] = 0
    assert np.array_equal(await stream.download(out), expected)


# 3

SCAN = """
__device__ int scanned(int value, int* part)
{
    part[threadIdx.x] = value;
    __syncthreads();
    for (int step = 1; step < blockDim.x; step *= 2) {
        int before = threadIdx.x >= step ? part[threadIdx.x - step] : 0;
        __syncthreads();
        part[threadIdx.x] += before;
        __syncthreads();
    }
    return part[threadIdx.x];
}
__global__ void scan_blocks(int* x, int* sums, int n)
{
    __shared__ int part[256];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int sum = scanned(i < n ? x[i] : 0, part);
    if (i < n) x[i] = sum;
    if (threadIdx.x == blockDim.x - 1) sums[blockIdx.x] = sum;
}
__global__ void scan_sums(int* sums, int n)
{
    __shared__ int part[256];
    int sum = scanned(threadIdx.x < n ? sums[threadIdx.x] : 0, part);
    if (threadIdx.x < n) sums[threadIdx.x] = sum;
}
__global__ void add_sums(int* x, const int* sums, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && blockIdx.x > 0) x[i] += sums[blockIdx.x - 1];
}
"""


def scan_blocks_on_host(x: Any, sums: Any, n: int, *, grid: Any, block: Any) -> None:
    for index in range(grid[0]):
        part = x[:n][index * block[0] : (index + 1) * block[0]]
        part[:] = np.cumsum(part)
        sums[index] = part[-1]


def scan_sums_on_host(sums: Any, n: int) -> None:
    sums[:n] = np.cumsum(sums[:n])


def add_sums_on_host(x: Any, sums: Any, n: int, *, grid: Any, block: Any) -> None:
    x[block[0] : n] += np.repeat(sums[: grid[0] - 1], block[0])[: n - block[0]]


SCAN_BLOCKS = Kernel("scan_blocks", source=SCAN, host=scan_blocks_on_host)
SCAN_SUMS = Kernel("scan_sums", source=SCAN, host=scan_sums_on_host)
ADD_SUMS = Kernel("add_sums", source=SCAN, host=add_sums_on_host)


@program
async def prefix_sum(device: Device, stream: Stream) -> None:
    x = numbers(50_001, np.int32)
    blocks = -(-x.size // 256)
    dx, sums = await stream.upload(x), stream.zeros(blocks, np.int32)
    stream.launch(SCAN_BLOCKS, dx, sums, x.size, n=x.size)
    stream.launch(SCAN_SUMS, sums, blocks, n=blocks)
    stream.launch(ADD_SUMS, dx, sums, x.size, n=x.size)
    assert np.array_equal(await stream.download(dx), np.cumsum(x))


# 4


def histogram_on_host(data: Any, counts: Any, n: Any) -> None:
    counts += np.bincount(data[:n], minlength=256).astype(np.uint32)


HISTOGRAM = Kernel(
    "histogram",
    source="""
__global__ void histogram(const unsigned char* data, unsigned* counts, size_t n)
{
    __shared__ unsigned mine[256];
    mine[threadIdx.x] = 0;
    __syncthreads();
    size_t first = blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t i = first; i < n; i += gridDim.x * blockDim.x) atomicAdd(&mine[data[i]], 1);
    __syncthreads();
    atomicAdd(&counts[threadIdx.x], mine[threadIdx.x]);
}
""",
    host=histogram_on_host,
)


@program
async def histogram(device: Device, stream: Stream) -> None:
    data = numbers(200_000, np.uint8, 256)
    counts = stream.zeros(256, np.uint32)
    stream.launch(HISTOGRAM, 64, 256, await stream.upload(data), counts, data.size)
    assert np.array_equal(await stream.download(counts), np.bincount(data, minlength=256))


# 5


def total_on_host(x: Any, total: Any, n: int) -> None:
    total[0] += x[:n].sum()


REDUCTION = Kernel(
    "total",
    source="""
__global__ void total(const double* x, double* total, int n)
{
    extern __shared__ double part[];  // eight for each thread
    for (int k = threadIdx.x; k < 8 * blockDim.x; k += blockDim.x) {
        int i = 8 * blockIdx.x * blockDim.x + k;
        part[k] = i < n ? x[i] : 0;
    }
    for (int step = 4 * blockDim.x; step > 0; step /= 2) {
        __syncthreads();
        for (int k = threadIdx.x; k < step; k += blockDim.x) part[k] += part[k + step];
    }
    if (threadIdx.x == 0) atomicAdd(total, part[0]);
}
""",
    host=total_on_host,
)


@program
async def reduction_in_64_kib(device: Device, stream: Stream) -> None:
    x, total = numbers(100_000, np.float64), stream.zeros(1, np.float64)
    threads = -(-x.size // 8)
    stream.launch(REDUCTION, await stream.upload(x), total, x.size, n=threads, block=1024, shared_bytes=8 * 1024 * 8)
    assert (await stream.download(total))[0] == x.sum()


# 6

SCALE = """
namespace blas {
template <typename T, int factor> __global__ void scale(T* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
}
"""


def scale_on_host(factor: int, x: Any, n: int) -> None:
    x[:n] *= factor


INSTANCES = [
    Kernel(
        f"scale<{name}, {factor}>",
        source=SCALE,
        parameters=f"{name}* x, int n",
        host=functools.partial(scale_on_host, factor),
    )
    for name, factor in (("float", 4), ("double", -3), ("unsigned char", 3))
]


@program
async def template(device: Device, stream: Stream) -> None:
    for kernel, dtype, factor in zip(INSTANCES, (np.float32, np.float64, np.uint8), (4, -3, 3), strict=True):
        x = numbers(1001, dtype, 80)
        buffer = await stream.upload(x)
        stream.launch(kernel, buffer, x.size, n=x.size)
        assert np.array_equal(await stream.download(buffer), x * dtype(factor))


# 7

BODY = np.dtype([("kind", np.uint8), ("mass", np.float64), ("at", np.float32, 3), ("v", np.float32, 3)], align=True)


def step_on_host(bodies: Any, settings: Any, n: int) -> None:
    moved = bodies[:n]["kind"] == settings["kind"]
    bodies["at"][:n][moved] += settings["seconds"] * bodies["v"][:n][moved]


STRUCTURES = Kernel(
    "step",
    source="""
namespace physics {
struct Body { unsigned char kind; double mass; float at[3], v[3]; };
struct Settings { float seconds; unsigned char kind; };
__global__ void step(Body* bodies, const struct Settings* settings, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || bodies[i].kind != settings->kind) return;
    for (int k = 0; k < 3; ++k) bodies[i].at[k] += settings->seconds * bodies[i].v[k];
}
}
""",
    host=step_on_host,
    options=["-fmad=false"],
)


@program
async def array_of_structures(device: Device, stream: Stream) -> None:
    bodies = np.zeros(1000, BODY)
    bodies["kind"] = numbers(1000, np.uint8, 3)
    bodies["mass"] = 7
    bodies["at"], bodies["v"] = np.random.default_rng(2).random((2, 1000, 3), np.float32)
    settings = np.array((0.25, 1), np.dtype([("seconds", np.float32), ("kind", np.uint8)], align=True))
    buffer = await stream.upload(bodies)
    stream.launch(STRUCTURES, buffer, await stream.upload(settings), 1000, n=1000)
    bodies["at"] += np.float32(0.25) * bodies["v"] * (bodies["kind"] == 1)[:, None]
    found = await stream.download(buffer)
    for name in BODY.names or ():
        assert np.array_equal(found[name], bodies[name]), name


# 8


@program
async def cubin(device: Device, stream: Stream) -> None:
    code: Any = "/nowhere/axpy.cubin"  # only a GPU reads it
    if device.driver.wants_image:
        compiled = compile_cuda(AXPY.source, "sm_{}{}".format(*device.properties.compute_capability))
        code = compiled.image
        assert compiled.symbol == "_Z4axpyfPKfPfi"
    kernel = Kernel.from_object_code(code, "_Z4axpyfPKfPfi", "float a, const float* x, float* y, int n", axpy_on_host)
    x, y = np.random.default_rng(8).random((2, 5000), np.float32)
    dx, dy = await stream.upload(x), await stream.upload(y)
    stream.launch(kernel, -2.5, dx, dy, x.size, n=x.size)
    assert np.array_equal(await stream.download(dy), y - np.float32(2.5) * x)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", PROGRAMS)
async def test_program_computes_what_numpy_computes(device: Device, stream: Stream, name: str) -> None:
    await quickly(PROGRAMS[name](device, stream))


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [AXPY, STENCIL, SCAN_BLOCKS, SCAN_SUMS, ADD_SUMS, HISTOGRAM, REDUCTION, *INSTANCES, STRUCTURES],
    ids=lambda kernel: kernel.name,
)
def test_kernel_of_a_program_compiles(kernel: Kernel) -> None:
    report = kernel.compile()
    assert "warning" not in report.log
    assert report.registers <= 64


@needs_nvrtc
@pytest.mark.slow
def test_dtypes_have_the_sizes_of_the_structures() -> None:
    settings = np.dtype([("seconds", np.float32), ("kind", np.uint8)], align=True)
    assert compile_cuda(STRUCTURES.source, "sm_90").sizes == (BODY.itemsize, settings.itemsize)
