from __future__ import annotations

import ast
import ctypes
import importlib.util
import re
from pathlib import Path

import pytest

from aiocuda.driver.cuda import _entry
from aiocuda.driver.cuda._abi import CUmemLocation
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.cuda._entry import ENTRIES
from aiocuda.errors import DriverNotAvailableError, InvalidArgumentError
from tests.driver.cuda.fake import Fake

_SOURCES = Path(_entry.__file__).parent

_SCALARS = {
    "int": ctypes.c_int,
    "CUdevice": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "CUdevice_attribute": ctypes.c_int,
    "CUfunction_attribute": ctypes.c_int,
    "CUmemPool_attribute": ctypes.c_int,
    "CUmem_advise": ctypes.c_int,
    "CUmem_range_attribute": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "unsigned short": ctypes.c_ushort,
    "unsigned char": ctypes.c_ubyte,
    "CUmemLocation": CUmemLocation,
    # 64 bits, passed alike
    "size_t": ctypes.c_void_p,
    "CUdeviceptr": ctypes.c_void_p,
    "CUcontext": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
    "CUevent": ctypes.c_void_p,
    "CUmemoryPool": ctypes.c_void_p,
    "CUlibrary": ctypes.c_void_p,
    "CUkernel": ctypes.c_void_p,
    "CUfunction": ctypes.c_void_p,
    "CUgraph": ctypes.c_void_p,
    "CUgraphNode": ctypes.c_void_p,
    "CUgraphExec": ctypes.c_void_p,
    "CUhostFn": ctypes.c_void_p,
}


def _declared() -> dict[str, tuple[object, ...]]:
    """Argument types of libcuda's functions, as cuda-bindings declares them."""
    spec = importlib.util.find_spec("cuda.bindings")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    text = (Path(spec.submodule_search_locations[0]) / "cydriver.pxd").read_text()
    found = {}
    for name, arguments in re.findall(r"^cdef CUresult (cu\w+)\((.*)\) except", text, re.MULTILINE):
        if name in ENTRIES:
            found[name] = tuple(_type(argument) for argument in arguments.split(",") if argument.strip())
    return found


def _type(argument: str) -> object:
    words = argument.replace("const ", "").strip()
    if "*" in words:
        return ctypes.c_void_p
    return _SCALARS[words.rpartition(" ")[0]]


def test_arguments_are_what_cuda_bindings_declares() -> None:
    declared = _declared()
    assert set(declared) == set(ENTRIES)
    assert {name: arguments for name, (_, arguments) in ENTRIES.items()} == declared


def test_every_entry_is_called_and_every_call_is_an_entry() -> None:
    called = set()
    for path in _SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match(r"cu[A-Z]", node.attr):
                called.add(node.attr)
    assert called - {"cuGetProcAddress_v2", "cuDriverGetVersion"} == set(ENTRIES)


def test_each_function_is_asked_for_in_its_own_version(fake: Fake) -> None:
    CudaDriver(fake.path).device_count()
    assert {name: fake.asked_version(name) for name in ENTRIES} == {name: row[0] for name, row in ENTRIES.items()}
    assert fake.asked_flags() == 1  # CU_GET_PROC_ADDRESS_LEGACY_STREAM


def test_missing_function_is_named(fake: Fake) -> None:
    fake.lacks("cuFuncLoad")
    with pytest.raises(DriverNotAvailableError, match=r"cuFuncLoad of CUDA 12\.4"):
        CudaDriver(fake.path).device_count()


@pytest.mark.parametrize("value", ["", "KEEP", "1", "yes"])
def test_garbage_in_the_environment_is_refused(value: str, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_GIL", value)
    with pytest.raises(InvalidArgumentError, match=f"AIOCUDA_GIL={value!r}") as caught:
        CudaDriver(fake.path)
    assert caught.value.variable == "AIOCUDA_GIL"  # type: ignore[attr-defined]
    assert fake.calls() == []
