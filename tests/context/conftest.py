from __future__ import annotations

import pytest

from tests.context.programs import DRIVERS

__all__ = ["driver"]


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    """The name of each driver."""
    name: str = request.param
    return name
