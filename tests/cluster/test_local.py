"""Processes, descriptors and GPUs of the engine "local"."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.cluster import DeadlineError, ReplicaLostError, open_cluster
from aiocuda.serving import Batch, MicroBatcher
from tests.cluster.processes import children, open_files, psutil
from tests.cluster.test_cluster import lines, places
from tests.cluster.things import Model, Service
from tests.helpers import PATIENCE, UVLOOP, until
from tests.project.tree import ROOT

pytestmark = [pytest.mark.slow]

ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def run(tmp_path: Path, text: str, *, guard: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program whose main module opens a cluster."""
    body = "asyncio.run(main())" if not guard else "if __name__ == '__main__':\n    asyncio.run(main())"
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, os, signal, sys, time\nfrom aiocuda.cluster import open_cluster\n"
        f"class Thing:\n    async def pid(self): return os.getpid()\n{textwrap.dedent(text)}\n{body}\n"
    )
    return subprocess.run(
        [sys.executable, str(program)], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )


async def main_on_uvloop() -> None:
    async with open_cluster("local", replicas=2) as cluster:
        handle = await cluster.spawn(Service)
        assert len(await places(handle, 2)) == 2
        with pytest.raises(DeadlineError):
            await handle.call("hold", "", deadline_s=0.05)
        await handle.call("echo", bytes(3_000_000))
        os.kill((await handle.call("where"))[2], signal.SIGKILL)
        await until(lambda: any(each.restarts for each in cluster.statistics().replicas))


def test_on_uvloop() -> None:
    pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=UVLOOP) as runner:
        runner.run(main_on_uvloop())


@pytest.mark.heavy
@pytest.mark.asyncio
async def test_losses_leave_no_process_and_no_descriptor() -> None:
    random_ = random.Random(1)
    before = children()
    async with open_cluster("local", replicas=2, restarts=100) as cluster:
        handle = await cluster.spawn(Service)
        await places(handle, 2)
        files = open_files()
        for _ in range(4):
            pids = await places(handle, 2)
            tasks = [asyncio.create_task(handle.call("hold", "")) for _ in range(5)]
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(handle.call("echo", bytes(20_000_000))))
            await asyncio.sleep(random_.random() * 0.02)
            for _, pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: all(each.state == "running" for each in cluster.statistics().replicas))
        assert open_files() == files
        assert len(children() - before) == 2
    assert children() == before


