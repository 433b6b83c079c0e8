"""Kernels of code that was compiled elsewhere: cubin, PTX, fatbin and LTO-IR."""

from __future__ import annotations

import os
import pickle
import random
import struct
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import Device, Kernel, Stream
from aiocuda.driver.cuda._compiled import link
from aiocuda.driver.cuda._compiler import compile_cuda
from aiocuda.driver.protocol import CudaSource
from aiocuda.errors import CompileError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from aiocuda.kernels._object_code import kind_of
from tests.driver.cuda.test_compiler import needs_nvrtc
from tests.helpers import quickly
from tests.kernels.test_kernel import CountingDriver, as_driver

SOURCE = """
extern "C" __global__ void twice(float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}
"""
PARAMETERS = "float* x, int n"
#: Of SOURCE, for any GPU since 7.5.
PTX = b"""//
// made by hand
.version 7.0
.target sm_75
.address_size 64
.visible .entry twice(.param .u64 x, .param .u32 n)
{
    .reg .pred %p<2>; .reg .f32 %f<3>; .reg .b32 %r<6>; .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.s32 %p1, %r5, %r1;
    @%p1 ret;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.s32 %rd3, %r5, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    add.f32 %f2, %f1, %f1;
    st.global.f32 [%rd4], %f2;
    ret;
}
"""
FATBIN = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + bytes(8)
LTO_IR = b"\xed\x43\x4e\x7f" + bytes(60)


def twice_on_host(x: Any, n: int) -> None:
    x[:n] *= 2


def twice(code: Any) -> Kernel:
    return Kernel.from_object_code(code, "twice", PARAMETERS, twice_on_host)


def cubin(arch: str = "sm_90") -> bytes:
    return compile_cuda(CudaSource("twice", SOURCE), arch).image


async def is_twice(stream: Stream, kernel: Kernel) -> bool:
    x = np.arange(1000, dtype=np.float32)
    buffer = await stream.upload(x)
    stream.launch(kernel, buffer, x.size, n=x.size)
    return np.array_equal(await quickly(stream.download(buffer)), 2 * x)


@pytest.mark.parametrize("kind", ["bytes", "str", "path"])
def test_a_gpu_loads_the_code_as_it_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twice.ptx").write_bytes(PTX)
    monkeypatch.chdir(tmp_path)
    kernel = twice({"bytes": PTX, "str": "twice.ptx", "path": Path("twice.ptx")}[kind])
    monkeypatch.chdir("/")
    assert repr(kernel) == "<Kernel twice(float* x, int n)>"
    assert [kernel.writes(index) for index in range(2)] == [True, False]
    driver = CountingDriver()
    kernel.load(as_driver(driver), 0)
    (program,) = driver.programs
    assert (program.image, program.symbol, program.format, program.loaded) == (PTX, "twice", "Pi", None)
    assert driver.compiled == []
    assert kernel.origin(as_driver(driver), 0) == "code"
    with pytest.raises(UnsupportedError, match="has no source: it was compiled elsewhere"):
        _ = kernel.source
    with pytest.raises(InvalidTypeError, match="cannot be pickled"):
        pickle.dumps(kernel)


@pytest.mark.asyncio
async def test_a_device_without_a_gpu_runs_the_host_implementation_without_the_file(stream: Stream) -> None:
    kernel = twice("/nowhere/twice.cubin")
    if stream.device.driver.wants_image:
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            await stream.device.load(kernel)
    else:
        assert await is_twice(stream, kernel)


def test_a_file_is_read_when_a_gpu_loads_it(tmp_path: Path) -> None:
    kernel, driver = twice(tmp_path / "code"), as_driver(CountingDriver())
    with pytest.raises(InvalidArgumentError, match=r"the code of kernel 'twice' cannot be read: .*No such file"):
        kernel.load(driver, 0)
    (tmp_path / "code").write_bytes(FATBIN[:-1])
    with pytest.raises(CompileError, match="the fatbin of kernel 'twice' is truncated"):
        kernel.load(driver, 0)
    (tmp_path / "code").write_bytes(FATBIN)
    kernel.load(driver, 0)
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        twice(tmp_path / "a\0b").load(driver, 0)


@needs_nvrtc
def test_every_truncated_cubin_is_refused() -> None:
    """CUDA is given no size, and would read beyond the end."""
    code = cubin()
    twice(code)
    for size in range(len(code)):
        with pytest.raises(CompileError, match=r"truncated|is no cubin"):
            twice(code[:size])


@needs_nvrtc
def test_a_spoiled_cubin_is_refused_or_is_whole() -> None:
    """No spoiled header lets the check itself fail, or take long."""
    code, chosen = cubin(), random.Random(7)
    for _ in range(2000):
        spoiled = bytearray(code)
        for _ in range(4):
            spoiled[chosen.randrange(64)] = chosen.randrange(256)
        try:
            twice(bytes(spoiled))
        except CompileError as error:
            assert error.log == ""  # noqa: PT017


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b"\x7fELF",
        b"not an image\0",
        b"\x7fELF" + bytes(200),
        FATBIN[:10],
        FATBIN[:-1],
        SOURCE.encode(),
        random.Random(1).randbytes(4000),
        Path(sys.executable).resolve().read_bytes(),
        b"BC\xc0\xde" + bytes(100),
    ],
    ids=range(10),
)
def test_foreign_code_is_refused(code: bytes) -> None:
    with pytest.raises(CompileError, match=r"the (code|cubin|fatbin) of kernel 'twice'") as caught:
        twice(code)
    assert caught.value.log == ""


