"""NVRTC in a process of its own: what compiles, what is refused, and what is kept for the next time. Needs no GPU."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiocuda import Kernel
from aiocuda._base._extras import install
from aiocuda.driver.cuda import _compiler
from aiocuda.driver.cuda._compiler import LOG_BYTES, compile_cuda
from aiocuda.driver.protocol import CudaSource
from aiocuda.errors import (
    CompileError,
    CompilerNotFoundError,
    InvalidArgumentError,
    UnsupportedError,
)


def _nvrtc_is_there() -> bool:
    with contextlib.suppress(ImportError, RuntimeError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return bool(load_nvidia_dynamic_lib("nvrtc"))
    return False


needs_nvrtc = pytest.mark.skipif(not _nvrtc_is_there(), reason=f"NVRTC is not installed: {install('nvrtc')}")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the limits of the compiler's process are Linux's")

SAXPY = "__global__ void saxpy(float a, const float* x, float* y, int n) { y[threadIdx.x] += a * x[threadIdx.x]; }"
#: Two to the power of thirty classes.
BOMB = """
template <int N, int M> struct Bomb { static const int v = Bomb<N - 1, 2 * M>::v | Bomb<N - 1, 2 * M + 1>::v; };
template <int M> struct Bomb<0, M> { static const int v = M; };
__global__ void saxpy(int* x) { *x = Bomb<30, 0>::v; }
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("AIOCUDA_CACHE_DIR", os.fspath(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_compiler() -> Iterator[Callable[[], None]]:
    """From its call on nothing can be compiled: what still comes, comes from the cache."""
    before = multiprocessing.spawn.get_executable()
    yield lambda: multiprocessing.set_executable("/nowhere/python")
    multiprocessing.set_executable(before)


def build(text: str = SAXPY, name: str = "saxpy", arch: str = "sm_90", **settings: Any) -> tuple[bytes, str]:
    image, symbol, *_ = compile_cuda(CudaSource(name, text, **settings), arch)
    return image, symbol


def compilers(process: int | None = None) -> list[Path]:
    """The compilations that a process runs, as places in /proc."""
    place = Path(f"/proc/{process or os.getpid()}/task")
    children: set[Path] = set()
    for task in os.listdir(place):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or a child that has just ended
            mine = [Path("/proc", child) for child in (place / task / "children").read_text().split()]
            children.update(child for child in mine if b"nvrtc.py" in (child / "cmdline").read_bytes())
    return list(children)


def until(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen within 60 s")


# What compiles


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "name", "symbol"),
    [
        (SAXPY, "saxpy", "_Z5saxpyfPKfPfi"),
        (f'extern "C" {SAXPY}', "saxpy", "saxpy"),
        (f"namespace a {{ namespace b {{ {SAXPY} }} }}", "a::b::saxpy", "_ZN1a1b5saxpyEfPKfPfi"),
        (f"__global__ void other(); static {SAXPY}", "saxpy", "_Z5saxpyfPKfPfi"),
    ],
)
def test_a_cubin_holds_the_kernel_under_its_mangled_name(text: str, name: str, symbol: str) -> None:
    image, mangled = build(text, name)
    assert mangled == symbol
    assert image.startswith(b"\x7fELF")
    assert struct.unpack_from("<H", image, 18) == (190,)  # EM_CUDA
    assert b"\0.text." + symbol.encode() + b"\0" in image  # machine code, not PTX


@needs_nvrtc
def test_a_kernel_in_an_unnamed_namespace_has_a_symbol_too() -> None:
    image, mangled = build(f"namespace {{ {SAXPY} }}")
    assert b"\0" + mangled.encode() + b"\0" in image


@needs_nvrtc
@pytest.mark.slow
def test_each_architecture_gets_its_own_code() -> None:
    images = {arch: build(arch=arch)[0] for arch in ("sm_80", "sm_90", "sm_90a", "sm_120")}
    assert len(set(images.values())) == len(images)


@needs_nvrtc
def test_text_beyond_ascii_is_text() -> None:
    assert build("// μs, 時間\n" + SAXPY)[1] == "_Z5saxpyfPKfPfi"


@needs_nvrtc
@pytest.mark.parametrize("header", ["<stdint.h>", "<cstdint>", '"stdint.h"'])
def test_integers_by_size_need_no_system_headers(header: str) -> None:
    text = f"#include {header}\n__global__ void f(uint8_t* a, int16_t* b, uint32_t* c, int64_t d, uintptr_t e) {{ }}"
    assert build(text, "f")[1] == "_Z1fPhPsPjxy"


@needs_nvrtc
def test_headers_are_found_in_the_sources_directories(tmp_path: Path) -> None:
    (tmp_path / "a b" / "inner").mkdir(parents=True)
    (tmp_path / "a b" / "outer.h").write_text('#include "inner/inner.h"\n')
    (tmp_path / "a b" / "inner" / "inner.h").write_text('#include "sibling.h"\n')
    (tmp_path / "a b" / "inner" / "sibling.h").write_text(SAXPY)
    _, symbol = build('#include "outer.h"\n', include_dirs=(os.fspath(tmp_path / "a b"),))
    assert symbol == "_Z5saxpyfPKfPfi"


@needs_nvrtc
@pytest.mark.parametrize("name", ["-I", "--include-path=x -include y.h", "@file"])
def test_no_include_directory_is_an_option(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "own.cuh").write_text("#define OWN 1\n")
    monkeypatch.chdir(tmp_path)
    kernel = Kernel("saxpy", source=f'#include "own.cuh"\n#if OWN\n{SAXPY}\n#endif', include_dirs=[name])
    image, *_ = compile_cuda(kernel.source, "sm_90")
    assert image.startswith(b"\x7fELF")


TEMPLATE = """
namespace a { template <typename T, int N> __global__ void scale(T* x) { x[threadIdx.x] *= N; } }
"""


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("scale<float, 4>", "_ZN1a5scaleIfLi4EEEvPT_"),
        ("scale<double, (1 + 2) * 2>", "_ZN1a5scaleIdLi6EEEvPT_"),
    ],
)
def test_an_instance_of_a_template_is_compiled(name: str, symbol: str) -> None:
    kernel = Kernel(name, source=TEMPLATE, parameters="void* x")
    assert compile_cuda(kernel.source, "sm_90").symbol == symbol


