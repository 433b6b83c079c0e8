from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from aiocuda.driver.cuda._probe import find
from aiocuda.errors import AiocudaError, BusyError, DriverError
from tests.driver.cuda.fake import Fake


def test_finds_it(fake: Fake) -> None:
    assert find(fake.path) is None


def test_makes_no_context(fake: Fake) -> None:
    find(fake.path)
    assert not {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"} & set(fake.names())


def test_no_driver(fake: Fake) -> None:
    reason = find(fake.path + ".not")
    assert reason is not None
    assert reason.startswith("no NVIDIA driver: ")


def test_old_driver(fake: Fake) -> None:
    fake.version(11080)
    assert "too old: it supports CUDA 11.8" in str(find(fake.path))


def test_no_package(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert "pip install" in str(find(fake.path))


@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_hidden_devices(fake: Fake, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    fake.answer("cuInit", 100)
    assert str(find(fake.path)).endswith(f"(CUDA_VISIBLE_DEVICES is {value!r})")


def test_no_device(fake: Fake) -> None:
    fake.value("cuDeviceGetCount", 0)
    assert str(find(fake.path)).startswith(
        "the NVIDIA driver finds no GPU; one in MIG mode is seen by its instances only"
    )
    fake.answer("cuInit", 100)
    reason = str(find(fake.path))
    assert "(100)" in reason
    assert "cuInit" in reason
    assert "MIG" in reason


@pytest.mark.parametrize(("code", "kind"), [(999, DriverError), (3, DriverError), (802, BusyError), (46, BusyError)])
def test_a_gpu_that_fails_is_no_reason_to_go_on(fake: Fake, code: int, kind: type[AiocudaError]) -> None:
    fake.answer("cuInit", code)
    with pytest.raises(kind, match=rf"\({code}\)"):
        find(fake.path)


@pytest.mark.slow
def test_importing_loads_nothing() -> None:
    program = (
        "import sys, aiocuda.driver.cuda\n"
        "assert not [name for name in sys.modules if name == 'cuda' or name.startswith('cuda.')]\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
