"""The torture as a test: seven minutes on a GPU, and a short run on the host driver that must detect the control."""

from __future__ import annotations

import pytest

from tests.torture.__main__ import main


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("driver", "seconds"), [("host", 20.0), pytest.param("cuda", 420.0, marks=pytest.mark.gpu)], ids=["host", "cuda"]
)
def test_no_thread_waits_forever_for_the_gil(driver: str, seconds: float) -> None:
    """P9"""
    assert main(["--driver", driver, "--seconds", str(seconds)]) == 0
