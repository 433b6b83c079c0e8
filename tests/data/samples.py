"""Sources and decoders of the loader tests, at the top of a module: worker processes import it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FIELDS: dict[str, Any] = {"x": ((2, 3), np.float32), "y": ((), np.int64)}


class BadSampleError(Exception):
    def __init__(self, index: int, reason: str) -> None:  # cannot be unpickled from its args alone
        super().__init__(f"{reason} {index}")
        self.index = index


class Squares:
    """A source with a length that is read where `__getitem__` is called."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.big = np.arange(1000)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return int(self.big[index % 1000]) ** 2


def write(sample: Any, out: Any) -> None:
    out["x"][...] = sample
    out["y"][...] = 2 * sample


def returns_a_value(sample: Any, out: Any) -> Any:
    write(sample, out)
    return np.full((2, 3), sample, np.float32)


def returns_its_views(sample: Any, out: Any) -> Any:
    write(sample, out)
    return {0: None, 1: out, 2: out["x"][0], 3: (out["x"], None)}.get(sample)


def arrays(sample: Any) -> dict[str, Any]:
    return {"x": np.full((2, 3), sample, np.float32), "y": 2 * sample}


def refuses_fives(sample: Any, out: Any) -> None:
    out["x"][...] = -1
    if sample % 5 == 0:
        raise ValueError(f"{sample} is a multiple of five")
    write(sample, out)


def raises_unpicklable(sample: Any, out: Any) -> None:
    raise BadSampleError(sample, "no")


def writes_its_process(sample: Any, out: Any) -> None:
    time.sleep(0.01)  # noqa: TID251 - so that each worker gets some
    out["x"][...] = os.getpid()
    out["y"][...] = threading.get_ident()


def counts_page_faults(sample: Any, out: Any) -> None:
    """Write the page faults that eight temporary arrays of 1 MB cause, which are freed together."""
    import resource  # not on Windows

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    temporary = [np.full(1 << 20, value, np.uint8) for value in range(8)]
    del temporary
    out["x"][...] = 0
    out["y"][...] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class DiesOnce:
    """Ends its process at one sample, half-way, unless a file says that it has done so."""

    def __init__(self, at: int, mark: Path, exit_code: int | None = None) -> None:
        self.at = at
        self.mark = mark
        self.exit_code = exit_code

    def __call__(self, sample: Any, out: Any) -> None:
        out["x"][0] = sample
        if sample == self.at and not self.mark.exists():
            self.mark.touch()
            if self.exit_code is None:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(self.exit_code or 0)
        write(sample, out)


def always_dies(sample: Any, out: Any) -> None:
    if sample == 3:
        os._exit(7)
    write(sample, out)


class DiesAt:
    """Ends its process at some samples, half-way, each time. It returns arrays, or writes them."""

    def __init__(self, *samples: int, exit_code: int = 7) -> None:
        self.samples = samples
        self.exit_code = exit_code

    def __call__(self, sample: Any, out: Any = None) -> Any:
        if out is not None:
            out["x"][0] = sample
        if sample in self.samples:
            os._exit(self.exit_code)
        return arrays(sample) if out is None else write(sample, out)


class Poisons:
    """At one sample it damages the memory of its process, which ends at the next sample."""

    is_poisoned = False

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, sample: Any, out: Any) -> None:
        if Poisons.is_poisoned:
            os._exit(7)
        Poisons.is_poisoned = sample == self.at
        write(sample, out)


class NotLoadedError(BaseException):
    pass


