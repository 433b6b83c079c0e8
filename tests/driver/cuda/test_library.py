from __future__ import annotations

import os

import pytest

from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.cuda._library import Library
from aiocuda.errors import BusyError, DriverError, DriverNotAvailableError
from tests.driver.cuda.fake import Fake

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def test_asks_for_32_queues_just_before_cuda_is_initialised(fake: Fake) -> None:
    library = Library(fake.path)
    assert library.hardware_queues == 32
    assert os.environ[_QUEUES] == "32"
    assert fake.names()[:2] == ["cuCtxGetCurrent", "cuInit"]


def test_a_second_look_finds_the_same(fake: Fake) -> None:
    Library(fake.path)
    assert Library(fake.path).hardware_queues == 32


@pytest.mark.parametrize(
    ("value", "queues"), [("8", 8), ("1", 1), ("16", 16), ("64", 32), ("0", 1), ("many", 8), ("", 8)]
)
def test_believes_who_asked_before(fake: Fake, monkeypatch: pytest.MonkeyPatch, value: str, queues: int) -> None:
    monkeypatch.setenv(_QUEUES, value)
    fake.value("cuDevicePrimaryCtxGetState", 1)  # a context is active, made with that
    assert Library(fake.path).hardware_queues == queues
    assert os.environ[_QUEUES] == value


def test_assumes_8_where_a_context_was_active(fake: Fake) -> None:
    """It is no mistake of the program, so no warning says so: warnings are errors in this test."""
    fake.value("cuDevicePrimaryCtxGetState", 1)
    assert Library(fake.path).hardware_queues == 8
    assert _QUEUES not in os.environ  # it came too late, and nobody must believe it


def test_a_context_of_the_calling_thread_counts_too(fake: Fake) -> None:
    fake.push(0xC0DE)
    assert Library(fake.path).hardware_queues == 8


def test_device_has_32_queues_and_24_notifiers(fake: Fake) -> None:
    driver = CudaDriver(fake.path)
    assert driver.device_open(0).hardware_queues == 32
    assert driver.notifier_limit(0) == 24


def test_8_queues_have_4_notifiers(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_QUEUES, "8")
    driver = CudaDriver(fake.path)
    driver.device_open(0)
    assert driver.notifier_limit(0) == 4


def test_no_library(fake: Fake) -> None:
    with pytest.raises(DriverNotAvailableError, match="no NVIDIA driver"):
        Library(fake.path + ".not")


def test_old_driver(fake: Fake) -> None:
    fake.version(12090)
    with pytest.raises(DriverNotAvailableError, match=r"too old: it supports CUDA 12\.9, and 13\.0 \(driver R580\)"):
        Library(fake.path)
    assert fake.calls() == []


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (100, DriverNotAvailableError, r"\(100\)"),
        (34, DriverNotAvailableError, "stub"),
        (803, DriverError, "reboot"),
        (999, DriverError, "kernel module"),  # a fault would be the end of the process; nothing has run yet
        (802, BusyError, "fabricmanager"),
    ],
)
def test_what_cuinit_answers(fake: Fake, code: int, kind: type[Exception], words: str) -> None:
    fake.answer("cuInit", code)
    with pytest.raises(kind, match=words) as caught:
        Library(fake.path)
    assert type(caught.value) is kind
    assert _QUEUES not in os.environ
    fake.answer("cuInit", 0)
    assert Library(fake.path).hardware_queues == 32
