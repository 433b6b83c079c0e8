"""A kernel: what it is made from, and how it becomes a driver's function."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import math
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from aiocuda import Kernel
from aiocuda.driver.protocol import CompiledKernel, CudaSource, Driver, Program
from aiocuda.errors import CompileError, InvalidArgumentError, InvalidTypeError, UnsupportedError

SAXPY = """
namespace blas {
// y += a x
__global__ void saxpy(float a, const float* __restrict__ x, float* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
}
"""


def saxpy_host(a: float, x: Any, y: Any, n: int) -> None:
    y[:n] += a * x[:n]


@dataclasses.dataclass(eq=False)
class CountingDriver:
    """The verbs of a driver that a kernel uses, and how often it used them."""

    wants_image: bool = True
    capabilities: tuple[tuple[int, int], ...] = ((9, 0),)
    failures: list[Exception] = dataclasses.field(default_factory=list)
    compiled: list[tuple[int, CudaSource]] = dataclasses.field(default_factory=list)
    programs: list[Program] = dataclasses.field(default_factory=list)
    gate: threading.Event | None = None
    registry: dict[Any, Any] = dataclasses.field(default_factory=dict)

    now = staticmethod(time.monotonic)

    def device_open(self, device: int) -> Any:
        return dataclasses.make_dataclass("Properties", ["compute_capability"])(self.capabilities[device])

    def compile(self, device: int, source: CudaSource) -> CompiledKernel:
        self.compiled.append((device, source))
        if self.gate is not None:
            self.gate.wait(60)
        if self.failures:
            raise self.failures.pop()
        return CompiledKernel(b"image of %d" % device, f"_Z5{source.name}")

    def load(self, device: int, program: Program) -> int:
        self.programs.append(program)
        return 1000 * (device + 1) + len(self.programs)


def as_driver(driver: CountingDriver) -> Driver:
    return cast("Driver", driver)


def saxpy(**settings: Any) -> Kernel:
    return Kernel("saxpy", source=SAXPY, **settings)


# Made from


def test_a_kernel_shows_its_signature() -> None:
    kernel = saxpy()
    assert repr(kernel) == "<Kernel saxpy(float a, const float* x, float* y, int n)>"
    assert kernel.name == "saxpy"
    assert kernel.signature.format == "fPPi"
    assert [parameter.name for parameter in kernel.signature.parameters] == ["a", "x", "y", "n"]
    assert kernel.signature.parameters[1].dtype == np.float32
    assert kernel.source == CudaSource("blas::saxpy", SAXPY)


def test_pointers_without_const_are_written() -> None:
    assert [saxpy().writes(index) for index in range(4)] == [False, False, True, False]


def test_source_may_be_bytes() -> None:
    assert Kernel("saxpy", source=SAXPY.encode()).source.text == SAXPY


MADE_QUIETLY = """
import os, sys, aiocuda
kernel_class = aiocuda.Kernel
seen = []
sys.addaudithook(lambda event, arguments: seen.append(event))
kernel_class("f", source='#include "x.h"\\n__global__ void f(int n);', include_dirs=["here"], host=lambda n: None)
forbidden = [event for event in seen if event.startswith(("open", "os.", "subprocess.", "import", "ctypes."))]
assert not forbidden, forbidden
"""


@pytest.mark.slow
def test_the_constructor_opens_no_file_and_starts_no_thread() -> None:
    subprocess.run([sys.executable, "-c", MADE_QUIETLY], check=True, timeout=60)


@pytest.mark.parametrize(
    "name", ["", "1st", "a b", "a-b", "blas::saxpy", "saxpy<float", "saxpy\n", "µ", "saxpy(", "a\0", ".*"]
)
def test_a_name_that_is_no_identifier(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a kernel's name"):
        Kernel(name, source=SAXPY)


SCALE = """
namespace blas {
template <typename T, int N> __global__ void scale(T* x, T by, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by * N;
}
}
"""


def scale_host(x: Any, by: Any, n: int) -> None:
    x[:n] *= by * 4


def test_an_instance_of_a_template_is_a_kernel_with_the_given_parameters() -> None:
    kernel = Kernel("scale<float, 4>", source=SCALE, parameters="float* x, float by, int n", host=scale_host)
    assert repr(kernel) == "<Kernel scale<float, 4>(float* x, float by, int n)>"
    assert kernel.name == "scale<float, 4>"
    assert kernel.source == CudaSource("blas::scale<float, 4>", SCALE)
    copy = pickle.loads(pickle.dumps(kernel))
    assert (repr(copy), copy.source) == (repr(kernel), kernel.source)
    assert [kernel.writes(index) for index in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    "name",
    [
        *("scale<", "scale>", "<float>", "a::scale<float>", "scale<float>()", "scale<1>;", "scale<'a'>", "scale<\n>"),
        *('scale<"x">', "scale<#>", "scale<{}>", "scale<a\\>", "scale<\0>", "scale<é>", "1<int>"),
    ],
)
def test_a_name_that_is_no_instance_of_a_template(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a kernel's name"):
        Kernel(name, source=SCALE, parameters="float* x")


@pytest.mark.parametrize(
    ("name", "parameters", "error", "says"),
    [
        ("scale<float, 4>", None, InvalidArgumentError, "whose parameter list is not read from the source: pass it"),
        ("scale<float, 4>", 7, InvalidTypeError, "parameters is a str"),
        ("scale<float, 4>", "(float* x)", InvalidArgumentError, "write the parameter list only"),
        ("scale<float, 4>", "T x", UnsupportedError, "parameter 1 of kernel 'scale<float, 4>', `T x`"),
        ("saxpy", "float a", InvalidArgumentError, "'saxpy' names none: the parameter list is read from the source"),
        ("saxpy", "", InvalidArgumentError, "'saxpy' names none"),
    ],
)
def test_parameters_are_for_instances_of_templates(
    name: str, parameters: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        Kernel(name, source=SCALE + SAXPY, parameters=parameters)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"name": b"saxpy"}, InvalidTypeError, "a kernel's name is a str, not bytes"),
        ({"name": None}, InvalidTypeError, "a kernel's name is a str"),
        ({"name": "daxpy"}, CompileError, "no kernel 'daxpy' in the source"),
        ({"source": None}, InvalidTypeError, "source must be str or bytes, not NoneType"),
        ({"source": SAXPY + "\0"}, InvalidArgumentError, "NUL"),
        ({"source": b"\xff"}, InvalidArgumentError, "UTF-8"),
        ({"source": "__global__ void saxpy(Grid g);"}, UnsupportedError, "parameter 1 of kernel 'saxpy', `Grid g`"),
        ({"host": "saxpy"}, InvalidTypeError, "host is a function or None, not 'saxpy'"),
        ({"host_seconds": -1}, InvalidArgumentError, "host_seconds is -1"),
        ({"host_seconds": math.nan}, InvalidArgumentError, "host_seconds is nan"),
        ({"host_seconds": math.inf}, InvalidArgumentError, "host_seconds is inf"),
        ({"host_seconds": "1"}, InvalidTypeError, "host_seconds is a number"),
        ({"host_seconds": True}, InvalidTypeError, "host_seconds is a number"),
        ({"include_dirs": "/usr/include"}, InvalidTypeError, r"write \(path,\) for one"),
        ({"include_dirs": [3]}, InvalidTypeError, "an include directory is a str or a path, not 3"),
        ({"include_dirs": 3}, InvalidTypeError, "include_dirs is a sequence of paths"),
        ({"include_dirs": [b"/x"]}, InvalidTypeError, "an include directory is a str or a path"),
        ({"include_dirs": ["a\0"]}, InvalidArgumentError, "no include directory"),
        ({"include_dirs": [""]}, InvalidArgumentError, "no include directory"),
        ({"includes": 0}, InvalidTypeError, "includes is True or False, not 0"),
    ],
)
def test_wrong_constructor_arguments(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Kernel(**{"name": "saxpy", "source": SAXPY, **settings})


FILES = (
    *(
        "-I/etc",
        "-I",
        "--include-path=/etc",
        "-include/etc/passwd",
        "-include=x.h",
        "--pre-include=x.h",
        "@/etc/passwd",
    ),
    *("--options-file=x", "-optf=x", "--pch", "--create-pch=x", "--use-pch=x", "--pch-dir=x", "--time=x"),
    *("--device-time-trace=x", "--fdevice-time-trace=x", "-dlto", "-G", "-Xptxas=-v", "--gpu-architecture=sm_90"),
    *(
        "-DX=1 -I/etc\n",
        "-DX=1\n#include </etc/passwd>",
        "-DX=\\",
        "-D",
        "-D 1X",
        "-DX\0",
        "-U",
        "-UX=1",
        "",
        " -ftz=true",
    ),
    *(
        "-ftz",
        "-ftz=1",
        "-ftz=true ",
        "-maxrregcount=-1",
        "-std=gnu++17",
        "-diag-suppress=all",
        "-lineinfo=x",
        "-D\u00e9",
    ),
)


@pytest.mark.parametrize("option", FILES)
def test_an_option_outside_the_list_is_refused(option: str) -> None:
    """It may name a file. A directory is a directory, whatever it is called."""
    with pytest.raises(InvalidArgumentError, match="is not taken: there are -ftz="):
        saxpy(options=["-fmad=false", option])
    if option and "\0" not in option:
        assert saxpy(include_dirs=[option]).source.include_dirs == (os.path.abspath(option),)


@pytest.mark.parametrize("options", ["-ftz=true", b"-ftz=true", None, 7, [7], {"-ftz=true"}, [b"-ftz=true"]])
def test_options_are_a_sequence_of_strings(options: Any) -> None:
    with pytest.raises(InvalidTypeError, match="option"):
        saxpy(options=options)


def test_options_reach_the_driver_in_their_order() -> None:
    given = ["-DB=2", "-ftz=true", "-DA=1", "--std=c++20"]
    driver = CountingDriver()
    kernel = saxpy(options=given)
    given.clear()
    kernel.load(as_driver(driver), 0)
    ((_, source),) = driver.compiled
    assert source.options == ("-DB=2", "-ftz=true", "-DA=1", "--std=c++20")


def test_includes_false_refuses_an_include() -> None:
    source = f'#include "/etc/passwd"\n{SAXPY}'
    assert Kernel("saxpy", source=source).source.includes
    with pytest.raises(CompileError, match="line 1: #include is refused, because includes=False"):
        Kernel("saxpy", source=source, includes=False, options=["-DX=1"])


def test_include_directories_do_not_move_with_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kernel = saxpy(include_dirs=["inner", Path("/usr/../opt")])
    monkeypatch.chdir("/")
    assert kernel.source.include_dirs == (os.fspath(tmp_path / "inner"), "/opt")


def test_a_kernel_can_be_pickled_if_its_host_implementation_can() -> None:
    kernel = saxpy(host=saxpy_host, host_seconds=0.25, include_dirs=["/opt"], options=["-lineinfo"])
    driver = CountingDriver()
    kernel.load(as_driver(driver), 0)
    copy = pickle.loads(pickle.dumps(kernel))
    assert repr(copy) == repr(kernel)
    assert (copy.host, copy.host_seconds, copy.source) == (saxpy_host, 0.25, kernel.source)
    assert copy.loaded(as_driver(driver), 0) is None
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(saxpy(host=lambda a, x, y, n: None))


# The host implementation


@pytest.mark.parametrize(
    ("host", "takes_grid"),
    [
        (lambda a, x, y, n: None, False),
        (lambda *everything: None, False),
        (lambda a, x, y, n=3, more=4: None, False),
        (lambda a, x, y, n, *, grid, block: None, True),
        (lambda a, x, y, n, grid, block: None, True),
        (lambda *everything, grid=None, block=None: None, True),
        (lambda a, x, y, block: None, False),  # its own parameter happens to be called so
    ],
)
def test_a_host_implementation_gets_declared_grid_and_block(host: Callable[..., object], takes_grid: bool) -> None:
    program = saxpy(host=host).program(as_driver(CountingDriver(wants_image=False)), 0)
    assert program.host is host
    assert program.host_takes_grid is takes_grid


@pytest.mark.parametrize(
    "host",
    [
        lambda: None,
        lambda a, x, y: None,
        lambda a, x, y, n, more: None,
        lambda a, x, y, n, *, grid: None,
        lambda a, x, y, n, *, grid, block, more: None,
        lambda grid, block, y, n: None,
    ],
)
def test_a_host_implementation_that_cannot_be_called_is_refused(host: Callable[..., object]) -> None:
    with pytest.raises(InvalidTypeError, match=r"cannot be called as saxpy\(float a, .*4 arguments by position"):
        saxpy(host=host)


def test_a_coroutine_function_is_refused() -> None:
    async def host(a: float, x: Any, y: Any, n: int) -> None: ...

    with pytest.raises(InvalidTypeError, match="is a coroutine function"):
        saxpy(host=host)


def test_a_function_without_signature_is_accepted() -> None:
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(dict.update)
    kernel = Kernel("f", source="__global__ void f(float* x, float* y);", host=dict.update)
    assert kernel.host is dict.update


# Becomes a function


def test_a_program_has_the_image_and_the_host_implementation() -> None:
    kernel = saxpy(host=saxpy_host, host_seconds=2)
    driver = CountingDriver()
    program = kernel.program(as_driver(driver), 0)
    assert program == Program("saxpy", "fPPi", b"image of 0", "_Z5blas::saxpy", saxpy_host, False, 2.0, frozenset({1}))
    assert driver.compiled == [(0, kernel.source)]


def test_a_driver_that_wants_no_image_compiles_nothing() -> None:
    driver = CountingDriver(wants_image=False)
    kernel = saxpy(host=saxpy_host)
    assert kernel.program(as_driver(driver), 0) == Program("saxpy", "fPPi", host=saxpy_host, read_only=frozenset({1}))
    assert saxpy().program(as_driver(driver), 0).host is None  # the driver cannot run this
    assert driver.compiled == []


def test_it_is_compiled_once_per_architecture_and_loaded_once_per_device() -> None:
    kernel = saxpy()
    driver = CountingDriver(capabilities=((9, 0), (8, 0), (9, 0)))
    assert [kernel.loaded(as_driver(driver), device) for device in range(3)] == [None] * 3
    handles = [kernel.load(as_driver(driver), device) for device in (0, 1, 2, 0, 1, 2)]
    assert handles == [1001, 2002, 3003] * 2
    assert [device for device, _ in driver.compiled] == [0, 1]
    assert [program.image for program in driver.programs] == [b"image of 0", b"image of 1", b"image of 0"]
    assert [kernel.loaded(as_driver(driver), device) for device in range(3)] == [1001, 2002, 3003]


def test_every_driver_has_its_own() -> None:
    kernel = saxpy()
    first, second = CountingDriver(), CountingDriver()
    kernel.load(as_driver(first), 0)
    assert kernel.loaded(as_driver(second), 0) is None
    kernel.load(as_driver(second), 0)
    assert len(first.compiled) == len(second.compiled) == 1


def test_a_kernel_keeps_no_driver_alive() -> None:
    kernel = saxpy()
    driver = CountingDriver()
    kernel.load(as_driver(driver), 0)
    gone = weakref.ref(driver)
    del driver
    gc.collect()
    assert gone() is None


def test_a_failed_compilation_is_tried_again() -> None:
    kernel = saxpy()
    driver = CountingDriver(failures=[CompileError("no room", log="")])
    with pytest.raises(CompileError, match="no room"):
        kernel.load(as_driver(driver), 0)
    assert kernel.loaded(as_driver(driver), 0) is None
    assert kernel.load(as_driver(driver), 0) == 1001


def test_concurrent_threads_share_one_compilation() -> None:
    kernel = saxpy()
    driver = CountingDriver(gate=threading.Event())
    handles: list[int] = []
    threads = [threading.Thread(target=lambda: handles.append(kernel.load(as_driver(driver), 0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert driver.gate is not None
    driver.gate.set()
    for thread in threads:
        thread.join()
    assert handles == [1001] * 8
    assert len(driver.compiled) == len(driver.programs) == 1


FORKED = """
    import os, sys, threading, types
    sys.path.insert(0, sys.argv[1])
    from tests.kernels.test_kernel import CountingDriver, saxpy

    kernel = saxpy()
    driver = CountingDriver(gate=threading.Event())
    thread = threading.Thread(target=kernel.load, args=(driver, 0))
    thread.start()
    while not driver.compiled:
        pass
    child = os.fork()
    if child == 0:
        os._exit(kernel.load(CountingDriver(), 0) != 1001)
    driver.gate.set()
    thread.join()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_process_forked_in_the_middle_of_a_compilation_does_not_wait_for_it() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", textwrap.dedent(FORKED), os.fspath(root)], check=True, timeout=60)
