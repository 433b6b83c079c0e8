from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.programs import end_forking
from tests.helpers import device

__all__ = ["device"]


@pytest.fixture(scope="package", autouse=True)
def one_forking_process() -> Iterator[None]:
    """The tests of the command line share the process that has imported it."""
    yield
    end_forking()
