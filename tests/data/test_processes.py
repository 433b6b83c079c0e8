"""Worker processes: shared memory, lost workers, timeouts, errors, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import mmap
import multiprocessing.process
import os
import platform
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, InvalidArgumentError, InvalidTypeError
from aiocuda._processes._main_guard import _guarded_lines
from aiocuda.data import DataLoader, SharedMemoryError, Shuffle, WorkerLostError, _epoch, sync_loader
from aiocuda.data._fields import Layout
from aiocuda.data._sharing import SharedFile, SharedSlots, available_bytes
from aiocuda.device import _loop_state
from aiocuda.errors import DriverError
from aiocuda.lowlevel import resources_of
from tests.data.samples import (
    FIELDS,
    Adds,
    BadSampleError,
    DiesAt,
    DiesAtStart,
    DiesOnce,
    LoadsOnce,
    LoadsSlowly,
    NotLoadedError,
    Poisons,
    Redraws,
    Squares,
    Unpicklable,
    arrays,
    counts_page_faults,
    dies_after_the_first,
    first_item,
    hangs_at_three,
    has_library,
    large,
    raises_unpicklable,
    refuses_fives,
    write,
    writes_its_process,
)
from tests.helpers import PATIENCE, UVLOOP, Latch, open_peer, quickly, until
from tests.project.tree import ROOT

pytestmark = pytest.mark.slow


def loader(device: Device, source: Any, decode: Any, **options: Any) -> DataLoader:
    return DataLoader(
        device, source, **{"fields": FIELDS, "decode": decode, "workers": 2, "executor": "process", **options}
    )


async def everything(loader: DataLoader, field: Any = "y") -> list[Any]:
    return [
        each async for batch in loader for each in (await batch.stream.download(batch[field])).tolist()
    ]  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["map", "iterable"])
async def test_processes_decode_into_memory_that_they_share(device: Device, kind: str) -> None:
    source: Any = Squares(23) if kind == "map" else iter([number**2 for number in range(23)])
    async with loader(device, source, write, batch_size=4, workers=3) as each:
        assert await everything(each) == [2 * number**2 for number in range(23)]
        assert len(set(each.worker_pids)) == 3


@pytest.mark.asyncio
async def test_decoded_samples_are_sent_back_where_there_are_no_fields(device: Device) -> None:
    async with loader(device, range(9), arrays, fields=None, batch_size=2) as each:
        assert await everything(each) == [2 * number for number in range(9)]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["map", "iterable"])
async def test_large_samples_pass_the_pipes(device: Device, kind: str) -> None:
    """They are sent in pieces, in both directions."""
    source: Any = range(9) if kind == "map" else iter([np.full(1 << 17, number) for number in range(9)])
    async with loader(device, source, large if kind == "map" else first_item, fields=None, batch_size=2) as each:
        numbers = []
        async for batch in each:
            host = await batch.stream.download(batch["x"])
            assert (host == host[:, :1]).all()
            numbers += host[:, 0].tolist()
        assert numbers == list(range(9))


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_on_uvloop(executor: Any) -> None:
    async def main() -> list[int]:
        async with aiocuda.open_device(driver="host") as device:
            async with loader(device, range(20), write, batch_size=3, executor=executor) as each:
                return [index async for batch in each for index in batch.indices]

    pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=UVLOOP) as runner:
        assert runner.run(main()) == list(range(20))


@pytest.mark.asyncio
async def test_every_process_works_on_one_batch(device: Device) -> None:
    async with loader(device, range(24), writes_its_process, batch_size=12, workers=3) as each:
        async for batch in each:
            processes = set((await batch.stream.download(batch["x"]))[:, 0, 0].tolist())
            assert processes == set(map(float, np.array(each.worker_pids, np.float32)))


@pytest.mark.asyncio
async def test_processes_do_not_import_the_library(device: Device) -> None:
    """Its package, the module of the fork server, and those of the decoder, which need only NumPy."""
    async with loader(device, range(2), has_library, workers=1) as each:
        async for batch in each:
            assert not (await batch.stream.download(batch["x"])).any()
            assert (await batch.stream.download(batch["y"])).max() <= 11


# -- a source that changes between epochs ----------------------------------------------------------------------------


def drawn(source: Redraws) -> list[int]:
    return [source[index] for index in range(len(source))]


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{"executor": "thread"}, {"workers": 2}], ids=["threads", "processes"])
async def test_a_source_that_draws_again_is_the_new_one_in_each_epoch(device: Device, options: dict[str, Any]) -> None:
    source, decode = Redraws(), Adds(0)
    async with loader(device, source, decode, batch_size=1, **options) as each:
        source.redraw()  # also before the first epoch
        for _ in range(3):
            assert await everything(each) == drawn(source)
            source.redraw()
            assert await everything(each) == drawn(source)
            assert await everything(each) == drawn(source)
            source.redraw()
        decode.number = 1000
        assert await everything(each) == [1000 + number for number in drawn(source)]


@pytest.mark.asyncio
async def test_processes_that_are_replaced_have_the_new_source(device: Device) -> None:
    source = Redraws()
    async with loader(device, source, Adds(0), batch_size=1, restarts=2) as each:
        source.redraw()
        assert await everything(each) == drawn(source)
        before = each.worker_pids
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: each.statistics().restarts == 2 and not set(before) & set(each.worker_pids))
        assert await everything(each) == drawn(source)


@pytest.mark.asyncio
async def test_a_large_source_stays_as_it_was(device: Device) -> None:
    source = Redraws(nbytes=1 << 20)
    before = drawn(source)
    async with loader(device, source, Adds(0), batch_size=1) as each:
        source.redraw()
        assert await everything(each) == before


@pytest.mark.asyncio
async def test_a_source_that_cannot_be_pickled_any_more_stays_as_it_was(device: Device) -> None:
    source = Redraws()
    async with loader(device, source, Adds(0), batch_size=1) as each:
        before = drawn(source)
        source.redraw()
        source.large = memoryview(b"")  # type: ignore[assignment]  # as a file that `__getitem__` has opened
        assert await everything(each) == before


@pytest.mark.asyncio
async def test_a_changed_source_that_a_process_cannot_load_fails_its_samples(device: Device) -> None:
    decode = Adds(0)
    async with loader(device, Redraws(), decode, batch_size=1) as each:
        assert len(await everything(each)) == 6
        decode.refuses = True
        with pytest.raises(LookupError, match="not loaded") as caught:
            await everything(each)
        assert "when a worker process of the loader loaded the changed source and decode=" in caught.value.__notes__
        decode.refuses = False
        assert len(await everything(each)) == 6


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_exception_of_a_process_reaches_the_consumer_with_its_traceback(device: Device) -> None:
    async with loader(device, range(1, 9), refuses_fives, batch_size=2) as each:
        with pytest.raises(ValueError, match="5 is a multiple of five") as caught:
            await everything(each)
        notes = "\n".join(caught.value.__notes__)
        assert "at sample 4 of the loader's source" in notes
        assert "in refuses_fives" in notes
    async with loader(device, range(12), refuses_fives, batch_size=4, on_error="skip") as each:
        assert await everything(each) == [2 * number for number in range(12) if number % 5]
        assert each.statistics().skipped == 3


@pytest.mark.asyncio
async def test_an_exception_that_cannot_be_pickled_comes_as_text(device: Device) -> None:
    async with loader(device, range(3), raises_unpicklable) as each:
        with pytest.raises(RuntimeError, match=r"BadSampleError: no 0 .*cannot be pickled") as caught:
            await everything(each)
        assert not isinstance(caught.value, BadSampleError)


@pytest.mark.asyncio
async def test_what_cannot_be_pickled_is_refused_at_the_call(device: Device) -> None:
    def local(sample: Any, out: Any) -> None: ...

    for decode in (local, lambda sample, out: None):
        with pytest.raises(InvalidTypeError, match=r"cannot be pickled: .*at the top of a module instead of lambdas"):
            loader(device, range(3), decode)
    with (ROOT / "README.md").open() as file, pytest.raises(InvalidTypeError, match="open files in the worker"):
        loader(device, [file], write)


@pytest.mark.asyncio
async def test_a_sample_that_cannot_be_pickled_fails_alone(device: Device) -> None:
    samples = [0, 1, lambda: 2, 3, Unpicklable(StopAsyncIteration), Unpicklable(asyncio.CancelledError), 6]
    async with loader(device, iter(samples), write, on_error="skip") as each:
        assert await everything(each) == [0, 2, 6, 12]


def test_a_main_module_without_a_guard_is_refused(tmp_path: Path) -> None:
    body = """
        async with aiocuda.open_device(driver="host") as device:
            async with DataLoader(device, range(3), fields={"x": ((), "i8")}, workers=1, executor="process") as loader:
                print([batch.indices async for batch in loader])
    """
    head = "import asyncio, aiocuda\nfrom aiocuda.data import DataLoader\nasync def main():" + body + "\n"
    for name, tail, expected in (
        ("unguarded", "asyncio.run(main())\n", "below `if __name__ == '__main__':`"),
        ("guarded", "if __name__ == '__main__':\n    asyncio.run(main())\n", "[(0,), (1,), (2,)]"),
    ):
        script = tmp_path / f"{name}.py"
        script.write_text(head + tail, encoding="utf-8")
        ended = run(script)
        assert expected in ended.stdout + ended.stderr, (name, ended.stderr)
        assert (ended.returncode == 0) == (name == "guarded")


@pytest.mark.asyncio
async def test_a_daemonic_process_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "daemon", True)
    cure = "this process is daemonic, .*: start it with daemon=False, or use executor='thread'$"
    with pytest.raises(InvalidArgumentError, match=cure):
        loader(device, range(3), write)
    with pytest.raises(InvalidArgumentError, match=cure):
        sync_loader(range(3), decode=write, fields=FIELDS, workers=1, executor="process")


@pytest.mark.parametrize("module", ["work", "__main__"])
def test_a_package_that_is_run_needs_no_guard(tmp_path: Path, module: str) -> None:
    """Worker processes do not import its ``__main__.py``, so they cannot use functions from there."""
    package = tmp_path / "program"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "work.py").write_text(
        "import asyncio, aiocuda\nfrom aiocuda.data import DataLoader\n"
        "def decode(sample, out):\n    out['x'][...] = sample\n"
        "async def main(decode):\n"
        "    options = {'fields': {'x': ((), 'i8')}, 'decode': decode, 'workers': 1, 'executor': 'process'}\n"
        "    async with aiocuda.open_device(driver='host') as device:\n"
        "        async with DataLoader(device, range(3), **options) as loader:\n"
        "            print([batch.indices async for batch in loader])\n",
        encoding="utf-8",
    )
    own = "def decode(sample, out): ...\n" if module == "__main__" else "from program.work import decode\n"
    (package / "__main__.py").write_text(
        f"import asyncio\nfrom program.work import main\n{own}asyncio.run(main(decode))\n", encoding="utf-8"
    )
    ended = run(tmp_path, "-m", "program")
    expected = "[(0,), (1,), (2,)]" if module == "work" else "or __main__.py, which other processes do not import"
    assert expected in ended.stdout + ended.stderr, ended.stderr
    assert (ended.returncode == 0) == (module == "work")


def test_lines_below_a_guard() -> None:
    assert _guarded_lines(__file__) == []
    assert _guarded_lines("<stdin>") is None


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script; or, for a directory, Python with these arguments."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *([] if script.is_dir() else [str(script)]), *arguments],
        cwd=script if script.is_dir() else None,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# -- lost workers ----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("exit_code", [None, 7, 0])
async def test_a_lost_worker_is_replaced_and_its_samples_are_decoded_again(
    device: Device, tmp_path: Path, exit_code: int | None
) -> None:
    decode = DiesOnce(13, tmp_path / "mark", exit_code)
    async with loader(device, range(30), decode, batch_size=4, workers=2, restarts=1) as each:
        assert await everything(each) == [2 * number for number in range(30)]
        assert each.statistics().restarts == 1
    assert each.statistics().restarts == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(("restarts", "tries"), [(0, "once"), (1, "2 times"), (5, "6 times")])
async def test_a_worker_that_is_lost_too_often_raises(device: Device, restarts: int, tries: str) -> None:
    async with loader(device, range(8), DiesAt(3), restarts=restarts) as each:
        with pytest.raises(
            WorkerLostError, match=f"exit code 7 while it was decoding sample 3, which was tried {tries}, and restarts="
        ) as caught:
            await everything(each)
        assert (caught.value.index, caught.value.exit_code) == (3, 7)
        assert each.statistics().restarts == restarts
        assert each.statistics().skipped == 0


def skipping(on_error: str, seen: list[tuple[BaseException, int]]) -> Any:
    return "skip" if on_error == "skip" else lambda error, index: seen.append((error, index))


@pytest.mark.asyncio
@pytest.mark.parametrize("restarts", [0, 1, 5])
@pytest.mark.parametrize(("ordered", "on_error"), [(True, "skip"), (False, "function")])
async def test_a_sample_that_ends_its_workers_is_skipped(
    device: Device, restarts: int, ordered: bool, on_error: str
) -> None:
    seen: list[tuple[Any, int]] = []
    async with loader(
        device, range(40), DiesAt(5, 22), restarts=restarts, ordered=ordered, on_error=skipping(on_error, seen),
        batch_size=4, workers=3,
    ) as each:  # fmt: skip
        delivered = await everything(each)
        statistics = each.statistics()
    expected = [2 * number for number in range(40) if number not in (5, 22)]
    assert (delivered if ordered else sorted(delivered)) == expected
    assert sorted(statistics.fatal) == [5, 22]
    assert statistics.skipped == 2
    assert statistics.samples == 38
    assert statistics.restarts == 4  # two for each, and none counts
    if on_error == "function":
        assert sorted(index for _, index in seen) == [5, 22]
        for error, index in seen:
            assert isinstance(error, WorkerLostError)
            assert (error.index, error.exit_code) == (index, 7)
            assert f"sample {index} has ended 2 worker processes of the loader, the last one with" in str(error)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["iterable", "without fields"])
async def test_a_sample_that_is_sent_and_ends_its_workers_is_skipped(device: Device, kind: str) -> None:
    source: Any = iter(range(10, 22)) if kind == "iterable" else range(10, 22)
    options: dict[str, Any] = {} if kind == "iterable" else {"fields": None}
    async with loader(device, source, DiesAt(10, 17), **options, restarts=0, on_error="skip", batch_size=3) as each:
        assert await everything(each) == [2 * number for number in range(11, 22) if number != 17]
        assert sorted(each.statistics().fatal) == [0, 7]


@pytest.mark.asyncio
async def test_no_sample_is_skipped_for_another_one(device: Device) -> None:
    """A process ends at a sample since an earlier one of the same request has damaged its memory."""
    async with loader(
        device, range(64), Poisons(40), restarts=100, on_error="skip", batch_size=16, workers=1
    ) as each:  # fmt: skip
        assert await everything(each) == [2 * number for number in range(64)]
        statistics = each.statistics()
    assert (statistics.skipped, statistics.fatal) == (0, ())
    assert statistics.restarts > 0


@pytest.mark.asyncio
async def test_a_restart_counts_if_its_sample_succeeds(device: Device, tmp_path: Path) -> None:
    """Then the sample was not the reason, and the next process may end at any other one."""
    decode = DiesOnce(3, tmp_path / "mark")
    async with loader(device, range(8), decode, restarts=0, on_error="skip") as each:
        with pytest.raises(
            WorkerLostError,
            match="exit code -9 while it was decoding sample 3, which another process has decoded, and restarts=",
        ) as caught:
            await everything(each)
        assert (caught.value.index, caught.value.exit_code) == (3, -signal.SIGKILL)
        assert each.statistics().skipped == 0
        with pytest.raises(WorkerLostError):  # a process may end at any time, and no restart is left
            await everything(each)
    (tmp_path / "mark").unlink()
    async with loader(device, range(8), decode, restarts=1, on_error="skip") as each:
        assert await everything(each) == [2 * number for number in range(8)]
        assert each.statistics().restarts == 1


@pytest.mark.asyncio
async def test_few_samples_of_an_epoch_are_skipped_since_they_end_workers(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_epoch, "MOST_FATAL", 2)
    bad = DiesAt(2, 5, 6)
    async with loader(device, range(9), bad, on_error="skip", prefetch=1) as each:
        seen: list[int] = []
        with pytest.raises(
            WorkerLostError, match=r"sample 6 has ended 2 worker .* 2 samples of this epoch have done that before"
        ) as caught:
            async for batch in each:
                seen += batch.indices
        assert seen == [0, 1, 3, 4]
        assert (caught.value.index, caught.value.exit_code) == (6, 7)
        assert each.statistics().fatal == (2, 5)
        each.load_state_dict(each.state_dict())  # behind batch 4: the others may be skipped in another epoch
        assert await everything(each) == [14, 16]
        assert each.statistics().fatal == (2, 5, 6)


@pytest.mark.heavy
@pytest.mark.asyncio
async def test_sixteen_samples_of_an_epoch_are_skipped_since_they_end_workers(device: Device) -> None:
    seen: list[tuple[Any, int]] = []
    async with loader(
        device, range(40), DiesAt(*range(2, 36, 2)), restarts=0, on_error=skipping("function", seen), workers=4
    ) as each:
        with pytest.raises(WorkerLostError, match="16 samples of this epoch have done that before") as caught:
            await everything(each)
        fatal = each.statistics().fatal
        assert len(fatal) == 16
        assert [index for _, index in seen] == list(fatal)
        assert {*fatal, caught.value.index} == set(range(2, 36, 2))


@pytest.mark.asyncio
async def test_a_loader_goes_on_behind_a_sample_that_ends_its_workers(device: Device) -> None:
    options: dict[str, Any] = {
        "restarts": 0, "on_error": "skip", "batch_size": 3, "shuffle": Shuffle(seed=1), "ordered": True,
    }  # fmt: skip
    async with loader(device, range(24), write, **options) as each:
        order = await everything(each)
    bad = order[4] // 2
    first: list[int] = []
    async with loader(device, range(24), DiesAt(bad), **options) as each:
        async for batch in each:
            first += (await batch.stream.download(batch["y"])).tolist()
            if batch.number == 2:
                state = each.state_dict()
                break
    async with loader(device, range(24), DiesAt(bad), **options) as each:
        each.load_state_dict(state)
        rest = await everything(each)
        assert each.statistics().fatal == ()
    assert first == [number for number in order[:9] if number != 2 * bad]
    assert rest == order[9:]


@pytest.mark.asyncio
async def test_an_epoch_that_is_left_while_a_sample_ends_its_workers(device: Device) -> None:
    async with loader(
        device, range(12), DiesAt(1), restarts=0, on_error="skip", batch_size=1, workers=2, prefetch=4
    ) as each:
        for number in range(3):
            async for batch in each.epoch(number):
                assert batch.indices == (0,)
                break
        assert await everything(each) == [2 * number for number in range(12) if number != 1]


@pytest.mark.heavy
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(12))
async def test_random_samples_that_end_their_workers(device: Device, seed: int) -> None:
    """Every other sample is delivered once, also with errors and a break between."""
    chance = random.Random(f"aiocuda fatal samples {seed}")
    count, bad = chance.choice([7, 30, 90]), set[int]()
    bad.update(chance.randrange(count) for _ in range(chance.randint(1, 4)))
    options: dict[str, Any] = {
        "batch_size": chance.choice([1, 3, 8, 40]), "workers": chance.randint(1, 4), "prefetch": chance.randint(1, 4),
        "ordered": chance.random() < 0.5, "restarts": chance.choice([0, 1, 5]), "on_error": "skip",
        "shuffle": Shuffle(seed) if chance.random() < 0.5 else None,
    }  # fmt: skip
    if chance.random() < 0.4:
        options["fields"] = None
    stop = chance.randint(0, 3)
    first: list[int] = []
    async with loader(device, range(count), DiesAt(*bad), **options) as each:
        async for batch in each.epoch(0):
            if batch.number == stop:
                break
        batches = [batch.indices async for batch in each.epoch(1)]
        iterator = aiter(each.epoch(2))
        for _ in range(stop):
            batch_or_none = await anext(iterator, None)
            first += () if batch_or_none is None else batch_or_none.indices
        state = each.state_dict()
    good = [number for number in range(count) if number not in bad]
    assert sorted(index for indices in batches for index in indices) == good
    async with loader(device, range(count), DiesAt(*bad), **options) as each:
        each.load_state_dict(state)
        if state["epoch"] == 2:
            first += [index async for batch in each for index in batch.indices]
    assert sorted(first) == good


@pytest.mark.asyncio
@pytest.mark.parametrize("on_error", ["raise", "skip"])
async def test_whatever_a_process_raises_at_its_start_reaches_the_consumer(
    device: Device, tmp_path: Path, on_error: Any
) -> None:
    async with loader(device, range(8), LoadsOnce(tmp_path / "mark"), workers=1, on_error=on_error) as each:
        with pytest.raises(NotLoadedError):
            await quickly(everything(each))


@pytest.mark.asyncio
@pytest.mark.parametrize("on_error", ["raise", "skip"])
async def test_a_process_that_ends_while_it_starts_is_replaced_like_any_other(
    device: Device, tmp_path: Path, on_error: Any
) -> None:
    decode = DiesAtStart(tmp_path, 3)
    async with loader(device, range(8), decode, workers=1, restarts=4, on_error=on_error) as each:
        assert await quickly(everything(each)) == [2 * number for number in range(8)]
        assert each.statistics().restarts == 4


@pytest.mark.asyncio
async def test_processes_that_end_while_they_start_use_up_the_restarts(device: Device, tmp_path: Path) -> None:
    async with loader(device, range(8), DiesAtStart(tmp_path, 9), workers=1, restarts=3) as each:
        with pytest.raises(WorkerLostError, match=r"exit code -9 \(SIGKILL\) before it was ready") as caught:
            await quickly(everything(each))
        assert each.statistics().restarts == 3
    assert "started in place of another one, and restarts= allows no more processes" in caught.value.__notes__[0]


@pytest.mark.asyncio
async def test_an_epoch_that_has_ended_does_not_decode_its_samples_again(device: Device) -> None:
    """Otherwise the end of the loader would wait for all restarts, one after the other."""
    async with loader(device, range(3), dies_after_the_first, restarts=10_000) as each:
        assert (await anext(aiter(each))).indices == (0,)
    assert each.statistics().restarts < 100


@pytest.mark.asyncio
@pytest.mark.parametrize("restarts", [0, 2])
async def test_a_process_that_does_not_return_ends_with_its_epoch(device: Device, restarts: int) -> None:
    """It may still write to a slot, so no later batch may have it."""
    device.drain_timeout = 0.2
    async with loader(device, range(2, 14), hangs_at_three, prefetch=2, restarts=restarts) as each:
        async for batch in each:
            assert batch.indices == (0,)
            break
        device.drain_timeout = PATIENCE
        await until(lambda: len(each._run._loading) == 2, "the sample that hangs")  # type: ignore[union-attr]
        device.drain_timeout = 0.2
        if not restarts:
            with pytest.raises(WorkerLostError, match="was killed while it was decoding sample 1, since the epoch"):
                await anext(each.epoch(1))
            return
        batch = await anext(each.epoch(1))
        assert (await batch.stream.download(batch["y"])).tolist() == [4]
        assert each.statistics().restarts == 1


@pytest.mark.asyncio
async def test_a_sample_that_its_process_has_not_begun_exceeds_its_timeout(device: Device) -> None:
    async with loader(device, range(9), write, workers=1, timeout=0.3, restarts=0, prefetch=1, on_error="skip") as each:
        async for batch in each:
            if batch.number == 3:
                await until(lambda: not each._run._decoding, "the next batch")  # type: ignore[union-attr]
                os.kill(each.worker_pids[0], signal.SIGSTOP)
                break
        iterator = aiter(each)
        with pytest.raises(WorkerLostError, match=r"was killed, since sample 0 took more than the timeout"):
            await anext(iterator)


@pytest.mark.asyncio
async def test_memory_of_a_refused_upload_is_used_again() -> None:
    """There is only one slot, and no other memory that processes can write to."""
    async with open_peer() as (peer, device), loader(device, range(4), write, workers=1, prefetch=1) as each:
        for _ in range(3):
            peer.refuse("upload")
            with pytest.raises(DriverError):
                await everything(each)
        peer.before.clear()
        assert await everything(each) == [0, 2, 4, 6]


@pytest.mark.asyncio
async def test_a_process_that_is_killed_between_samples(device: Device) -> None:
    async with loader(device, range(6), write, workers=1, prefetch=1, restarts=1) as each:
        seen: list[int] = []
        async for batch in each:
            seen += batch.indices
            if batch.number == 2:
                os.kill(each.worker_pids[0], signal.SIGKILL)
        assert seen == list(range(6))
        assert each.statistics().restarts == 1


@pytest.mark.asyncio
async def test_a_process_that_exceeds_the_timeout_is_killed(device: Device) -> None:
    async with loader(device, range(6), hangs_at_three, timeout=0.5, restarts=1, on_error="skip") as each:
        assert await everything(each) == [2 * number for number in range(6) if number != 3]
        assert each.statistics().restarts == 1
        assert each.statistics().skipped == 1
    async with loader(device, range(6), hangs_at_three, timeout=0.5) as each:
        with pytest.raises(TimeoutError, match=r"more than the timeout of 0\.5 s") as caught:
            await everything(each)
        assert "at sample 3 of the loader's source" in caught.value.__notes__


@pytest.mark.heavy
@pytest.mark.asyncio
async def test_fork_server_that_is_killed_is_replaced(device: Device) -> None:
    """Its processes go on, and those that take their places are forked by another server."""
    async with loader(device, range(60), write, batch_size=2, restarts=2) as each:
        before = each.worker_pids
        seen: list[int] = []
        async for batch in each:
            seen += batch.indices
            if batch.number == 2:
                os.kill(parent_of(before[0]), signal.SIGKILL)
            elif batch.number == 6:
                os.kill(before[0], signal.SIGKILL)
        assert seen == list(range(60))
        await until(lambda: before[0] not in each.worker_pids)
        assert each.statistics().restarts == 1
        pids = each.worker_pids
        assert before[1] in pids
    await until(lambda: not any(map(runs, pids)))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# -- shared memory ---------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_too_little_memory_is_an_error_with_the_cure(device: Device) -> None:
    each = loader(device, range(6), write, fields={"x": ((1 << 30,), "f8")}, batch_size=1 << 12)
    with pytest.raises(SharedMemoryError, match=r"reduce batch_size= or prefetch=") as caught:
        await each.__aenter__()
    assert caught.value.requested > 1 << 40
    assert isinstance(caught.value, MemoryError)


def test_memory_that_the_system_refuses_is_an_error() -> None:
    """Although the figures say that there is enough."""
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(SharedMemoryError, match=r"take 4\.19 MB of shared memory"):
            SharedFile("too-large", 1 << 22)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


def test_available_bytes_are_the_least_of_machine_and_group(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("900000\n")
    (group / "memory.stat").write_text("anon 700000\ninactive_file 150000\n")
    assert available_bytes(tmp_path) == 250_000


@pytest.mark.asyncio
@pytest.mark.parametrize("turns_before", [0, 1, 3, 50])
async def test_a_loader_that_is_cancelled_while_it_opens_leaves_nothing(device: Device, turns_before: int) -> None:
    async def one() -> None:
        each = loader(device, range(12), LoadsSlowly())
        opening = asyncio.ensure_future(each.__aenter__())
        for _ in range(turns_before):
            await asyncio.sleep(1e-3)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    async with loader(device, range(2), write):  # starts what stays for the whole process: the fork server
        pass
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    await one()

    def left() -> int:
        gc.collect()
        return shared_files() + len(os.listdir("/proc/self/fd")) - files + len(multiprocessing.active_children())

    await until(lambda: left() <= 0, "the end of all that the loader has opened")


def held() -> tuple[int, int, int]:
    """The descriptors, mappings and processes of this process that a loader may leave behind."""
    return len(os.listdir("/proc/self/fd")), shared_files(), len(multiprocessing.active_children())


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Fails:
    """Raises at its ``at``-th call. Calls a function of the standard library at the others."""

    def __init__(self, function: Callable[..., Any], at: int) -> None:
        self.function = function
        self.error = OSError(errno.EAGAIN, "Resource temporarily unavailable")
        self.calls_left = at

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls_left -= 1
        if not self.calls_left:
            raise self.error
        return self.function(*args, **options)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        *((multiprocessing.process.BaseProcess, "start", at) for at in (1, 2, 3)),
        *((socket, "socketpair", at) for at in (1, 2, 3)),
        *((mmap, "mmap", at) for at in (1, 2)),
    ],
)
async def test_a_worker_that_cannot_start_leaves_nothing(
    device: Device, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int
) -> None:
    async with loader(device, range(2), write):  # starts what stays for the whole process: the fork server
        pass
    streams = device.statistics().streams
    with without_garbage_collection():
        before = held()
        for _ in range(2):
            fails = Fails(getattr(owner, name), at)
            with monkeypatch.context() as patched, pytest.raises(OSError, match="temporarily unavailable") as caught:
                # A function, since it is called as a method, too.
                patched.setattr(owner, name, lambda *args, fails=fails, **options: fails(*args, **options))
                await loader(device, range(12), write, workers=3).__aenter__()
            assert caught.value is fails.error
            assert held() == before
        assert device.statistics().streams == streams
    async with loader(device, range(4), write, workers=3) as each:
        assert await everything(each) == [0, 2, 4, 6]


@pytest.mark.asyncio
@pytest.mark.parametrize(("owner", "name"), [(multiprocessing.process.BaseProcess, "start"), (socket, "socketpair")])
async def test_a_worker_that_cannot_be_replaced_leaves_nothing(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str
) -> None:
    async with loader(device, range(2), write):
        pass
    with without_garbage_collection():
        before = held()
        fails = Fails(getattr(owner, name), 3)
        monkeypatch.setattr(owner, name, lambda *args, **options: fails(*args, **options))
        async with loader(device, range(9), DiesOnce(3, tmp_path / "mark")) as each:
            with pytest.raises(OSError, match="temporarily unavailable") as caught:
                await everything(each)
            assert caught.value is fails.error
        del each
        assert held() == before


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["to the end", "left", "skips", "raises", "without fields", "loses a worker"])
async def test_a_closed_loader_keeps_no_descriptor(device: Device, tmp_path: Path, how: str) -> None:
    """The garbage collector may come late, or not at all: its descriptors would add up."""
    different: dict[str, dict[str, Any]] = {
        "skips": {"decode": refuses_fives, "on_error": "skip"},
        "raises": {"decode": refuses_fives},
        "without fields": {"decode": arrays, "fields": None},
        "loses a worker": {"decode": DiesOnce(3, tmp_path / "mark")},
    }

    async def one() -> None:
        async with loader(device, range(12), **{"decode": write, "batch_size": 2, **different.get(how, {})}) as each:
            with contextlib.suppress(ValueError):
                async for batch in each:
                    if how == "left" and batch.number == 2:
                        break

    await one()  # starts what stays for the whole process: the fork server
    (tmp_path / "mark").unlink(missing_ok=True)
    with without_garbage_collection():
        before = held()
        await one()
        assert held() == before


@pytest.mark.heavy
@pytest.mark.asyncio
async def test_nothing_is_left_behind(device: Device) -> None:
    async def one(decode: Any) -> list[int]:
        async with loader(device, range(12), decode, batch_size=2) as each:
            async for batch in each:
                if batch.number == 3:
                    break
            return each.worker_pids

    await one(write)  # starts what stays for the whole process: the fork server
    gc.collect()
    files, memory = len(os.listdir("/proc/self/fd")), shared_files()
    pids = [pid for _ in range(3) for pid in await one(write)]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    assert shared_files() == memory == 0
    assert not [pid for pid in pids if runs(pid)]


@pytest.mark.asyncio
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such thresholds")
async def test_temporary_arrays_of_a_decoder_cause_no_page_faults(device: Device) -> None:
    """Otherwise malloc would give each array back to the system, and each of its 256 pages would fault again."""
    async with loader(device, range(12), counts_page_faults, batch_size=12, workers=1) as each:
        async for batch in each:
            faults = await batch.stream.download(batch["y"])
    assert max(faults[4:]) < 100


def test_the_memory_of_slots_is_given_back_by_the_close_of_their_file() -> None:
    """An unmapping would free it, too, but with the GIL held. The status of the workers can still be read."""
    shared = SharedSlots(Layout({"x": ((1 << 20,), np.dtype(np.uint8))}, 2), slots=3, workers=2)
    descriptor = os.dup(shared.file.fd)
    try:
        assert os.fstat(descriptor).st_blocks * 512 >= 6 << 20
        shared.close()
        assert os.fstat(descriptor).st_blocks * 512 <= 1 << 16
    finally:
        os.close(descriptor)
    assert shared.row_of(0) is None


@pytest.mark.asyncio
async def test_all_slots_are_unlocked_at_one_idle_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlocking waits for all work, and holds the launches of all threads."""
    monkeypatch.setattr(_loop_state, "IDLE_SECONDS", PATIENCE)
    async with open_peer() as (peer, device):
        stream = device.stream()
        running: list[int] = []
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            each = loader(device, range(9), write, prefetch=4)
            await each.__aenter__()
            peer.before["unpin"] = lambda address: running.append(latch.running)
            closing = asyncio.create_task(each.aclose())
            waiting = resources_of(device).loop_states.here().reactor.idle_moments._jobs
            await until(lambda: len(waiting) == 4, "the ends of the slots")
            assert not running
            latch.release()
            await quickly(closing)
        assert running == [0] * 4


