"""The torture as a test: on a GPU for seven minutes, on the host driver to see that it can tell a stall."""

from __future__ import annotations

import pytest

from tests.torture.__main__ import main


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("driver", "seconds"), [("host", 20.0), pytest.param("cuda", 420.0, marks=pytest.mark.gpu)], ids=["host", "cuda"]
)
def test_nobody_waits_for_ever_for_the_gil(driver: str, seconds: float) -> None:
    """P9"""
    assert main(["--driver", driver, "--seconds", str(seconds)]) == 0