class LoadsOnce:
    """Ends its process at sample 3, and cannot be loaded by the next one."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if self.mark.exists():
            raise NotLoadedError

    def __call__(self, sample: Any, out: Any) -> None:
        if sample == 3:
            self.mark.touch()
            os._exit(7)
        write(sample, out)


class DiesAtStart:
    """Ends its process at sample 3, and then so many processes while they load it."""

    def __init__(self, marks: Path, times: int) -> None:
        self.marks = marks
        self.times = times

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        ended = len(list(self.marks.iterdir()))
        if 0 < ended <= self.times:
            (self.marks / str(ended)).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, sample: Any, out: Any) -> None:
        if sample == 3 and not list(self.marks.iterdir()):
            (self.marks / "0").touch()
            os._exit(7)
        write(sample, out)


def hangs_at_three(sample: Any, out: Any) -> None:
    if sample == 3:
        time.sleep(600)  # noqa: TID251 - longer than any timeout
    write(sample, out)


class LoadsSlowly:
    """Decodes as `write`. A process needs a while to load it."""

    def __setstate__(self, state: object) -> None:
        time.sleep(0.2)  # noqa: TID251 - as a model that is large

    def __getstate__(self) -> str:
        return "anything: without a state, nothing sets it"

    def __call__(self, sample: Any, out: Any) -> None:
        write(sample, out)


def has_library(sample: Any, out: Any) -> None:
    import sys

    out["y"][...] = sum(name.startswith("aiocuda") for name in sys.modules)
    out["x"][...] = "aiocuda.device._device" in sys.modules or "aiocuda.errors" in sys.modules


def addresses(sample: Any, out: Any) -> None:
    """Write where the views lie: as offsets in the file that the process shares, or as addresses."""
    for name, view in out.items():
        view[...] = place_of(view.__array_interface__["data"][0]) if name != "raw" else 0


def place_of(address: int) -> int:
    """Return the offset of an address in the shared file of a loader; the address itself if it lies elsewhere."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *name = line.split(None, 5)
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end and name and "aiocuda-loader" in name[0]:
            return address - begin + int(offset, 16)
    return address


def large(sample: Any) -> Any:
    """A sample of 2 MB, and a small part."""
    return {"x": np.full(1 << 18, sample, np.int64), "y": sample}


def first_item(sample: Any) -> Any:
    return {"x": np.full(1 << 18, sample[0], np.int64), "y": len(sample)}


def dies_after_the_first(sample: Any, out: Any) -> None:
    if sample:
        os._exit(7)
    write(sample, out)


class Unpicklable:
    """A sample that raises when it is sent to another process."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def forgets_y(sample: Any, out: Any) -> None:
    """Leave a field unwritten, for odd samples."""
    out["x"][...] = sample
    if sample % 2 == 0:
        out["y"][...] = sample


def forgets_the_end_of_x(sample: Any, out: Any) -> None:
    """Leave the last item of a field unwritten."""
    out["x"].reshape(-1)[: 6 - sample % 2] = sample
    out["y"][...] = sample


def writes_patterns(sample: Any, out: Any) -> None:
    """Write the bytes that a row is filled with when it is checked."""
    for name, view in out.items():
        view[...] = np.frombuffer(bytes([(0xA5, 0x5A)[sample % 2]]) * 8, view.dtype)[0] if name == "y" else 0


class Redraws:
    """A dataset that draws its indices for each epoch."""

    def __init__(self, nbytes: int = 0) -> None:
        self.epoch = 0
        self.large = bytes(nbytes)
        self.drawn = np.arange(6)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + int(self.drawn[index])

    def redraw(self) -> None:
        self.epoch += 1
        self.drawn[:] = np.random.default_rng(self.epoch).permutation(6)  # in place


class Adds:
    """A decoder with a state, which may refuse to be loaded again."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.refuses = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if self.refuses:
            raise LookupError("not loaded")

    def __call__(self, sample: Any, out: Any) -> None:
        out["x"][...] = 0
        out["y"][...] = sample + self.number


class Weights:
    """A sampler that draws with replacement. Each epoch has its own draws."""

    def __init__(self, length: int, count: int, seed: int = 0) -> None:
        self.length, self.count, self.seed, self.epoch = length, count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng([self.seed, self.epoch]).integers(0, self.length, self.count).tolist()


def augments(sample: Any, out: Any, *, rng: np.random.Generator, epoch: int) -> None:
    """Write a random number that belongs to the sample's position, and the epoch."""
    out["x"][...] = rng.random(dtype=np.float32)
    out["y"][...] = 1000 * epoch + sample


def augmented(sample: Any, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": np.full((2, 3), rng.random(dtype=np.float32)), "y": sample}
