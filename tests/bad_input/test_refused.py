"""What cannot be: the named error, the value in its text, no call of the driver, the same text on each driver."""

from __future__ import annotations

import re

import pytest

from tests.bad_input import (
    cluster_rows,
    data_rows,
    graph_rows,
    handle_rows,
    kernel_rows,
    memory_rows,
    serving_asgi_rows,
    serving_rows,
)
from tests.bad_input.case import Case, World

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODULES = (memory_rows, handle_rows, kernel_rows, graph_rows, data_rows, serving_rows, serving_asgi_rows, cluster_rows)
CASES = [case for module in MODULES for case in module.CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_refused_alike_on_each_driver(case: Case, host: World, world: World) -> None:
    text = await case.refused(host)
    if case.devices == 1 or world.second is not None:
        same = await case.refused(world)
        if case.reaches:  # how much memory there is differs from device to device
            text, same = (re.sub(r"…|\d[\d,]*", "N", each) for each in (text, same))
        assert same == text
