"""`sync_loader`: batches for a training loop that blocks its thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    CleanupWarning,
    ClosedError,
    HostDriverWarning,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
)
from aiocuda.data import Shuffle, SyncBatch, SyncBatches, WorkerLostError, sync_loader
from aiocuda.driver.cuda import _probe
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Program
from tests.data.samples import FIELDS, always_dies, refuses_fives, write, writes_its_process
from tests.helpers import LATCH, PATIENCE
from tests.project.tree import ROOT

pytestmark = pytest.mark.slow

ONE = (1, 1, 1)


def loader(source: Any, decode: Any = write, **options: Any) -> SyncBatches:
    return sync_loader(source, **{"driver": HostDriver(), "fields": FIELDS, "decode": decode, **options})


def values(batch: SyncBatch) -> list[Any]:
    return list(batch["y"].to_host().tolist())


def loader_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("aiocuda-sync", "aiocuda-loader"))
    ]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("aiocuda-sync"):
            thread.join(PATIENCE)
    assert not [name for name in loader_threads() if "sync" in name]


def test_a_plain_loop_gets_every_batch() -> None:
    with loader(range(10), batch_size=3, workers=2) as batches:
        assert len(batches) == 4
        for epoch in range(2):
            delivered = [(batch.number, batch.indices, values(batch)) for batch in batches]
            assert delivered == [
                (
                    number,
                    tuple(range(begin, min(begin + 3, 10))),
                    [2 * each for each in range(begin, min(begin + 3, 10))],
                )
                for number, begin in enumerate(range(0, 10, 3))
            ], epoch
        assert batches.statistics().batches == 8


def test_arrays_have_a_shape_and_a_dtype() -> None:
    with loader(range(4), batch_size=4) as batches:
        batch = next(iter(batches))
        array = batch["y"]
        assert array.shape[0] == len(array) == 4
        assert array.dtype == FIELDS["y"][1]
        assert array.nbytes == array.to_host().nbytes
        assert list(batch) == list(FIELDS)
        assert len(batch) == len(FIELDS)
        with pytest.raises(KeyError, match="has no field 'z'"):
            batch["z"]
        with pytest.raises(InvalidTypeError, match=r"<SyncArray .*> is device memory: use array\.to_host\(\)"):
            np.asarray(array)


def test_batches_are_loaded_while_the_step_blocks() -> None:
    """The step of batch 0 waits until batch 2 has been decoded: without overlap it would never end."""
    decoded = [threading.Event() for _ in range(6)]

    def decode(sample: int, out: Any) -> None:
        out["y"][...] = sample
        decoded[sample].set()

    with loader(range(6), decode, fields={"y": ((), np.int64)}) as batches:
        for batch in batches:
            assert decoded[min(batch.number + 2, 5)].wait(PATIENCE)


def test_break_and_a_new_loop_begin_the_next_epoch() -> None:
    with loader(range(12), batch_size=2, shuffle=Shuffle(seed=3)) as batches:
        whole = [batch.indices for batch in batches.epoch(1)]
        for batch in batches.epoch(0):
            if batch.number == 2:
                break
        assert [batch.indices for batch in batches] == whole
        iterator = iter(batches.epoch(1))
        assert next(iterator).indices == whole[0]
        assert [batch.indices for batch in iterator] == whole[1:]
        assert list(iterator) == []


def test_batches_of_an_epoch_that_was_left_for_another_one_have_ended() -> None:
    with loader(range(6), batch_size=2) as batches:
        left, other = iter(batches), iter(batches)
        next(left)
        assert next(other).number == 0
        with pytest.raises(ClosedError, match="another epoch of the loader was begun"):
            next(left)
        assert [batch.number for batch in other] == [1, 2]


def test_a_failure_after_the_end_of_a_loop_is_not_that_of_the_next_epoch() -> None:
    """The batch after the one in hand is requested ahead, and its sample is bad."""
    with loader(range(1, 10), refuses_fives) as batches:
        for batch in batches:
            if batch.number == 3:
                break
        assert next(iter(batches)).number == 0


def test_state_is_that_of_the_batch_in_hand() -> None:
    """The loader is ahead by a batch, and the state is not."""
    with loader(range(20), batch_size=2, shuffle=Shuffle(seed=1)) as batches:
        whole = [batch.indices for batch in batches]
    with loader(range(20), batch_size=2, shuffle=Shuffle(seed=1)) as batches:
        assert batches.state_dict()["position"] == 0
        for batch in batches:
            state = json.loads(json.dumps(batches.state_dict()))
            assert state["position"] == 2 * (batch.number + 1)
            if batch.number == 4:
                break
    with loader(range(20), batch_size=2, shuffle=Shuffle(seed=1)) as batches:
        batches.load_state_dict(state)
        assert [batch.indices for batch in batches] == whole[5:]
        assert batches.state_dict()["epoch"] == 1


def test_an_error_of_decode_is_raised_in_the_loop() -> None:
    with loader(range(1, 10), refuses_fives) as batches:
        delivered = []
        with pytest.raises(Exception, match="5") as caught:
            for batch in batches:
                delivered.append(batch.number)  # noqa: PERF401 - the loop raises
        assert delivered == [0, 1, 2, 3]
        assert "at sample 4 of the loader's source" in caught.value.__notes__


@pytest.mark.parametrize("kind", [TimeoutError, concurrent.futures.CancelledError])
def test_an_error_that_asyncio_converts_keeps_its_note_and_its_frames(kind: type[Exception]) -> None:
    error = kind("the server did not answer")

    def refuses(sample: int, out: Any) -> None:
        raise error

    with loader(range(1), refuses) as batches, pytest.raises(kind) as caught:
        next(iter(batches))
    assert caught.value is error
    assert error.__notes__ == ["at sample 0 of the loader's source"]
    assert "refuses" in [frame.name for frame in caught.traceback]


class Unreadable:
    """A sample whose array cannot be made."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __array__(self, *_: object, **__: object) -> Any:
        raise self.error("mine")


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
@pytest.mark.parametrize("place", ["on_error", "__array__"])
def test_no_function_of_the_program_ends_an_epoch_silently(place: str, error: type[Exception]) -> None:
    def on_error(failure: Exception, index: int) -> None:
        raise error("mine")

    samples: list[Any] = [*range(1, 5), Unreadable(error), *range(6, 11)]
    if place == "on_error":
        made = loader(range(1, 11), refuses_fives, on_error=on_error)
    else:
        made = loader(samples, lambda sample: {"y": sample}, fields=None)
    with made as batches:
        delivered = []
        with pytest.raises(RuntimeError, match=f"a function raised {error.__name__}") as caught:
            for batch in batches:
                delivered.append(batch.number)  # noqa: PERF401 - the loop raises
        assert delivered == [0, 1, 2, 3]
        assert isinstance(caught.value.__cause__, error)


