from __future__ import annotations

import pickle

import pytest
from cuda.bindings import driver as cuda

from aiocuda.driver._codes import FAULTS, LOST, error_class, translate
from aiocuda.errors import (
    AiocudaError,
    DeviceFault,
    DeviceOutOfMemory,
    DriverError,
    StaleHandleError,
)

_CODES = {int(code): code.name for code in cuda.CUresult if int(code)}


@pytest.mark.parametrize("code", sorted(_CODES))
def test_every_code_has_an_error_that_names_it(code: int) -> None:
    error = translate(code, "cuSomething", _CODES[code], "what it means", 1)
    assert type(error) is error_class(code)
    assert issubclass(type(error), AiocudaError)
    assert type(error) is not AiocudaError
    for word in ("device 1", "cuSomething", _CODES[code], f"({code})", "what it means"):
        assert word in str(error)
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.args, twin.__dict__) == (error.args, error.__dict__)
    assert twin.code == code
    assert twin.call == "cuSomething"


def test_codes_are_named_as_cuda_names_them() -> None:
    names = {
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_UNKNOWN",
    }
    assert {_CODES[code] for code in FAULTS} == names
    assert {_CODES[code] for code in LOST} == {
        "CUDA_ERROR_INVALID_CONTEXT",
        "CUDA_ERROR_INVALID_HANDLE",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_STREAM_DETACHED",
    }


def test_classes() -> None:
    assert {code for code in _CODES if error_class(code) is DeviceFault} == FAULTS
    assert all(error_class(code) is StaleHandleError for code in LOST)
    assert error_class(2) is DeviceOutOfMemory
    assert error_class(123456) is DriverError  # of a driver newer than all this
    with pytest.raises(ValueError, match="SUCCESS"):
        error_class(0)


def test_cures_are_for_codes_that_exist() -> None:
    from aiocuda.driver import _codes as errors

    assert set(errors._CURES) <= set(_CODES)
    assert set(errors._CLASSES) <= set(_CODES)
