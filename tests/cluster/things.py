"""Classes that the tests run in replicas."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda import Kernel
from aiocuda.cluster import ReplicaLostError, current_replica

__all__ = [
    "KINDS", "Ending", "Failing", "Kept", "Model", "NeedsAnotherCluster", "Recorder", "Result", "Service", "Uncopyable",
    "Unloadable", "Unpicklable",
]  # fmt: skip


def _poke() -> None:
    raise ZeroDivisionError("on purpose")


#: Writes to an illegal address. After the instruction ``trap``, the driver holds its caller for 3 s or more.
POKE = Kernel("poke", source='extern "C" __global__ void poke() { *(volatile int*)8 = 1; }', host=_poke)


class Unpicklable(Exception):  # noqa: N818 - raised on purpose
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Unloadable:
    """Can be pickled, and not be loaded."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Uncopyable(Exception):  # noqa: N818 - raised on purpose
    """Can be pickled, and not be loaded: its constructor takes two arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Service:
    """A class without a device. Its methods write lines to a file that the test reads.

    Parameters
    ----------
    log
        The file, or None.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._thread = threading.get_ident()
        self._gate = asyncio.Event()

    def _note(self, text: str) -> None:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{text}\n")

    async def __aenter__(self) -> Self:
        self._note("entered")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._note("left")

    async def where(self) -> tuple[int, int, int]:
        """Return the index of the replica, its epoch, and the process id."""
        replica = current_replica()
        assert replica is not None
        return replica.index, replica.epoch, os.getpid()

    async def echo(self, value: Any) -> Any:
        return value

    def plain(self, value: Any) -> Any:
        replica = current_replica()
        assert replica is not None
        return value, replica.index, threading.get_ident() == self._thread

    async def until_exists(self, file: Path, token: str = "") -> str:
        while not file.exists():  # noqa: ASYNC240
            await asyncio.sleep(0.001)
        self._note(token)
        return token

    def block_until_exists(self, file: Path) -> None:
        while not file.exists():
            time.sleep(0.001)  # noqa: TID251 - stands for work on the host

    def block(self, seconds: float) -> float:
        time.sleep(seconds)  # noqa: TID251 - stands for work on the host
        return seconds

    async def block_loop(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: TID251, ASYNC251 - this is the mistake that a test makes

    async def wait(self) -> str:
        await self._gate.wait()
        return "opened"

    async def open(self) -> None:
        self._gate.set()

    async def hold(self, token: str) -> None:
        """Run until it is cancelled."""
        self._note(f"{token} begun")
        try:
            await asyncio.Event().wait()
        finally:
            self._note(f"{token} ended")

    async def count(self, token: str) -> str:
        self._note(token)
        return token

    async def sleep(self, seconds: float, token: str = "") -> str:
        await asyncio.sleep(seconds)
        self._note(token)
        return token

    async def fail(self, kind: str) -> NoReturn:
        if kind == "key":
            raise KeyError(kind)
        if kind == "unpicklable":
            raise Unpicklable(kind)
        if kind == "uncopyable":
            raise Uncopyable(1, 2)
        if kind == "exit":
            raise SystemExit(3)
        if kind == "cancelled":
            raise asyncio.CancelledError
        if kind == "timeout":
            raise TimeoutError("of the method")
        if kind == "lost":
            self._note("lost")
            raise ReplicaLostError("of another cluster", replica=0, epoch=1, reason="of another cluster")
        raise ExceptionGroup("two", [ValueError(1), KeyError(2)])

    def stop(self) -> NoReturn:
        """Raise an exception that would end a coroutine, in a plain function."""
        raise StopIteration(1)

    async def lock(self) -> Any:
        return threading.Lock()

    async def unloadable(self) -> Any:
        return Unloadable()

    async def total(self, array: npt.NDArray[Any]) -> tuple[float, bool]:
        return float(array.sum()), array.flags.writeable

    async def end(self, code: int) -> None:
        os._exit(code)

    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)