def test_processes_decode() -> None:
    with loader(range(8), writes_its_process, batch_size=2, workers=2, executor="process") as batches:
        pids = {pid for batch in batches for pid in values(batch)}
        assert os.getpid() not in pids
    with (
        loader(range(8), always_dies, workers=2, executor="process", restarts=0) as batches,
        pytest.raises(WorkerLostError),
    ):
        list(batches)


def test_figures_are_there_after_the_block() -> None:
    with loader(range(8), batch_size=2) as batches:
        for batch in batches:
            values(batch)
    assert (len(batches), batches.statistics().batches) == (4, 4)
    assert batches.advice().workers >= 1
    assert batches.state_dict()["epoch"] == 1


def test_a_batch_says_why_it_is_not_valid() -> None:
    with loader(range(8), batch_size=2) as batches:
        each = iter(batches)
        freed, array = next(each), None
        array = freed["y"]
        freed.free()
        with pytest.raises(StaleHandleError, match="since it was freed: call"):
            array.to_host()
        late = next(each)
        next(each)
        with pytest.raises(StaleHandleError, match="since the next batch was requested, or the loader closed"):
            late["y"].to_host()


def test_an_exception_ends_the_thread() -> None:
    with pytest.raises(ZeroDivisionError), loader(range(100), workers=2) as batches:
        for batch in batches:
            values(batch)
            raise ZeroDivisionError
    with pytest.raises(ClosedError, match="make another one"):
        next(iter(batches))
    batches.close()


