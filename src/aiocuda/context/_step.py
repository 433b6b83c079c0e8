"""StepConfig: what one step does. StepTelemetry: what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

from .._checks import is_coroutine_function, is_function, several
from .._event import Event
from ..completion._operation import Operation
from ..errors import InvalidArgumentError, InvalidTypeError
from ..interchange._host_arrays import as_source
from ..pipeline import Slot

__all__ = ["Compute", "Step", "StepConfig", "StepTelemetry"]

#: Enqueues on ``slot.stream``, and returns what its verbs returned: a `Launch`, or a function of the slot.
Compute: TypeAlias = Callable[[Slot], Any]


class StepConfig:
    """One step of `ManagedContext.triple_buffered_step`: what goes up, what is computed, what comes down.

    Inputs and outputs are buffers of the slot that carries the step: three steps under way have three of each. What has
    to last from step to step lies in buffers of the program's own, which ``compute`` uses: the compute work of one step
    comes behind that of the step before, in one stream.

    ::

        def compute(slot):
            slot.stream.launch(relax, grid, block, field, slot.buffer("noise"), n)
            return slot.stream.launch(energy, 1, block, field, slot.buffer("energy", 1), n)

        config = StepConfig(upload={"noise": noise}, compute=compute, download=["energy"])

    Parameters
    ----------
    upload
        Arrays by name, as `Stream.upload` takes them. Each goes to the slot's buffer of that name. They are borrowed
        until the step's telemetry has come.
    compute
        A function of the `Slot`, or several in order. It enqueues on ``slot.stream`` and returns the operation, several
        of them, or None; a `aiocuda.pipeline.Launch` is such a function.
    download
        Names of the slot's buffers that come back as new arrays.

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        A name that is no string, an array that cannot be uploaded, nothing to call, a coroutine function.
    """

    __slots__ = ("compute", "download", "upload")

    def __init__(
        self,
        upload: Mapping[str, Any] | None = None,
        compute: Compute | Iterable[Compute] = (),
        download: Iterable[str] = (),
    ) -> None:
        given = {} if upload is None else upload
        if not isinstance(given, Mapping):
            raise InvalidTypeError(f"upload maps names to arrays, and is no {type(given).__name__}")
        self.upload: dict[str, npt.NDArray[Any]] = {_name(name): as_source(array) for name, array in given.items()}
        self.compute: tuple[Compute, ...] = _functions(compute)
        self.download = tuple(dict.fromkeys(map(_name, several(download, "download is a sequence of names"))))

    def __repr__(self) -> str:
        names = (", ".join(names) or "nothing" for names in (self.upload, self.download))
        return "<StepConfig {} → {} functions → {}>".format(*_between(names, len(self.compute)))


def _between(names: Iterable[str], count: int) -> tuple[object, ...]:
    up, down = names
    return up, count, down


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidTypeError(f"a slot's buffer has a string as its name, not {name!r}")
    return name


def _functions(compute: Compute | Iterable[Compute]) -> tuple[Compute, ...]:
    one = callable(compute) or not isinstance(compute, Iterable)
    functions: tuple[Any, ...] = (
        (compute,) if one else tuple(several(compute, "compute is a function of a slot, or several"))
    )
    for function in functions:
        if not is_function(function):
            raise InvalidTypeError(
                f"compute is a function of a slot, or several, and {function!r} is none: a kernel is launched by "
                "aiocuda.pipeline.Launch(kernel, grid, block, …), or in a function by slot.stream.launch(…)"
            )
        if is_coroutine_function(function):
            raise InvalidArgumentError(
                f"compute enqueues, and {function!r} is a coroutine function: await before the step, or make a "
                "pipeline with a stage that awaits"
            )
    return functions


class StepTelemetry(NamedTuple):
    """What is told of a step once it is done.

    Attributes
    ----------
    step
        Its number, from 0, since the context was entered or `ManagedContext.reset_pipeline`.
    outputs
        What it has downloaded, by name: arrays of their own.
    stage_ms
        Device time of its ``"upload"``, ``"compute"`` and ``"download"``, each between two timing events.
    """

    step: int
    outputs: dict[str, npt.NDArray[Any]]
    stage_ms: dict[str, float]


class Step:
    """One step under way: what a slot of the pipeline carries."""

    __slots__ = ("config", "marks", "number")

    def __init__(self, number: int, config: StepConfig) -> None:
        self.number = number
        self.config = config
        self.marks: dict[str, tuple[Event, Event]] = {}

    def told(self, arrays: Iterable[npt.NDArray[Any]]) -> StepTelemetry:
        """Its telemetry, when all of it is done."""
        outputs = dict(zip(self.config.download, arrays, strict=True))
        return StepTelemetry(
            self.number, outputs, {stage: start.elapsed_ms(end) for stage, (start, end) in self.marks.items()}
        )

    # -- its stages, as functions of the slot --------------------------------------------------------------------

    @staticmethod
    def upload(slot: Slot) -> list[Any]:
        """Every input into the slot's buffer of its name."""
        step: Step = slot.item
        stream = slot.stream
        return step._timed(
            "upload",
            slot,
            lambda: [
                stream.copy(slot.buffer(name, array.shape, array.dtype), array)
                for name, array in step.config.upload.items()
            ],
        )

    @staticmethod
    def compute(slot: Slot) -> list[Any]:
        """What the program wants done."""
        step: Step = slot.item
        return step._timed(
            "compute", slot, lambda: [each for one in step.config.compute for each in _several(one(slot))]
        )

    @staticmethod
    def download(slot: Slot) -> list[Operation[npt.NDArray[Any]]]:
        """Every output into an array of its own."""
        step: Step = slot.item
        return step._timed(
            "download", slot, lambda: [slot.stream.download(slot.buffer(name)) for name in step.config.download]
        )

    def _timed(self, stage: str, slot: Slot, work: Callable[[], list[Any]]) -> list[Any]:
        start = slot.stream.record(timing=True)
        returned = work()
        self.marks[stage] = (start, slot.stream.record(timing=True))
        return returned


def _several(returned: Any) -> Iterable[Any]:
    """What a function of a slot returned, as several; whether those are operations, the stage asks."""
    if returned is None:
        return ()
    return returned if isinstance(returned, (list, tuple)) else (returned,)