STRUCTURES = """
struct Pair { float x; int n; };
namespace a { namespace { struct Odd { char c[5]; }; }
namespace b { struct Pair { double x; char c; };
template <typename T> __global__ void f(T* x, Pair* p, const Odd* o, ::Pair* q, const Pair* r) { } } }
__global__ void g(Pair* p) { }
#if 1 // the last line ends without an end"""


@needs_nvrtc
def test_sizes_of_structures_are_those_that_the_kernel_sees(no_compiler: Callable[[], None]) -> None:
    text = STRUCTURES.replace("#if 1 ", "")
    kernels = [
        Kernel("f<int>", source=text, parameters="int* x, Pair* p, const struct Odd* o, ::Pair* q, const Pair* r"),
        Kernel("g", source=text),
    ]
    assert kernels[0].source.structures == ("Pair", "Odd", "::Pair")
    made = [compile_cuda(kernel.source, "sm_90") for kernel in kernels]
    assert [each.sizes for each in made] == [(16, 5, 8), (8,)]
    no_compiler()
    assert [compile_cuda(kernel.source, "sm_90") for kernel in kernels] == [
        each._replace(from_cache=True) for each in made
    ]


@needs_nvrtc
@pytest.mark.parametrize("text", ["", "struct Pair;", "namespace a { struct Pair { int n; }; }"])
def test_a_structure_without_a_size_is_a_compile_error(text: str) -> None:
    kernel = Kernel("g", source=f"{text}\n__global__ void g(Pair* p) {{ }}")
    with pytest.raises(CompileError, match="Pair"):
        compile_cuda(kernel.source, "sm_90")