def test_it_must_be_entered_and_only_once() -> None:
    batches = loader(range(3))
    with pytest.raises(BusyError, match=r"with aiocuda\.data\.sync_loader"):
        next(iter(batches))
    with batches, pytest.raises(BusyError, match="entered once"):
        batches.__enter__()
    with pytest.raises(ClosedError, match="has been closed: make another one"):
        batches.__enter__()


def test_a_thread_whose_loop_has_a_device_is_refused() -> None:
    async def program() -> None:
        with loader(range(3)) as batches:
            assert [values(batch) for batch in batches] == [[0], [2], [4]]
        async with aiocuda.open_device(driver="host"):
            with pytest.raises(BusyError, match=r"async with aiocuda\.data\.DataLoader"), loader(range(3)):
                pass

    asyncio.run(program())


NOTEBOOK = """
import asyncio, functools
from aiocuda.data import sync_loader
from tests.data.samples import FIELDS, write

def decode(sample, out):
    write(sample, out)

def loader(decode):
    options = {"fields": FIELDS, "workers": 1, "executor": "process", "driver": "host"}
    return sync_loader(range(3), decode=decode, **options)

async def cell():
    with loader(write) as batches:
        print([int(batch["y"].to_host()[0]) for batch in batches])
    for function in decode, functools.partial(decode):
        try:
            with loader(function):
                print("taken")
        except TypeError as error:
            print(str(error).partition(" is defined in ")[2])

asyncio.run(cell())
"""


def test_a_cell_of_a_notebook_has_threads_and_the_functions_of_modules() -> None:
    """Its main module is no file, and its thread runs an event loop. A part of an object counts, too."""
    ended = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, cwd=ROOT, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
    )  # fmt: skip
    text = (
        "a notebook, an interactive session, `python -c` or __main__.py, which other processes do not import: put it "
        "into a module, or use executor='thread'"
    )
    assert ended.stdout.splitlines() == ["[0, 2, 4]", text, text]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, InvalidArgumentError),
        ({"worker": 2}, TypeError),
        ({"source": 3}, InvalidTypeError),
        ({"index": 99}, Exception),
        ({"driver": "metal"}, InvalidArgumentError),
    ],
)
def test_wrong_arguments_are_raised_at_the_start(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error), loader(**{"source": range(3), **options}):
        pass


def test_fallback_warning_names_the_line_that_enters_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOCUDA_DRIVER", raising=False)
    monkeypatch.setattr(_probe, "find", lambda: "there is none")
    batches = loader(range(3), driver="auto", batch_size=3)
    with pytest.warns(HostDriverWarning, match="there is none") as told:
        line = sys._getframe().f_lineno + 1
        with batches:
            assert [values(batch) for batch in batches] == [[0, 2, 4]]
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]


def test_a_batch_is_valid_until_the_next_one_unless_it_is_kept() -> None:
    with loader(range(12), batch_size=2) as batches:
        iterator = iter(batches)
        first = next(iterator).keep()
        second = next(iterator)
        next(iterator)
        for use in (lambda: second["y"].to_host(), second.keep, lambda: second.used_on(1), second["y"].__dlpack__):
            with pytest.raises(StaleHandleError, match=r"call batch\.keep\(\) before that"):
                use()
        assert values(first) == [0, 2]
        first.free()
        with pytest.raises(StaleHandleError):
            first["y"].to_host()
        next(iterator)


def test_a_batch_that_a_library_holds_is_kept() -> None:
    """A capsule stands for the tensor of a library."""
    driver = HostDriver()
    with loader(range(40), driver=driver) as batches:
        iterator = iter(batches)
        first = next(iterator)
        tensor = first["y"].__dlpack__(stream=-1)
        other = first["y"].__dlpack__(stream=-1)
        for _ in range(8):
            next(iterator)
        assert values(first) == [0]
        assert batches.statistics().kept == 1
        del tensor
        next(iterator)
        assert values(first) == [0]
        del other
        next(iterator)
        with pytest.raises(StaleHandleError):
            first["y"].to_host()


