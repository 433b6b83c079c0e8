"""Our service under load. Its times are five times those of the figures: other work on this machine matters less."""

from __future__ import annotations

import os

import pytest

from tests.load.measure import Plan, capacity, figures_at, retries
from tests.load.running import RunningServer
from tests.load.servers import SERVERS
from tests.load.setting import Setting

#: About 20 seconds.
PLAN = Plan(capacity_s=3.0, load_s=3.5, warm_up_s=1.0, retry_s=(3.0, 3.5), setting=Setting(5.0))

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
async def test_overload_costs_no_goodput_and_refused_clients_can_come_back() -> None:
    core = max(os.sched_getaffinity(0))
    async with RunningServer(SERVERS["ours"], PLAN.setting, core=core) as server:
        rate = await capacity(server.port, SERVERS["ours"].saturated_by, PLAN)
        full = await figures_at(server.port, rate, PLAN, 1, spin_s=0.0)
        over = await figures_at(server.port, 1.5 * rate, PLAN, 2, spin_s=0.0)
        again = await retries(server.port, rate, PLAN, 3, spin_s=0.0)
    assert rate >= 0.8 * PLAN.setting.bound
    assert over.problems == full.problems == {}
    assert over.goodput >= 0.9 * full.goodput, (full, over)
    assert over.refused > 0.1
    assert over.with_retry_after == 1.0
    assert over.p99_ms is not None
    assert over.p99_ms <= PLAN.setting.client_deadline_s * 1e3, over
    assert again.sent >= 20
    assert again.held is not None
    assert again.held >= 0.9, again
