from __future__ import annotations

import math
from typing import Any

import pytest

from aiocuda.driver.host import HostDriver
from aiocuda.driver.software import Model
from aiocuda.errors import InvalidArgumentError, InvalidTypeError


def test_defaults_are_stated_and_described() -> None:
    driver = HostDriver()
    assert driver.describe() == {
        "devices": 1,
        "memory": 4 << 30,
        "bandwidth": 2e9,
        "latency": 10e-6,
        "compute_slots": 32,
        "hardware_queues": 32,
    }
    assert repr(driver).startswith("HostDriver(devices=1, memory=")
    assert driver.name == "host"
    assert set(driver.versions()) == {"numpy", "python"}
    driver.close()


def test_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    model = Model(bandwidth=1e9, latency=1e-3)
    assert model.transfer_seconds(2_000_000) == pytest.approx(3e-3)
    assert Model(bandwidth=math.inf, latency=0).transfer_seconds(1 << 40) == 0.0


def test_devices_have_the_models_memory_and_queues() -> None:
    driver = HostDriver(devices=3, memory=12345)
    assert driver.device_count() == 3
    properties = driver.device_open(2)
    assert (properties.name, properties.total_memory, properties.hardware_queues) == ("host 2", 12345, 32)
    assert driver.memory_info(2) == (12345, 12345)
    driver.close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"devices": 0}, InvalidArgumentError),
        ({"devices": 65}, InvalidArgumentError),
        ({"devices": "1"}, InvalidTypeError),
        ({"devices": True}, InvalidTypeError),
        ({"memory": 0}, InvalidArgumentError),
        ({"memory": 1e9}, InvalidTypeError),
        ({"bandwidth": 0}, InvalidArgumentError),
        ({"bandwidth": -1e9}, InvalidArgumentError),
        ({"bandwidth": math.nan}, InvalidArgumentError),
        ({"bandwidth": "fast"}, InvalidTypeError),
        ({"latency": -1e-6}, InvalidArgumentError),
        ({"latency": math.inf}, InvalidArgumentError),
        ({"latency": math.nan}, InvalidArgumentError),
    ],
)
def test_bad_figures_are_refused_by_name(arguments: dict[str, Any], error: type[Exception]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(error, match=name) as caught:
        HostDriver(**arguments)
    assert str(value) in str(caught.value)