@pytest.mark.filterwarnings("ignore::aiocuda.errors.CleanupWarning")
def test_memory_that_a_library_holds_outlives_the_loader() -> None:
    with pytest.warns(CleanupWarning, match="other libraries hold them"), loader(range(4)) as batches:
        tensor = next(iter(batches))["y"].__dlpack__(stream=-1)
    del tensor


def test_memory_is_used_again_after_the_consumers_stream() -> None:
    """A slow kernel on a stream of the consumer reads a batch, while twelve later ones are delivered or waited for."""
    driver = HostDriver()
    gate = threading.Event()
    seen: list[int] = []

    def slow(address: Any) -> None:
        gate.wait(LATCH)
        seen.append(int(np.asarray(address).reshape(-1)[0]))

    with loader(range(100, 140), driver=driver, fields={"y": ((256,), np.int64)}, decode=write_all) as batches:
        iterator = iter(batches)
        batch = next(iterator)
        stream = driver.stream_create(0, 0)
        function = driver.load(0, Program("slow", "P", host=slow))
        buffer = batch._held.batch["y"]
        driver.launcher(stream, function, ONE, ONE, 0)((driver.argument(_span(buffer)),))
        batch.used_on(stream)
        threading.Timer(0.5, gate.set).start()  # the request of the batch that gets this memory waits for the kernel
        for _ in range(12):
            next(iterator)
        gate.set()
        driver.stream_synchronize(stream)
        driver.stream_destroy(stream)
    assert seen == [100]


def write_all(sample: int, out: Any) -> None:
    out["y"][...] = sample


def _span(buffer: Any) -> Any:
    from aiocuda.driver.protocol import Span

    return Span(buffer.address, buffer.shape, buffer.dtype)


PROGRAM = """
import sys
import numpy as np
from aiocuda.data import sync_loader

def decode(sample, out):
    out["y"][...] = sample

def main(how):
    batches = sync_loader(range(1000), driver="host", fields={"y": ((), np.int64)}, decode=decode, workers=2,
                          executor="process" if how == "process" else "thread")
    batches.__enter__()
    for batch in batches:
        if batch.number == 3:
            print("three", flush=True)
            if how == "raise":
                raise ZeroDivisionError
            break
    if how == "thread-waits":
        iterator = iter(batches)
        next(iterator)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize(
    "how", ["break", pytest.param("raise", marks=pytest.mark.heavy), pytest.param("process", marks=pytest.mark.heavy)]
)
def test_the_end_of_the_program_ends_the_thread(tmp_path: Any, how: str) -> None:
    """Without the end of the block, the program ends all the same."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(program), how], env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False,
        capture_output=True, text=True, timeout=PATIENCE + 20,
    )  # fmt: skip
    assert ended.stdout == "three\n", ended.stderr
    assert ended.returncode == (1 if how == "raise" else 0), ended.stderr
    assert ("ZeroDivisionError" in ended.stderr) == (how == "raise")


def test_a_loader_that_is_dropped_ends_its_thread() -> None:
    batches = loader(range(1000))
    batches.__enter__()
    iterator = iter(batches)
    next(iterator)
    del batches, iterator
    gc.collect()


@pytest.mark.parametrize("where", ["loop", "worker"])
def test_a_loader_is_collected_on_a_thread_of_its_own(where: str) -> None:
    """That thread cannot wait for the end of the loader."""
    inside, dropped, collected = threading.Event(), threading.Event(), threading.Event()

    def decode(sample: int, out: Any) -> None:
        write(sample, out)
        if sample == 3:
            inside.set()
            dropped.wait(LATCH)
            if where == "worker":
                gc.collect()
                collected.set()

    batches: Any = loader(range(1000), decode, workers=1, prefetch=3)
    thread = batches._thread
    gc.disable()
    try:
        batches.__enter__()
        batches.itself = batches
        next(iter(batches))
        assert inside.wait(PATIENCE)
        del batches
        if where == "loop":
            thread.call(gc.collect)
            collected.set()
        dropped.set()
        assert collected.wait(PATIENCE)
    finally:
        gc.enable()


