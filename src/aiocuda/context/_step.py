"""StepConfig and StepTelemetry: the input and the result of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

from .._checks import is_coroutine_function, is_function, several
from ..errors import InvalidArgumentError, InvalidTypeError
from ..interchange._host_arrays import as_source
from ..pipeline import Slot

__all__ = ["Compute", "StepConfig", "StepTelemetry"]

#: A `Launch`, or a function that enqueues work on ``slot.stream`` and returns the operations.
Compute: TypeAlias = Callable[[Slot], Any]


class StepConfig:
    """One step of `ManagedContext.triple_buffered_step`: its uploads, its computation, its downloads.

    Inputs and outputs are buffers of the step's slot: three steps at a time have three of each. Data that lasts from
    step to step is in buffers of the program, which ``compute`` uses: all steps compute in one stream, in order.

    ::

        def compute(slot):
            slot.stream.launch(relax, grid, block, field, slot.buffer("noise"), n)
            return slot.stream.launch(energy, 1, block, field, slot.buffer("energy", 1), n)

        config = StepConfig(upload={"noise": noise}, compute=compute, download=["energy"])

    Parameters
    ----------
    upload
        Arrays by name, as `Stream.upload` takes them. Each is copied to the slot's buffer of that name. They are
        borrowed until the step's telemetry is returned.
    compute
        A function of the `Slot`, or several functions in order. It enqueues work on ``slot.stream`` and returns the
        operation, several operations, or None. An `aiocuda.pipeline.Launch` is such a function.
    download
        Names of the slot's buffers to download into new arrays.

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        A name that is no string; an array that cannot be uploaded; an object that is not callable; a coroutine
        function.
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
            raise InvalidTypeError(f"upload maps names to arrays, not {type(given).__name__}")
        self.upload: dict[str, npt.NDArray[Any]] = {_name(name): as_source(array) for name, array in given.items()}
        self.compute: tuple[Compute, ...] = _functions(compute)
        self.download = tuple(dict.fromkeys(map(_name, several(download, "download is a sequence of names"))))

    def __repr__(self) -> str:
        up, down = (", ".join(names) or "nothing" for names in (self.upload, self.download))
        return f"<StepConfig {up} → {len(self.compute)} functions → {down}>"


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidTypeError(f"a slot's buffer has a string as its name, not {name!r}")
    return name


def _functions(compute: Compute | Iterable[Compute]) -> tuple[Compute, ...]:
    functions: tuple[Any, ...] = (compute,)
    if not callable(compute) and isinstance(compute, Iterable):
        functions = tuple(several(compute, "compute is a function of a slot, or several"))
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
    """The result of a finished step.

    Attributes
    ----------
    step
        The step's number, from 0, since the context was entered or since `ManagedContext.reset_pipeline`.
    outputs
        The downloaded arrays, by name. They are new for each step.
    stage_ms
        Milliseconds of device time of ``"upload"``, ``"compute"`` and ``"download"``, each between two timing events.
    """

    step: int
    outputs: dict[str, npt.NDArray[Any]]
    stage_ms: dict[str, float]
