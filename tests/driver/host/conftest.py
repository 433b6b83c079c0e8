from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver.host.kit import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.driver.close()
