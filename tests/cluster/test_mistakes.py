"""Common mistakes with a cluster: each gets an error that names the cure."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self

import pytest

import aiocuda
from aiocuda import InvalidTypeError
from aiocuda.cluster import RemoteError, ReplicaLostError, open_cluster
from aiocuda.serving.asgi import ready
from tests.cluster.things import Service
from tests.project.tree import ROOT


def opening() -> Any:
    """Return the result of `open_cluster`. Untyped, because a type checker refuses the mistakes."""
    return open_cluster("local", replicas=1)


async def awaited() -> None:
    await opening()


async def entered_without_async() -> None:
    with opening():
        pass


async def not_entered() -> None:
    await opening().spawn(Service)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (awaited, InvalidTypeError, "opened by `async with`, not `await`"),
        (entered_without_async, InvalidTypeError, "opened by `async with`, not `with`"),
        (not_entered, AttributeError, "no cluster yet and has no 'spawn'"),
    ],
)
async def test_a_cluster_is_opened_by_async_with(mistake: Any, error: type[Exception], text: str) -> None:
    """There is one error, and no warning when the result of `open_cluster` is collected: warnings are errors here."""
    with pytest.raises(error, match=text) as caught:
        await mistake()
    assert "use `async with open_cluster(…) as cluster`" in str(caught.value)


def test_an_opening_that_is_not_entered_warns_with_its_line() -> None:
    with pytest.warns(RuntimeWarning, match="was never entered: use `async with") as warned:
        assert "test_mistakes.py:" in repr(opening())
    assert warned[0].filename == __file__


def text_without_attribute(thing: Any) -> str:
    """Return the text of the error, without its traceback: that one would keep the thing alive."""
    try:
        return str(thing.other)
    except AttributeError as error:
        return str(error)


def test_another_attribute_of_an_opening_has_no_cure() -> None:
    with pytest.warns(RuntimeWarning, match="never entered"):
        text = text_without_attribute(opening())
    assert text == "the result of open_cluster() is no cluster yet and has no 'other'"


class Half:
    async def __aenter__(self) -> Self:
        return self


class Iterating(Service):
    def numbers(self) -> Any:
        yield 1

    async def numbers_later(self) -> Any:
        yield 1

    async def memory(self) -> Any:
        device = await aiocuda.open_device(driver="host")
        return device.stream().empty(1)


@dataclasses.dataclass
class Place:
    cluster: Any
    handle: Any


@dataclasses.dataclass
class Mistake:
    make: Callable[[Place], Any]
    error: type[Exception]
    text: str


MISTAKES = {
    "method on the handle": Mistake(
        lambda place: place.handle.echo(1), AttributeError, "ReplicaHandle has no 'echo'.*handle.call('echo', …)"
    ),
    "call of the handle": Mistake(
        lambda place: place.handle("echo", 1), InvalidTypeError, "is not called itself: use `await handle.call("
    ),
    "method as function": Mistake(
        lambda place: place.handle.call(Service.echo, 1), InvalidTypeError, "by its name, not <.*: use call('echo', …)"
    ),
    "keyword for the method": Mistake(
        lambda place: place.handle.call("echo", value=1),
        InvalidTypeError,
        "ReplicaHandle.call has no parameter 'value'.*deadline_s= and retry=.*without keywords",
    ),
    "typo in the method": Mistake(
        lambda place: place.handle.call("ecco", 1), AttributeError, "Iterating has no method 'ecco'; it has .*echo"
    ),
    "instance": Mistake(lambda place: place.cluster.spawn(Service()), InvalidTypeError, "spawn(Model, 3.0) calls"),
    "no __aexit__": Mistake(
        lambda place: place.cluster.spawn(Half), InvalidTypeError, "Half has __aenter__ and no __aexit__"
    ),
    "generator": Mistake(
        lambda place: place.handle.call("numbers"), RemoteError, "of type generator, .* lists instead of generators"
    ),
    "async generator": Mistake(
        lambda place: place.handle.call("numbers_later"), RemoteError, "of type async_generator, cannot be pickled"
    ),
    "device memory": Mistake(
        lambda place: place.handle.call("memory"), RemoteError, "use `await stream.download(buffer)`"
    ),
    "keyword for the class": Mistake(
        lambda place: place.cluster.spawn(Service, log=None), InvalidTypeError, "no parameter 'log'.*without keywords"
    ),
    "call on the cluster": Mistake(
        lambda place: place.cluster.call("echo", 1), AttributeError, "has no 'call': `handle = await cluster.spawn("
    ),
    "close": Mistake(lambda place: place.cluster.close(), AttributeError, "`await cluster.aclose()` closes it"),
    "ready": Mistake(lambda place: ready(place.cluster), InvalidTypeError, "healthy is for a route of your own"),
}


@pytest.mark.slow
@pytest.mark.asyncio
async def test_each_mistake_has_an_error_with_the_cure() -> None:
    async with open_cluster("local", replicas=1) as cluster:
        place = Place(cluster, await cluster.spawn(Iterating))
        for name, mistake in MISTAKES.items():
            pattern = ".*".join(_literal(part) for part in mistake.text.split(".*"))
            with pytest.raises(mistake.error, match=pattern):
                result = mistake.make(place)
                assert asyncio.iscoroutine(result), name
                await result
        assert not hasattr(place.handle, "__len__")
        assert await place.handle.call("echo", 1) == 1


def _literal(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "().[]*" else letter for letter in text)


class Plain:
    """A context manager of `with`, which no replica enters."""

    size = 3
    entered = False

    def __enter__(self) -> Self:
        self.entered = True
        return self

    def __exit__(self, *exc: object) -> None: ...

    def was_entered(self) -> bool:
        return self.entered


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_class_that_no_replica_enters_warns() -> None:
    async with open_cluster("local", replicas=1) as cluster:
        with pytest.warns(RuntimeWarning, match="Plain has __enter__ and no __aenter__: a replica does not") as caught:
            handle = await cluster.spawn(Plain)
        assert caught[0].filename == __file__
        assert not await handle.call("was_entered")
        with pytest.raises(InvalidTypeError, match=r"size is not a method: 3\. A method of the class can return it"):
            await handle.call("size")


class Properties:
    """Its property raises an AttributeError of another object."""

    @property
    def broken(self) -> Any:
        nothing: Any = None
        return nothing.missing


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_attribute_error_of_the_program_is_not_replaced() -> None:
    async with open_cluster("local", replicas=1) as cluster:
        handle = await cluster.spawn(Properties)
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'missing'"):
            await handle.call("broken")
        with pytest.raises(AttributeError, match="Properties has no method 'other'; it has none"):
            await handle.call("other")


class Ending:
    async def end(self, signal_number: int) -> None:
        os.kill(os.getpid(), signal_number)
        await asyncio.Event().wait()


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(("number", "name"), [(9, "-9 (SIGKILL)"), (11, "-11 (SIGSEGV)"), (40, "-40")])
async def test_a_loss_has_the_name_of_the_signal(number: int, name: str) -> None:
    async with open_cluster("local", replicas=1, restarts=0) as cluster:
        handle = await cluster.spawn(Ending)
        with pytest.raises(ReplicaLostError) as caught:
            await handle.call("end", number)
        assert caught.value.reason == f"its process has ended with exit code {name}"
        assert cluster.statistics().replicas[0].last_loss == caught.value.reason


PROGRAM = """
import asyncio
from aiocuda.cluster import open_cluster
class Thing:
    def one(self): return 1
async def main():
    async with open_cluster("local", replicas=1) as cluster:
        print(await (await cluster.spawn(Thing)).call("one"))
"""
GUARDED = f"{PROGRAM}if __name__ == '__main__':\n    asyncio.run(main())\n"


def run_python(*arguments: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "AIOCUDA_DRIVER": "host"},
        input=program, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "program", "text"),
    [
        (["-c", GUARDED], None, "`python -c` or __main__.py"),
        (["-"], GUARDED, "from standard input: save the program as a file"),
    ],
)
def test_a_program_that_is_no_file(arguments: list[str], program: str | None, text: str) -> None:
    """Its processes cannot import it. There is one error, and no traceback of a replica."""
    ended = run_python(*arguments, program=program)
    assert ended.returncode == 1
    assert text in ended.stderr.splitlines()[-1]
    assert ended.stderr.count("Traceback (most recent call last)") == 1


@pytest.mark.slow
def test_a_conditional_expression_is_a_main_guard(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"{PROGRAM}asyncio.run(main()) if __name__ == '__main__' else None\n")
    ended = run_python(str(program))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")
