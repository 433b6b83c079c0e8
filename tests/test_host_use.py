"""HostUse: time on a processor, queued for one, and waiting for the GIL. The processors that a process may use."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiocuda._base import _host_use, _thread_times
from aiocuda._base._host_use import HostLoad, HostUse
from aiocuda._base._processor import processors_within_quota, throttled_periods
from aiocuda._base._run_clock import READ_SECONDS, RunClock
from aiocuda._base._thread_times import ThreadTimes, thread_times
from aiocuda.testing import SimulatedLoop
from tests.helpers import block_until, in_a_child, in_thread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these times are known on Linux only")

#: It sleeps with the GIL, so no busy processor changes the result.
_keep_gil = ctypes.PyDLL(None).usleep


def probes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aiocuda-gil-probe"]


def test_thread_beside_a_program_on_its_processor_is_queued() -> None:
    mine = os.sched_getaffinity(0)
    processor = {min(mine)}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as program:
        try:
            os.sched_setaffinity(program.pid, processor)
            os.sched_setaffinity(0, processor)
            began = thread_times()
            block_until(lambda: sum(range(100_000)) and thread_times().minus(began).queued >= 0.02)
        finally:
            os.sched_setaffinity(0, mine)
            program.kill()
    spent = thread_times().minus(began)
    assert spent.cpu > 0
    assert spent.cpu + spent.queued <= spent.seconds + 0.01


def test_runs_of_a_series_begin_where_the_last_one_ends() -> None:
    now = 1.0
    clock = RunClock(lambda: now)  # virtual time
    assert clock.begin() == 1.0
    now = 2.0
    assert clock.end() == ThreadTimes(1.0, 1.0, 0.0)
    now = 3.0
    assert clock.begin() == 2.0
    now = 4.0
    assert clock.end() == ThreadTimes(2.0, 2.0, 0.0)
    clock.pause()
    now = 9.0
    assert clock.begin() == 9.0


def test_runs_are_queued_for_what_the_file_adds_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read after the first run, and again 20 ms later: what it adds is of all runs since then."""
    queued, reads = [0.0], [0]

    def read(_: object) -> float:
        reads[0] += 1
        return queued[0]

    monkeypatch.setattr(_thread_times.Schedstat, "queued", read)
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)  # it never has a processor
    clock, ends = RunClock(time.monotonic), []
    clock.begin()
    ends.append(clock.end())
    assert reads == [2]
    began = time.monotonic()
    queued[0] = 100.0  # most of it in a pause
    while reads == [2]:
        ends.append(clock.end())
    assert time.monotonic() - began >= READ_SECONDS
    assert ends[-1].queued == pytest.approx(sum(end.seconds for end in ends[1:]))
    assert {end.queued for end in ends[:-1]} == {0.0}
    assert clock.queued_share == 1.0
    queued[0], reads[0] = 0.0, 0  # other code has closed the file
    while not reads[0]:
        found = clock.end()
    assert (found.queued, clock.queued_share) == (0.0, 0.0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_thread_has_its_file_open_until_it_ends_and_a_forked_child_its_own() -> None:
    def own_file() -> str:
        thread_times()
        return os.readlink(f"/proc/self/fd/{_thread_times._own.schedstat._descriptor}")

    def files() -> set[str]:
        return {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}

    async def main() -> str:
        return own_file()

    file, mine = in_thread(main), own_file()
    block_until(lambda: file not in files())
    assert mine in files()
    own, child = in_a_child(lambda: f"{own_file()} {os.getpid()}").split()
    assert own.startswith(f"/proc/{child}/")


def test_system_without_the_file_counts_no_queues_and_probes_no_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(_thread_times, "_own", threading.local())

    async def main() -> None:
        use = HostUse()
        use.start(asyncio.get_running_loop())
        await asyncio.sleep(5.0)
        assert not probes()
        assert use.load().own_queued == thread_times().queued == 0
        assert use.load().gil_share is None

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


def test_times_of_several_measurements_add_up_until_they_are_reset() -> None:
    use = HostUse()
    use.start(None)
    block_until(lambda: sum(range(10_000)) and use.load().own_cpu > 0)
    use.stop()
    first = use.load()
    assert first.cpu > 0
    assert use.load() == first  # it has stopped
    use.start(None)
    use.stop()
    assert use.load().seconds > first.seconds
    use.reset()
    assert use.load() == HostLoad()


def test_probe_begins_in_the_fourth_second_of_a_measurement_and_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host_use, "PROBE_SECONDS", 60.0)

    async def main() -> None:
        use, loop = HostUse(), asyncio.get_running_loop()
        for _ in range(3):  # short measurements: no probe
            use.start(loop)
            await asyncio.sleep(2.9)
            use.stop()
            await asyncio.sleep(2.9)
        assert not probes()
        use.start(loop)
        await asyncio.sleep(3.1)
        assert len(probes()) == 1
        use.reset()  # it begins again
        block_until(lambda: not probes())
        await asyncio.sleep(2.9)
        assert not probes()
        assert use.load().gil_share is None
        monkeypatch.setattr(_host_use, "PROBE_SECONDS", 0.05)
        await asyncio.sleep(0.2)
        block_until(lambda: use.load().gil_share is not None)
        use.stop()
        use.start(loop)
        await asyncio.sleep(5.0)
        block_until(lambda: not probes())
        assert use.load().gil_share is not None
        use.reset()
        assert use.load().gil_share is None

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


def probed(work: Callable[[], object]) -> float:
    """The share of the GIL that a probe finds, beside a thread that calls a function again and again."""
    use, ended = HostUse(), threading.Event()
    running = threading.Thread(target=lambda: all(work() or True for _ in iter(ended.is_set, True)))
    running.start()
    use._probe.start()
    block_until(lambda: use.load().gil_share is not None)
    ended.set()
    running.join()
    return use.load().gil_share or 0.0


@pytest.mark.slow
def test_gil_that_a_thread_keeps_is_taken() -> None:
    # A request at the end of a call, which finds the GIL free, is rare.
    assert probed(lambda: _keep_gil(20_000)) >= 0.6


@pytest.mark.slow
def test_gil_is_free_while_a_thread_waits() -> None:
    # Other processes delay this one.
    assert min(probed(lambda: time.sleep(0.003)) for _ in range(3)) <= 0.4  # noqa: TID251 - it waits without the GIL


@pytest.mark.parametrize(
    ("groups", "files", "quota", "periods"),
    [
        ("0::/", {}, None, (0, 0)),
        ("0::/", {"cpu.max": "max 100000"}, None, (0, 0)),
        ("0::/", {"cpu.max": "250000 100000", "cpu.stat": "usage_usec 7\nnr_periods 8\nnr_throttled 2"}, 2, (8, 2)),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 1, (0, 0)),
        ("1:name=x:/c\n2:cpu,cpuacct:/c", {"cpu/c/cpu.cfs_quota_us": "-1"}, None, (0, 0)),
        (
            "2:cpu,cpuacct:/c",
            {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000", "cpu/cpu.stat": "nr_periods 1"},
            3, (1, 0),
        ),
    ],
)  # fmt: skip
def test_processors_are_at_most_the_quota_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], quota: int | None,
    periods: tuple[int, int],
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert processors_within_quota(tmp_path) == (quota or 64)
    assert throttled_periods(tmp_path) == periods