def test_kinds_of_code() -> None:
    assert [kind_of(code) for code in (FATBIN, LTO_IR, PTX, b"\n\t.version 8.0\n")] == [
        "fatbin",
        "LTO-IR",
        "PTX",
        "PTX",
    ]
    assert kind_of(b"// .version 8.0\n") == ""


REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "text": (
        (PTX.decode(), "twice", PARAMETERS),
        InvalidTypeError,
        "code is bytes or a path, not str; PTX as text: ptx",
    ),
    "array": ((bytearray(PTX), "twice", PARAMETERS), InvalidTypeError, "code is bytes or a path, not bytearray"),
    "None": ((None, "twice", PARAMETERS), InvalidTypeError, "not NoneType"),
    "name None": ((PTX, None, PARAMETERS), InvalidTypeError, "a kernel's name is a str"),
    "name of C++": ((PTX, "a::twice<float>", PARAMETERS), InvalidArgumentError, "is mangled, '_Z4axpyPKfPfi'"),
    "name with NUL": ((PTX, "twice\0", PARAMETERS), InvalidArgumentError, "is no name in compiled code"),
    "no name": ((PTX, "", PARAMETERS), InvalidArgumentError, "is no name in compiled code"),
    "no parameters": ((PTX, "twice", None), InvalidTypeError, "parameters is a str"),
    "more": ((PTX, "twice", "(float* x)"), InvalidArgumentError, "write the parameter list only"),
    "by value": ((PTX, "twice", "Pair p"), UnsupportedError, "parameter 1 of kernel 'twice'"),
    "host": ((PTX, "twice", PARAMETERS, lambda x: None), InvalidTypeError, "the host implementation"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused(case: str) -> None:
    arguments, error, says = REFUSED[case]
    with pytest.raises(error, match=says):
        Kernel.from_object_code(*arguments)


@pytest.mark.parametrize("code", [PTX, PTX.decode(), FATBIN, LTO_IR, b"\x7fELF" + bytes(60)], ids=range(5))
def test_compiled_code_as_source_names_the_way(code: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"compiled already: Kernel\.from_object_code\(code, name, param"):
        Kernel("twice", source=code)


def test_source_may_contain_ptx() -> None:
    source = f'const char* ptx = R"(\n{PTX.decode()})";\n{SOURCE}'
    assert Kernel("twice", source=source).name == "twice"


@pytest.mark.parametrize("missing", ["cuda.core", "cuda.pathfinder"])
def test_without_the_linker_the_error_has_the_command(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    kernel = twice(LTO_IR)
    with pytest.raises(UnsupportedError, match="pip install cuda-core nvidia-nvjitlink"):
        kernel.load(as_driver(CountingDriver()), 0)


@pytest.mark.slow
def test_lto_ir_that_cannot_be_linked() -> None:
    """It is no LTO-IR but for its first bytes; or nvJitLink is not installed."""
    with pytest.raises(
        (CompileError, UnsupportedError), match=r"linked for sm_90: |pip install cuda-core nvidia-nvjit"
    ):
        link(LTO_IR, "twice", "sm_90")


# On a GPU


@pytest_asyncio.fixture
async def gpu() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="cuda") as device:
        yield device


def arch_of(device: Device) -> str:
    return "sm_{}{}".format(*device.properties.compute_capability)


CODES: dict[str, Callable[[Device], bytes]] = {
    "cubin": lambda device: cubin(arch_of(device)),
    "PTX": lambda device: PTX,
    "PTX with NUL": lambda device: PTX + b"\0",
}


@pytest.mark.gpu
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", CODES)
async def test_code_runs_on_a_gpu(gpu: Device, kind: str, tmp_path: Path) -> None:
    code = CODES[kind](gpu)
    (tmp_path / "code").write_bytes(code)
    async with gpu.stream() as stream:
        for given in (code, tmp_path / "code", os.fspath(tmp_path / "code")):
            assert await is_twice(stream, twice(given))


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_lto_ir_is_linked_for_a_gpu(gpu: Device) -> None:
    from cuda import core

    options = core.ProgramOptions(arch=arch_of(gpu), link_time_optimization=True)
    code = bytes(core.Program(SOURCE, "c++", options).compile("ltoir").code)
    async with gpu.stream() as stream:
        try:
            assert await is_twice(stream, twice(code))
        except UnsupportedError as error:  # nvJitLink is not installed
            assert "pip install cuda-core nvidia-nvjitlink" in str(error)  # noqa: PT017


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_code_that_a_gpu_refuses_is_a_compile_error(gpu: Device) -> None:
    """Row 51. The device goes on."""
    refused = {
        "of another architecture": cubin("sm_80" if gpu.properties.compute_capability[0] > 8 else "sm_90"),
        "truncated PTX": PTX[: len(PTX) // 2],
        "wrong PTX": PTX.replace(b"mad.lo.s32", b"mud.lo.s32"),
        "newer PTX": PTX.replace(b".version 7.0", b".version 99.0"),
    }
    async with gpu.stream() as stream:
        x = stream.zeros(4)
        for name, code in refused.items():
            with pytest.raises(CompileError):
                await stream.launch(twice(code), x, 4, n=4)
                pytest.fail(f"{name} was taken")
        with pytest.raises(CompileError, match="has no symbol 'thrice'"):
            await stream.launch(Kernel.from_object_code(PTX, "thrice", PARAMETERS), x, 4, n=4)
        with pytest.raises(InvalidTypeError, match="kernel 'twice'"):
            await stream.launch(Kernel.from_object_code(PTX, "twice", "float* x"), x, n=4)
        assert await is_twice(stream, twice(PTX))