class Model:
    """A class with a device.

    Parameters
    ----------
    driver
    """

    def __init__(self, driver: str = "host") -> None:
        self._driver = driver

    async def __aenter__(self) -> Self:
        self._device = await aiocuda.open_device(driver=self._driver)  # type: ignore[arg-type]
        self._stream = self._device.stream()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._device.aclose()

    async def where(self) -> tuple[int, int, int]:
        replica = current_replica()
        assert replica is not None
        return replica.index, replica.epoch, os.getpid()

    async def double(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        x = await self._stream.upload(rows)
        return 2 * await self._stream.download(x)

    async def fault(self) -> None:
        """Launch a kernel that ends the device."""
        self._stream.launch(POKE, 1, 1)
        await self._stream.synchronize()

    async def hang(self) -> None:
        await asyncio.Event().wait()


class Failing:
    """A class whose constructor fails in one replica, or in all."""

    def __init__(self, index: int | None) -> None:
        replica = current_replica()
        assert replica is not None
        if index is None or replica.index == index:
            raise ValueError(f"replica {replica.index}")


class Ending:
    """A class whose constructor ends the process of one replica, or of all.

    Parameters
    ----------
    index
        Of the replica, or None.
    epochs
        The processes of that replica that it ends.
    """

    def __init__(self, index: int | None, epochs: int = 100) -> None:
        replica = current_replica()
        assert replica is not None
        if (index is None or replica.index == index) and replica.epoch <= epochs:
            os._exit(3)

    async def where(self) -> int:
        replica = current_replica()
        assert replica is not None
        return replica.index


class NeedsAnotherCluster:
    """A class whose constructor raises the error of another cluster."""

    def __init__(self) -> None:
        raise ReplicaLostError("of another cluster", replica=0, epoch=1, reason="of another cluster")


class Recorder(Model):
    """A model that records its process id in a file of its replica, and each call in a file of its process."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        replica = current_replica()
        assert replica is not None
        self._file = folder / f"{replica.index}-{replica.epoch}.runs"
        (folder / f"{replica.index}.pid").write_text(str(os.getpid()))

    async def record(self, number: int, seconds: float) -> int:
        with self._file.open("a") as file:
            file.write(f"{number}\n")
        await asyncio.sleep(seconds)
        return number


@dataclasses.dataclass
class Result:
    """A result that has an array."""

    rows: npt.NDArray[Any]


#: The forms in which a `Kept` returns its array, with functions that return the array of such a result.
KINDS: dict[str, Callable[[Any], Any]] = {
    "array": lambda result: result,
    "view": lambda result: result,
    "read-only": lambda result: result,
    "dict": lambda result: result["rows"],
    "kept dict": lambda result: result["rows"],
    "dataclass": lambda result: result.rows,
    "list": lambda result: result[1][0],
    "buffer": np.frombuffer,
}


class Kept:
    """A class that writes each result into the same array."""

    def __init__(self) -> None:
        self._out = np.zeros(20_000)
        self._kept = {"rows": np.zeros(20_000)}
        self._constant = pickle.PickleBuffer(bytes(20_000))

    def plain(self, number: float, kind: str = "array") -> Any:
        out = self._out
        out[:] = number
        if kind == "view":
            return out[1:]
        if kind == "read-only":
            view = out.view()
            view.flags.writeable = False
            return view
        if kind == "dict":
            return {"rows": out}
        if kind == "kept dict":
            self._kept["rows"][:] = number
            return self._kept
        if kind == "dataclass":
            return Result(out)
        if kind == "list":
            return [number, [out]]
        return pickle.PickleBuffer(out.data) if kind == "buffer" else out

    async def coroutine(self, number: float, kind: str = "array") -> Any:
        await asyncio.sleep(0)
        return self.plain(number, kind)

    def awaitable(self, number: float, kind: str = "array") -> Awaitable[Any]:
        return self.coroutine(number, kind)

    def fresh(self, number: float, nested: bool) -> Any:
        array = np.full(20_000, number)
        return {"rows": Result(array)} if nested else array

    async def fresh_coroutine(self, number: float, nested: bool) -> Any:
        return self.fresh(number, nested)

    def constant(self, number: float) -> Any:
        return self._constant
