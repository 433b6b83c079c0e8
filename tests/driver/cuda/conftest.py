from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocuda.driver.cuda import _library
from aiocuda.driver.cuda._driver import CudaDriver
from tests.driver.cuda.fake import Fake, build
from tests.driver.cuda.methods import Things, things


@pytest.fixture(scope="session")
def _fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return Fake(build(tmp_path_factory.mktemp("libcuda")))


@pytest.fixture
def fake(_fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "AIOCUDA_GIL", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that it is put back even if the test, or the driver, sets it
        monkeypatch.delenv(name)
    monkeypatch.setattr(_library, "_initialised_by", None)
    _fake.reset()
    _fake.value("cuDeviceGetCount", 2)
    yield _fake
    _fake.reset()


@pytest.fixture
def driver(fake: Fake) -> CudaDriver:
    """Device 0 open, nothing recorded yet."""
    driver = CudaDriver(fake.path)
    driver.device_open(0)
    fake.forget()
    return driver


@pytest.fixture
def made(driver: CudaDriver, fake: Fake) -> Iterator[Things]:
    """One of each, made by `driver` on devices 0 and 1."""
    made = things(driver, fake)
    yield made
    made.port.close()
