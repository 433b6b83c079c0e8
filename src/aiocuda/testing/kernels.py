"""The kernels that tests launch, as CUDA C++ and as host implementations, so that a test runs on every driver."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from .._base._types import Dim3

__all__ = [
    "AFFINE",
    "EXTENT",
    "HOLD",
    "HOLDING",
    "RAN_OUT",
    "RELEASED",
    "SAXPY",
    "SCALARS",
    "SPIN",
    "STAMP",
    "TRAP",
    "Sample",
]

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: The states that `HOLD` writes into the first of its two words. If the host writes the second word, the kernel ends.
HOLDING, RELEASED, RAN_OUT = 1, 2, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One kernel in both forms."""

    name: str
    format: str  #: as in `aiocuda.driver.protocol.Program`
    source: str
    host: Callable[..., object]
    host_takes_grid: bool = False


# A hold ends by itself after `nanoseconds`, so that a test that dies leaves no kernel running. The other threads of the
# block wait at the barrier, so that the block keeps all of its resources on the multiprocessor.
_HOLD = """
extern "C" __global__ void hold(unsigned int *shared, unsigned long long nanoseconds)
{
    volatile unsigned int *words = shared;
    if (threadIdx.x == 0) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        now = start;
        words[0] = 1;
        __threadfence_system();
        while (words[1] == 0 && now - start < nanoseconds) {
            __nanosleep(1000);
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        }
        words[0] = words[1] != 0 ? 2 : 3;
        __threadfence_system();
    }
    __syncthreads();
}
"""

_SPIN = """
extern "C" __global__ void spin(unsigned long long nanoseconds)
{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(100);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""

_SAXPY = """
extern "C" __global__ void saxpy(int n, float a, const float *x, float *y)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        y[i] = a * x[i] + y[i];
}
"""

_AFFINE = """
extern "C" __global__ void affine(unsigned int *data, int n, unsigned int factor, unsigned int term)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        data[i] = data[i] * factor + term;
}
"""

_STAMP = """
extern "C" __global__ void stamp(unsigned int *count, unsigned int *order, unsigned int number,
                                 unsigned long long nanoseconds)
{
    if (threadIdx.x == 0) {
        unsigned long long start, now;
        order[atomicAdd(count, 1u)] = number;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do {
            __nanosleep(100);
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (now - start < nanoseconds);
    }
    __syncthreads();
}
"""

_SCALARS = """
extern "C" __global__ void scalars(signed char b, unsigned long long Q, bool flag, short h, double d,
                                   unsigned char B, int i, unsigned short H, float f, unsigned int I,
                                   long long q, double *out)
{
    out[0] = b; out[1] = (double)Q; out[2] = flag; out[3] = h; out[4] = d; out[5] = B;
    out[6] = i; out[7] = H; out[8] = f; out[9] = I; out[10] = (double)q;
}
"""

_EXTENT = """
extern "C" __global__ void extent(unsigned int *out)
{
    out[0] = gridDim.x;  out[1] = gridDim.y;  out[2] = gridDim.z;
    out[3] = blockDim.x; out[4] = blockDim.y; out[5] = blockDim.z;
}
"""

_TRAP = """
extern "C" __global__ void trap() { asm("trap;"); }
"""


# A host implementation that takes time yields the seconds: the host driver sleeps, the simulated driver advances its
# clock.
_Seconds: TypeAlias = "Generator[float, float, None]"


def _hold(words: _Array, nanoseconds: int) -> _Seconds:
    words[0] = HOLDING
    now = yield 1e-9
    deadline = now + nanoseconds / 1e9
    while words[1] == 0 and now < deadline:
        now = yield 0.001  # shorter pauses of eight held kernels on two cores would take the GIL from the test
    words[0] = RELEASED if words[1] else RAN_OUT


def _spin(nanoseconds: int) -> _Seconds:
    yield nanoseconds / 1e9


def _saxpy(n: int, a: float, x: _Array, y: _Array) -> None:
    y[:n] += np.float32(a) * x[:n]


def _affine(data: _Array, n: int, factor: int, term: int) -> None:
    data[:n] *= np.uint32(factor)
    data[:n] += np.uint32(term)


_stamp_lock = threading.Lock()


def _stamp(count: _Array, order: _Array, number: int, nanoseconds: int) -> _Seconds:
    with _stamp_lock:
        order[count[0]] = number
        count[0] += 1
    yield nanoseconds / 1e9


def _scalars(*values: Any) -> None:
    *given, out = values
    out[: len(given)] = given


def _extent(out: _Array, *, grid: Dim3, block: Dim3) -> None:
    out[:6] = (*grid, *block)


def _trap() -> None:
    raise ZeroDivisionError("this kernel faults on purpose")


#: ``hold(words, nanoseconds)``: runs until ``words[1]`` is set; ``words[0]`` is its state.
HOLD = Sample("hold", "PQ", _HOLD, _hold)

#: ``spin(nanoseconds)``: runs for this time.
SPIN = Sample("spin", "Q", _SPIN, _spin)

#: ``saxpy(n, a, x, y)``: ``y += a * x``, in float32.
SAXPY = Sample("saxpy", "ifPP", _SAXPY, _saxpy)

#: ``affine(data, n, factor, term)``: ``data = data * factor + term``, in uint32. Two of them do not commute.
AFFINE = Sample("affine", "PiII", _AFFINE, _affine)

#: ``stamp(count, order, number, nanoseconds)``: each block appends ``number`` to ``order``, then spins.
STAMP = Sample("stamp", "PPIQ", _STAMP, _stamp)

#: ``scalars(…, out)``: one parameter of each type, ordered so that most are preceded by padding.
SCALARS = Sample("scalars", "bQ?hdBiHfIqP", _SCALARS, _scalars)

#: ``extent(out)``: writes its grid and its block.
EXTENT = Sample("extent", "P", _EXTENT, _extent, host_takes_grid=True)

#: ``trap()``: faults. On CUDA that ends CUDA for the whole process.
TRAP = Sample("trap", "", _TRAP, _trap)