@pytest.mark.heavy
@pytest.mark.parametrize("stopped", [False, True])
def test_parent_that_is_killed_leaves_no_process(tmp_path: Path, stopped: bool) -> None:
    """Also a replica that is stopped ends, which can run no code."""
    ended = run(
        tmp_path,
        f"""
        async def main():
            async with open_cluster("local", replicas=2) as cluster:
                handle = await cluster.spawn(Thing)
                pids = sorted({{await handle.call("pid") for _ in range(4)}})
                print(*pids, flush=True)
                if {stopped}:
                    os.kill(pids[0], signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert ended.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    until_when = time.monotonic() + PATIENCE
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < until_when, "a replica outlives its parent"
        time.sleep(0.001)  # noqa: TID251 - no event tells of the end of another program's child


@pytest.mark.heavy
@pytest.mark.parametrize(
    "ending", ["raise RuntimeError('left')", "os._exit(3)", "sys.exit(3)", "asyncio.get_running_loop().stop()"]
)
def test_program_that_ends_without_closing_leaves_no_process(tmp_path: Path, ending: str) -> None:
    ended = run(
        tmp_path,
        f"""
        async def main():
            opening = open_cluster("local", replicas=2)
            cluster = await opening.__aenter__()
            handle = await cluster.spawn(Thing)
            print(*{{await handle.call("pid") for _ in range(4)}}, flush=True)
            {ending}
            await asyncio.sleep(60)
        """,
    )
    assert ended.returncode != 0
    until_when = time.monotonic() + PATIENCE
    while any(psutil.pid_exists(int(pid)) for pid in ended.stdout.split()):
        assert time.monotonic() < until_when, ended.stderr
        time.sleep(0.001)  # noqa: TID251 - no event tells of the end of another program's child


@pytest.mark.heavy
def test_ctrl_c_completes_the_accepted_calls(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM reach the whole process group; the replicas go on until the program ends them."""
    ended = run(
        tmp_path,
        """
        class Slow:
            async def sleep(self, seconds):
                await asyncio.sleep(seconds)
                return "slept"
        async def main():
            loop = asyncio.get_running_loop()
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            os.setpgrp()
            async with open_cluster("local", replicas=2) as cluster:
                handle = await cluster.spawn(Slow)
                call = asyncio.create_task(handle.call("sleep", 0.5))
                await asyncio.sleep(0.1)
                os.killpg(0, signal.SIGINT)
                os.killpg(0, signal.SIGTERM)
                await stop.wait()
            print(await call)
        """,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "slept"), ended.stderr


@pytest.mark.heavy
def test_ctrl_c_does_not_interrupt_the_start_of_a_replica(tmp_path: Path) -> None:
    """It imports the main module then, and has no handler yet."""
    ended = run(
        tmp_path,
        """
        if __name__ != "__main__":
            os.killpg(0, signal.SIGINT)
            os.killpg(0, signal.SIGTERM)
        async def main():
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            os.setpgrp()
            async with open_cluster("local", replicas=1) as cluster:
                await stop.wait()
                print((await (await cluster.spawn(Thing)).call("pid")) != os.getpid())
        """,
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "True", "")


@pytest.mark.heavy
def test_main_module_without_a_guard_is_refused(tmp_path: Path) -> None:
    text = 'async def main():\n    async with open_cluster("local", replicas=1): pass'
    ended = run(tmp_path, text, guard=False)
    assert "InvalidArgumentError" in ended.stderr
    assert "below `if __name__ == '__main__':`" in ended.stderr


@pytest.mark.asyncio
async def test_class_of_a_module_that_is_not_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local:
        pass

    async with open_cluster("local", replicas=1) as cluster:
        with pytest.raises(InvalidTypeError, match="Local and its arguments cannot be pickled"):
            await cluster.spawn(Local)
        Local.__module__ = "__main__"
        error: Exception | None = None
        with monkeypatch.context() as patch:  # as in an interactive session; only for the call, pytest needs them
            patch.delattr(sys.modules["__main__"], "__spec__", raising=False)
            patch.delattr(sys.modules["__main__"], "__file__", raising=False)
            try:
                await cluster.spawn(Local)
            except InvalidTypeError as caught:
                error = caught
        assert "put it into a module" in str(error)


@pytest.mark.asyncio
async def test_gpu_of_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_DRIVER", "host")
    for visible, expected in (("GPU-1, 5,7", {"GPU-1", "5"}), ("", {""}), ("0,0", {"0"}), (None, {"0", "1"})):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        async with open_cluster("local", replicas=2) as cluster:
            handle = await cluster.spawn(Service)
            assert {await handle.call("environment", "CUDA_VISIBLE_DEVICES") for _ in range(4)} == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(InvalidArgumentError, match="replicas=2, but CUDA_VISIBLE_DEVICES=3 names 1"):
        async with open_cluster("local", replicas=2):
            pass


@pytest.mark.asyncio
async def test_process_that_ends_before_it_is_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cluster is not opened, the error has the exit code, and nothing is left."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nif 'spawn_main' in str(sys.orig_argv): sys.exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    files, before = open_files(), children()
    with pytest.raises(ReplicaLostError, match="its process has ended with exit code"):
        async with open_cluster("local", replicas=2):
            pass
    assert children() == before
    assert open_files() <= files + 2  # of the resource tracker, if it was started here


@pytest.mark.asyncio
async def test_a_cluster_opens_after_a_cancelled_one_whose_process_has_not_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A thread of this process waits for its first message."""
    held = "import os, sys\nif 'spawn_main' in str(sys.orig_argv):\n    open(os.environ['BEGUN'], 'w').close()\n"
    (tmp_path / "sitecustomize.py").write_text(f"{held}    import signal; signal.pause()\n")
    begun, before = tmp_path / "begun", children()

    async def opening() -> None:
        async with open_cluster("local", replicas=1):
            pass

    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
        patch.setenv("BEGUN", str(begun))
        first = asyncio.create_task(opening())
        await until(begun.exists)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert children() == before
    await opening()


@pytest.mark.asyncio
async def test_bytes_of_arrays_are_not_copied_by_a_call() -> None:
    """The traced memory of a call is that of its result, once."""
    array = np.ones(16 << 20, np.float32)
    async with open_cluster("local", replicas=1) as cluster:
        handle = await cluster.spawn(Service)
        await handle.call("total", array)
        tracemalloc.start()
        try:
            await handle.call("total", array)
            sent = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            returned = await handle.call("echo", array)
            received = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sent < 8 << 20
        assert received < array.nbytes + (8 << 20)
        assert (returned == array).all()


@pytest.mark.asyncio
async def test_batcher_in_front_of_a_cluster() -> None:
    async with open_cluster("local", replicas=2) as cluster:
        handle = await cluster.spawn(Model)

        async def infer(batch: Batch[float]) -> list[float]:
            rows = await handle.call("double", np.array(batch.items, np.float32), retry=True)
            return list(map(float, rows))

        async with MicroBatcher(infer, max_batch_size=8, max_concurrent_batches=2) as batcher:
            answers = await asyncio.gather(*(batcher.submit(float(number)) for number in range(100)))
        assert answers == [2.0 * number for number in range(100)]
        assert all(each.answered for each in cluster.statistics().replicas)


@pytest.mark.heavy
@pytest.mark.asyncio
async def test_cancelled_opening_and_exceptions_in_the_block_leave_nothing(tmp_path: Path) -> None:
    before = children()

    async def opening() -> None:
        async with open_cluster("local", replicas=2):
            await asyncio.Event().wait()

    for delay in (0.0, 0.05, 0.2):
        task = asyncio.create_task(opening())
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert children() == before
    log = tmp_path / "log"
    with pytest.raises(KeyError):
        async with open_cluster("local", replicas=2) as cluster:
            await cluster.spawn(Service, log)
            raise KeyError
    assert lines(log) == ["entered"] * 2 + ["left"] * 2
    assert children() == before
