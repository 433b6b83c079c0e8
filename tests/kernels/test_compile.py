"""A kernel is compiled without a GPU, for tests and builds."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from aiocuda import Kernel
from aiocuda.errors import (
    BusyError,
    CompileError,
    CompilerNotFoundError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedError,
)
from aiocuda.kernels import Compilation
from tests.driver.cuda.test_compiler import needs_nvrtc

SOURCE = """
#include <cstdint>
struct Pair { float x; int32_t n; };
namespace a {
__global__ void small(float* x) { *x = 1; }
__global__ void large(float* x, Pair* pairs)
{
    __shared__ float part[100];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = part[99 - threadIdx.x] * pairs[threadIdx.x].x;
}
template <typename T, int N> __global__ void sized(T* x)
{
    __shared__ T part[N];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = part[N - 1 - threadIdx.x];
}
}
"""


@needs_nvrtc
def test_report_is_that_of_the_kernel() -> None:
    small, large = (Kernel(name, source=SOURCE).compile(arch="sm_90") for name in ("small", "large"))
    assert isinstance(small, Compilation)
    assert (small.shared_bytes, large.shared_bytes) == (0, 400)
    assert 0 < small.registers < large.registers < 64
    assert f"Used {large.registers} registers" in large.log
    assert "aiocuda" not in large.log  # only functions of the program are in it
    assert "\0" not in large.log


@needs_nvrtc
def test_report_of_an_instance_and_of_options() -> None:
    for count in (32, 64):
        sized = Kernel(f"sized<double, {count}>", source=SOURCE, parameters="double* x", options=["-lineinfo"])
        assert sized.compile("sm_80").shared_bytes == 8 * count
        assert "for 'sm_80'" in sized.compile("sm_80").log


@needs_nvrtc
def test_warnings_are_in_the_log() -> None:
    source = "__global__ void f() { int unused; }"
    assert '"unused" was declared but never referenced' in Kernel("f", source=source).compile().log
    assert "unused" not in Kernel("f", source=source, options=["-diag-suppress=177"]).compile().log


@needs_nvrtc
def test_headers_of_the_kernel_are_found(tmp_path: Path) -> None:
    (tmp_path / "own.cuh").write_text("#define SIZE 7\n")
    source = '#include "own.cuh"\n__global__ void f(int* x) { __shared__ volatile int s[SIZE]; *x = s[threadIdx.x]; }'
    assert Kernel("f", source=source, include_dirs=[tmp_path]).compile().shared_bytes == 28


@needs_nvrtc
@pytest.mark.parametrize(
    ("header", "cure"),
    [
        *((name, rf"leave {name} out") for name in ("math.h", "cmath", "stdio.h", "cstdio", "assert.h", "float.h")),
        ("curand_kernel.h", r"name the directory of curand_kernel.h: Kernel\(…, include_dirs=\[path\]\)"),
    ],
)
def test_missing_header_has_its_cure(header: str, cure: str) -> None:
    with pytest.raises(CompileError, match=cure):
        Kernel("f", source=f"#include <{header}>\n__global__ void f() {{ }}").compile()


@needs_nvrtc
def test_what_host_headers_declare_is_built_in() -> None:
    source = """#include <cuda/std/limits>
    __global__ void f(float* x) { assert(x); x[0] = sqrtf(cuda::std::numeric_limits<float>::max()); printf("%f", *x); }
    """
    assert Kernel("f", source=source).compile().registers


@pytest.mark.parametrize("arch", [90, (9, 0), None])
def test_architecture_is_a_string(arch: object) -> None:
    unchecked: Any = arch
    with pytest.raises(InvalidTypeError, match="is no architecture: it is a str such as 'sm_90'"):
        Kernel("f", source="__global__ void f() { }").compile(unchecked)


@needs_nvrtc
def test_errors_are_those_of_a_launch() -> None:
    with pytest.raises(CompileError, match="no_such_name") as caught:
        Kernel("f", source="__global__ void f() { no_such_name(); }").compile()
    assert "no_such_name" in caught.value.log
    with pytest.raises(UnsupportedError, match=r"does not compile for sm_35: .*The lowest of CUDA 13 is sm_75"):
        Kernel("f", source="__global__ void f() { }").compile("sm_35")
    with pytest.raises(InvalidArgumentError, match="is no architecture"):
        Kernel("f", source="__global__ void f() { }").compile("90")


def test_compiled_code_has_no_source_to_compile() -> None:
    with pytest.raises(UnsupportedError, match="has no source: it was compiled elsewhere"):
        Kernel.from_object_code("k.cubin", "k", "").compile()


@needs_nvrtc
def test_nothing_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_CACHE_DIR", os.fspath(tmp_path))
    kernel = Kernel("small", source=SOURCE)
    kernel.compile()
    assert list(tmp_path.iterdir()) == []
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable("/nowhere/python")
    try:
        with pytest.raises(CompilerNotFoundError):
            kernel.compile()
    finally:
        multiprocessing.set_executable(before)


@pytest.mark.asyncio
async def test_event_loop_is_not_blocked() -> None:
    kernel = Kernel("f", source="__global__ void f() { }")
    with pytest.raises(BusyError, match=r"blocks the event loop: `await device\.load\(kernel\)`"):
        kernel.compile()


@needs_nvrtc
@pytest.mark.asyncio
async def test_thread_beside_the_event_loop_may_compile() -> None:
    assert (await asyncio.to_thread(Kernel("f", source="__global__ void f() { }").compile)).shared_bytes == 0