def shared_files() -> int:
    return sum("memfd:aiocuda-loader" in line for line in Path("/proc/self/maps").read_text().splitlines())


#: The program prints the process ids of its workers, and then waits.
WAITS = """
import asyncio, sys
import aiocuda
from aiocuda.data import DataLoader
from tests.data.samples import FIELDS, hangs_at_three, write

async def main():
    async with aiocuda.open_device(driver="host") as device:
        decode = hangs_at_three if sys.argv[1] == "busy" else write
        async with DataLoader(
            device, range(100), fields=FIELDS, decode=decode, workers=2, executor="process"
        ) as loader:
            print(*loader.worker_pids, flush=True)
            async for batch in loader:
                await asyncio.sleep(3600 if batch.number == 2 else 0)

if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("what", ["idle", "busy"])
@pytest.mark.heavy
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, what: str, how: signal.Signals) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS, encoding="utf-8")
    program = subprocess.Popen(
        [sys.executable, str(script), what],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.3)  # noqa: TID251 - until one of them is busy, or all are idle; both are right
        if how is signal.SIGINT:
            os.killpg(program.pid, how)  # as a terminal does
        else:
            program.send_signal(how)
        code = program.wait(PATIENCE)
        assert code == (130 if how is signal.SIGINT else -how)
        deadline = time.monotonic() + PATIENCE
        while [pid for pid in pids if runs(pid)]:
            assert time.monotonic() < deadline, "a worker process is left"
            time.sleep(0.01)  # noqa: TID251 - the system takes its time
    finally:
        program.kill()
        program.wait()
        program.stdout.close()  # type: ignore[union-attr]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("options", "match"), [({"workers": 0}, "needs workers="), ({"executor": "thead"}, "'thead'")])
@pytest.mark.asyncio
async def test_wrong_options(device: Device, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        loader(device, range(3), write, **options)


def test_a_loader_in_a_loop_of_another_thread() -> None:
    async def main() -> list[Any]:
        async with aiocuda.open_device(driver="host") as device, loader(device, range(5), write) as each:
            return await everything(each)

    async def outside() -> list[Any]:
        return await asyncio.to_thread(asyncio.run, main())

    assert asyncio.run(outside()) == [0, 2, 4, 6, 8]