@needs_nvrtc
@pytest.mark.parametrize("name", ["scale<int>", "scale<nobody, 4>", "scale<4, float>", "scale<, >"])
def test_wrong_arguments_of_a_template_are_a_compile_error(name: str) -> None:
    with pytest.raises(CompileError, match=r"does not compile for sm_90") as caught:
        compile_cuda(Kernel(name, source=TEMPLATE, parameters="void* x").source, "sm_90")
    assert caught.value.log


#: Each option, and source that compiles only with it; None if nothing of the option is seen in the source.
OPTIONS: dict[str, str | None] = {
    "-DTEN=10": "TEN == 10",
    "-DTEN": "TEN == 1",
    "--define-macro=TEN=(5 + 5)": "TEN == 10",
    "-U__NVCC_DIAG_PRAGMA_SUPPORT__": "!defined(__NVCC_DIAG_PRAGMA_SUPPORT__)",
    "--undefine-macro=__NVCC_DIAG_PRAGMA_SUPPORT__": "!defined(__NVCC_DIAG_PRAGMA_SUPPORT__)",
    "-use_fast_math": "__CUDA_FTZ == 1 && __CUDA_PREC_DIV == 0",
    "-ftz=true": "__CUDA_FTZ == 1",
    "-prec-div=false": "__CUDA_PREC_DIV == 0",
    "--prec-sqrt=false": "__CUDA_PREC_SQRT == 0",
    "-fmad=false": None,
    "-std=c++20": "__cplusplus == 202002",
    "--std=c++14": "__cplusplus == 201402",
    "-maxrregcount=32": None,
    "-lineinfo": None,
    "--diag-suppress=177,178": None,
    "-diag-warn=177": None,
}


@needs_nvrtc
@pytest.mark.parametrize("option", OPTIONS)
def test_options_reach_the_compiler(option: str) -> None:
    condition = OPTIONS[option] or "1"
    source = f"#if {condition}\n{SAXPY}\n#else\n#error without the option\n#endif"
    kernel = Kernel("saxpy", source=source, options=[option])
    if OPTIONS[option] is not None:
        with pytest.raises(CompileError, match="without the option"):
            compile_cuda(Kernel("saxpy", source=source).source, "sm_90")
    made = compile_cuda(kernel.source, "sm_90")
    assert compile_cuda(kernel.source, "sm_90") == made._replace(from_cache=True)


@needs_nvrtc
def test_a_definition_is_no_further_option(tmp_path: Path) -> None:
    (tmp_path / "own.cuh").write_text("")
    kernel = Kernel("saxpy", source=f'#include "own.cuh"\n{SAXPY}', options=[f"-DX=1 -I{tmp_path}"])
    with pytest.raises(CompileError, match=r"own\.cuh"):
        compile_cuda(kernel.source, "sm_90")


@needs_nvrtc
def test_an_option_that_nvrtc_refuses_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"sm_90 with -std=c\+\+99"):
        build(options=("-std=c++99",))


@needs_nvrtc
def test_nothing_is_found_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.h").write_text(SAXPY)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"here\.h"):
        build('#include "here.h"\n')


@needs_nvrtc
def test_cudas_own_headers_come_through_pathfinder() -> None:
    from cuda.pathfinder import find_nvidia_header_directory

    text = "#include <cuda_fp16.h>\n__global__ void f(__half a, __half* x) { *x = __hadd(a, *x); }"
    if find_nvidia_header_directory("cudart") is None:
        with pytest.raises(CompileError, match=r"cuda_fp16\.h"):
            build(text, "f")
    else:
        assert build(text, "f")[1] == "_Z1f6__halfPS_"


# What does not


@needs_nvrtc
def test_an_error_carries_the_compilers_words() -> None:
    with pytest.raises(
        CompileError, match=r"kernel 'saxpy' does not compile for sm_90(.|\n)*identifier \"oops\""
    ) as caught:
        build("__global__ void saxpy(float* x) {\n  *x = oops;\n}")
    assert 'kernel.cu(2): error: identifier "oops" is undefined' in caught.value.log


@needs_nvrtc
def test_an_error_directive() -> None:
    with pytest.raises(CompileError, match="#error directive: not today"):
        build(f"#error not today\n{SAXPY}")


@needs_nvrtc
def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(CompileError, match='identifier "other" is undefined'):
        build(name="other")