def test_a_generator_of_samples_is_closed() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.set()

    with loader(source()) as batches:
        next(iter(batches))
    assert closed.wait(PATIENCE)


def test_progress_bars_know_the_length() -> None:
    rich = pytest.importorskip("rich.progress")
    with loader(range(10), batch_size=3) as batches:
        progress = rich.Progress(disable=True)
        assert [batch.number for batch in progress.track(batches, update_period=PATIENCE)] == [0, 1, 2, 3]
        assert progress.tasks[0].total == 4
        assert progress.tasks[0].finished


FORKED = """
import os, sys
from aiocuda import ForkedProcessError
from aiocuda.data import sync_loader

def in_child(use):
    child = os.fork()
    if not child:
        try:
            use()
        except ForkedProcessError as error:
            os._exit(0 if "make one in the child" in str(error) else 1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

with sync_loader(range(12), driver="host", batch_size=4) as batches:
    print(in_child(lambda: next(iter(batches))))
    iterator = iter(batches)
    first = next(iterator)  # the next one is being fetched
    print(in_child(lambda: next(iterator)), in_child(batches.statistics), in_child(first[0].to_host))
    if not (child := os.fork()):
        sys.exit()  # leaves the block, and ends the interpreter
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(first[0].to_host().tolist(), len(list(iterator)))
"""


def test_a_forked_child_gets_an_error() -> None:
    """It has no copy of the loader's thread, for which it would wait for ever. The parent goes on."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (run.stdout, run.stderr) == ("0\n0 0 0\n0\n[0, 1, 2, 3] 2\n", "")


# -- warnings about lines of the program -------------------------------------------------------------------------------


def test_an_epoch_without_a_batch_warns_at_the_line_of_the_loader() -> None:
    with pytest.warns(
        RuntimeWarning, match="no batch: 3 samples, batch_size=4, drop_last=True: make batch_size smaller"
    ) as caught:
        with sync_loader(range(3), driver=HostDriver(), batch_size=4, drop_last=True) as batches:
            assert list(batches) == []
    assert [each.filename for each in caught] == [__file__]


def test_the_rest_of_an_epoch_may_be_empty() -> None:
    with loader(range(4), batch_size=4) as batches:
        state = [batches.state_dict() for _ in batches][-1]
    with loader(range(4), batch_size=4) as batches:
        batches.load_state_dict(state)
        assert [len(list(batches)) for _ in range(2)] == [0, 1]


class Distributed:
    """In place of `torch.distributed`."""

    def __init__(self, ranks: int, rank: int = 0) -> None:
        self.get_world_size = lambda: ranks
        self.get_rank = lambda: rank
        self.is_available = self.is_initialized = lambda: ranks > 0


class RankSampler(list[int]):
    num_replicas = 2


def test_ranks_without_a_shard_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", Distributed(2))
    cure = r"each of 2 ranks loads all samples: shard=\(rank, 2\) divides them, and shard=\(0, 1\) says that"
    with pytest.warns(RuntimeWarning, match=cure) as caught, loader(range(4)) as batches:
        assert len(batches) == 4
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize("shard", [(0, 2), (1, 4), (3, 4)])
def test_a_shard_of_other_ranks_warns_once(monkeypatch: pytest.MonkeyPatch, shard: tuple[int, int]) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", Distributed(2, rank=1))
    cure = rf"shard=\({shard[0]}, {shard[1]}\) on rank 1 of 2 of torch.distributed: shard=\(1, 2\) is its part"
    with pytest.warns(RuntimeWarning, match=cure) as caught, loader(range(4), shard=shard) as batches:
        assert len(list(batches)) == len(batches)
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"shard": (0, 1)}),
        (2, {"shard": (0, 2)}),
        (4, {"shard": (1, 2)}),  # each part belongs to two ranks, which share a model
        (1, {"shard": (1, 2)}),
        (2, {"sampler": RankSampler([0, 1])}),
        (1, {}),
        (0, {}),
    ],
)
def test_no_shard_is_needed(monkeypatch: pytest.MonkeyPatch, ranks: int, options: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", Distributed(ranks))
    with loader(range(4), **options) as batches:
        assert len(list(batches)) == len(batches)