@needs_nvrtc
def test_a_log_is_cut_at_its_limit() -> None:
    line = "int x = " + "+".join(["é"] * 1000) + ";\n"
    with pytest.raises(CompileError) as caught:
        build(line * 200 + SAXPY)
    assert LOG_BYTES - 8 < len(caught.value.log.encode()) <= LOG_BYTES
    assert caught.value.log.endswith("… cut here")
    assert len(str(caught.value)) < 3000


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_support() -> None:
    with pytest.raises(UnsupportedError, match="does not compile for sm_35"):
        build(arch="sm_35")


@pytest.mark.parametrize("arch", ["", "90", "sm90", "compute_90", "sm_9", "sm_90 ", "sm_90x", "sm_90\n", "--help"])
def test_what_is_no_architecture(arch: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is no architecture"):
        build(arch=arch)


@needs_nvrtc
def test_an_include_directory_that_does_not_exist() -> None:
    with pytest.raises(InvalidArgumentError, match="'/nowhere' does not exist"):
        build(include_dirs=("/nowhere",))


# Without includes


@needs_nvrtc
def test_without_includes_the_rest_still_compiles() -> None:
    assert build(includes=False)[1] == "_Z5saxpyfPKfPfi"


@needs_nvrtc
@linux_only
@pytest.mark.parametrize(
    "line",
    [
        '#include "{}"',
        '%:include "{}"',
        '#incl\\\nude "{}"',
        '#define FILE "{}"\n#include FILE',
        '#include_next "{}"',
        '#embed "{}"',
        '#line 1 "{}"\n#error',
        'import "{}";',
    ],
)
def test_no_file_is_opened_where_includes_are_refused(line: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the answer is forty-two\n")
    with pytest.raises(CompileError, match="includes=False, so it can open no file") as caught:
        build(line.format(secret) + "\n" + SAXPY, includes=False, include_dirs=(os.fspath(tmp_path),))
    assert "forty" not in str(caught.value) + caught.value.log


@needs_nvrtc
@linux_only
@pytest.mark.parametrize("question", ["__has_include", "PASTED"])
def test_nor_can_it_be_asked_what_files_there_are(question: str) -> None:
    text = f'#define PASTED __has_ ## include\n#if {question}("{__file__}")\n#error it is there\n#endif\n{SAXPY}'
    try:
        build(text, includes=False)
    except CompileError as error:
        assert "it is there" not in error.log  # noqa: PT017 - either it does not compile or the file is not seen


# Limits


@needs_nvrtc
@linux_only
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_compilation_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(CompileError, match=r"did not compile within 0\.3 s") as caught:
        compile_cuda(CudaSource("saxpy", BOMB), "sm_90", timeout=0.3)
    assert caught.value.log == ""
    assert compilers() == []


@needs_nvrtc
@linux_only
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_compilation_that_takes_too_much_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiler, "_MEMORY_BYTES", 600 << 20)
    with pytest.raises(CompileError):
        build(BOMB)
    assert build()[1] == "_Z5saxpyfPKfPfi"  # what does not explode fits


@needs_nvrtc
@linux_only
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_compiler_that_dies_is_a_compile_error() -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            build(BOMB)
        except CompileError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    until(compilers)
    os.kill(int(compilers()[0].name), signal.SIGKILL)
    thread.join()
    assert "the compiler of kernel 'saxpy' was ended by SIGKILL" in str(caught[0])


PARENT = """
import sys
from aiocuda.driver.cuda._compiler import compile_cuda
from aiocuda.driver.protocol import CudaSource
compile_cuda(CudaSource("saxpy", sys.stdin.read()), "sm_90")
"""


@needs_nvrtc
@linux_only
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_no_compilation_outlives_its_program() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        parent.stdin.write(BOMB.encode())
        parent.stdin.close()
        until(lambda: compilers(parent.pid))
        (child,) = compilers(parent.pid)
        until(lambda: b"nvrtc" in (child / "maps").read_bytes())  # it has come to its compiler
        parent.kill()
        parent.wait()
        # Whoever adopted it may not have waited for it yet: then it is a zombie.
        until(lambda: not child.exists() or (child / "stat").read_text().rpartition(")")[2].split()[0] == "Z")


# Without a compiler


def test_without_cuda_python_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(CompilerNotFoundError, match=re.escape(install("nvrtc"))):
        build()


def test_without_nvrtc_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")

    def absent(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(f"{name} is not installed")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", absent)
    with pytest.raises(CompilerNotFoundError, match=re.escape(install("nvrtc"))):
        build()


@needs_nvrtc
def test_a_python_that_cannot_be_started(no_compiler: Callable[[], None]) -> None:
    no_compiler()
    with pytest.raises(CompilerNotFoundError, match=r"/nowhere/python cannot be started.*set_executable"):
        build()


@needs_nvrtc
def test_a_program_that_is_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(CompilerNotFoundError, match="this program is no Python executable"):
        build()


# The cache


@needs_nvrtc
def test_what_was_compiled_is_kept(directory: Path, no_compiler: Callable[[], None]) -> None:
    made = build()
    (entry,) = directory.iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600
    no_compiler()
    assert build() == made


@needs_nvrtc
@pytest.mark.parametrize(
    "change",
    [
        {"text": SAXPY + " "},
        {"text": f'extern "C" {SAXPY}'},
        {"arch": "sm_80"},
        {"includes": False},
        {"options": ("-ftz=true",)},
    ],
)
def test_whatever_changes_the_code_changes_the_key(change: dict[str, Any], no_compiler: Callable[[], None]) -> None:
    build()
    no_compiler()
    with pytest.raises(CompilerNotFoundError):
        build(**change)


@needs_nvrtc
def test_the_kernels_of_one_source_are_kept_apart(no_compiler: Callable[[], None]) -> None:
    text = f"{SAXPY} __global__ void other() {{ }}"
    made = build(text), build(text, "other")
    no_compiler()
    assert (build(text), build(text, "other")) == made
    assert made[0] != made[1]


@needs_nvrtc
def test_cudas_own_headers_do_not_keep_a_kernel_out(no_compiler: Callable[[], None]) -> None:
    made = build("#include <cstdint>\n" + SAXPY)
    no_compiler()
    assert build("#include <cstdint>\n" + SAXPY) == made


@needs_nvrtc
@pytest.mark.slow
def test_a_header_that_may_change_does(tmp_path: Path, directory: Path) -> None:
    header = tmp_path / "types.h"
    texts: list[tuple[str, dict[str, Any]]] = [
        ('#include "types.h"\n__global__ void f(real* x) { }', {"include_dirs": (os.fspath(tmp_path),)}),
        (f'#include "{header}"\n__global__ void f(real* x) {{ }}', {}),
        (f'#define TYPES "{header}"\n#include TYPES\n__global__ void f(real* x) {{ }}', {}),
    ]
    for text, settings in texts:
        for real, symbol in (("float", "_Z1fPf"), ("double", "_Z1fPd")):
            header.write_text(f"typedef {real} real;\n")
            assert build(text, "f", **settings)[1] == symbol
    assert not directory.exists()


@needs_nvrtc
def test_a_failure_is_not_kept(directory: Path) -> None:
    with pytest.raises(CompileError):
        build("#error\n" + SAXPY)
    assert not directory.exists()


@needs_nvrtc
def test_a_spoilt_entry_is_compiled_again(directory: Path) -> None:
    made = build()
    (entry,) = directory.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    with pytest.warns(RuntimeWarning, match="is ignored, and compiled again"):
        assert build() == made
    assert build() == made


@needs_nvrtc
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a place where not even root can write")
def test_a_read_only_home_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_CACHE_DIR", "/proc/self/aiocuda")
    assert build() == build()


def test_the_compiler_process_runs_without_nvrtc() -> None:
    request = {"library": "/nowhere/libnvrtc.so", "memory": 1 << 33}
    done = _compiler._run(json.dumps(request).encode() + b"\n", 30)
    assert done.returncode == 1
    assert b"OSError: /nowhere/libnvrtc.so" in done.stderr  # the script was found, and tried to load the library
