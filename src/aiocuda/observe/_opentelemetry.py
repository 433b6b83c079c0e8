"""OpenTelemetryInstrument: a span for each awaited operation, and for each request of a batch."""

from __future__ import annotations

import contextlib
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Self, cast

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.util.types import AttributeValue

from .. import __version__
from .._base._checks import flag
from ..completion import INTERNAL, Operation, StartedBatch
from ..device import Device
from ..errors import InvalidTypeError
from ..lowlevel import StreamOperation
from ._listener import elapsed_ms

__all__ = ["OpenTelemetryInstrument"]

#: Characters of a name, a label and an error in a span.
MOST_NAME: Final = 100
MOST_LABEL: Final = 1_000
MOST_ERROR: Final = 10_000


class OpenTelemetryInstrument:
    """Makes a span for each operation that a task awaits, below the span of the task that enqueued it.

    ::

        with OpenTelemetryInstrument(device):
            await serve(device)

    A span is made only if the current span of the task is sampled when it enqueues the operation. It begins when the
    stream accepts the operation (for a copy of pageable memory, its first chunk) and ends when the operation is
    resolved. Its name is that of the kernel, or the kind of the operation. Its attributes are ``aiocuda.operation_id``,
    ``aiocuda.kind``, ``aiocuda.stream``, ``aiocuda.device``, and, if there is one, ``aiocuda.kernel``,
    ``aiocuda.label``, ``aiocuda.nbytes`` and ``aiocuda.device_ms``. An operation that has failed has the status
    ``ERROR`` and an event with the exception.

    An operation that no task awaits has no span: of 500 launches whose last one is awaited, only that one has a span. A
    task may await an operation long after it is done; its span then ends at the end of the operation.

    A `aiocuda.serving.MicroBatcher` with this ``device`` computes many requests in one batch. Each sampled request gets
    a span below its own span: ``batch`` and the name of the function, from the call of ``submit`` to the end of the
    batch, with the number of items and the time of its wait. The first of these spans is the current span in the
    function, so that the operations of the batch are below it; the others have a link to it.

    Without a sampled span an operation costs the host about a microsecond more. After the block, it costs nothing.

    Parameters
    ----------
    device
        The device of the streams, of all event loops.
    tracer_provider
        Makes the spans. Without it, it is the global one.
    timing
        True to record a timing event before and after each operation, for ``aiocuda.device_ms``: the time between the
        two on the device. A copy of pageable memory does not have it.

    Raises
    ------
    InvalidTypeError
        An argument cannot be used.
    BusyError
        On entering: it has been entered already.
    """

    def __init__(self, device: Device, *, tracer_provider: TracerProvider | None = None, timing: bool = False) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"an OpenTelemetryInstrument takes an aiocuda.Device, not {type(device).__name__}")
        if tracer_provider is not None and not callable(getattr(tracer_provider, "get_tracer", None)):
            raise InvalidTypeError(
                f"tracer_provider is an opentelemetry.trace.TracerProvider or None, not {tracer_provider!r}"
            )
        self.device = device
        self.timing = flag(timing, "timing")  #: see `Device.listen`
        self._provider = tracer_provider
        self._tracer: Tracer = trace.NoOpTracer()
        self._listening = contextlib.ExitStack()
        #: The time of the first chunk of each copy that has chunks.
        self._copies: weakref.WeakKeyDictionary[Operation[Any], int] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Self:
        self._listening.enter_context(self.device.listen(self))
        self._tracer = trace.get_tracer("aiocuda", __version__, self._provider)
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.close()
        self._copies.clear()

    def __repr__(self) -> str:
        return f"<OpenTelemetryInstrument of {self.device.name}>"

    # -- operations ----------------------------------------------------------------------------------------------

    def on_submit(self, operation: Operation[Any]) -> None:
        """Remember when the first chunk of a copy was submitted. The hook of `Device.listen`."""
        if operation.kind is INTERNAL:
            copy = operation.part_of
            if copy is not None and _is_sampled():
                self._copies.setdefault(copy, time.time_ns())

    def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
        """Make the span of an awaited operation. The hook of `Device.listen`."""
        # The context is that of the task which has enqueued the operation, and so is the current span.
        if operation.kind is INTERNAL or not _is_sampled():
            return
        own = cast("StreamOperation[Any]", operation)
        began = self._copies.pop(own, None) if self._copies else None
        now = time.time_ns()
        device_ms = None
        if began is None:
            device_ms = elapsed_ms(self.device, start, end) if start else None
            began = now
            if own.submitted_at:  # otherwise no stream has accepted it
                began -= int((self.device.driver.now() - own.submitted_at) * 1e9)
        if own.is_awaited:
            self._make_span(began, now, own.nbytes, device_ms, own)
        elif own.state != "abandoned":
            own.report_when_awaited(partial(self._make_span, began, now, own.nbytes, device_ms))

    def _make_span(
        self, began: int, ended: int, nbytes: int, device_ms: float | None, operation: StreamOperation[Any]
    ) -> None:
        """Make the span of an operation, in its context. Times are in ns since 1970."""
        name = valid_text(operation.kernel or operation.kind, MOST_NAME)
        attributes = self._attributes(operation)
        if nbytes:
            attributes["aiocuda.nbytes"] = nbytes
        if device_ms is not None:
            attributes["aiocuda.device_ms"] = device_ms
        span = self._tracer.start_span(name, attributes=attributes, start_time=began)
        if operation.failure is not None:
            _record(span, operation.value)
        span.end(ended)

    def _attributes(self, operation: StreamOperation[Any]) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            "aiocuda.operation_id": operation.id,
            "aiocuda.kind": operation.kind,
            "aiocuda.stream": valid_text(operation.stream_name, MOST_NAME),
            "aiocuda.device": self.device.index,
        }
        if operation.kernel is not None:
            attributes["aiocuda.kernel"] = valid_text(operation.kernel, MOST_NAME)
        if operation.label is not None:
            attributes["aiocuda.label"] = valid_text(operation.label, MOST_LABEL)
        return attributes

    # -- batches -------------------------------------------------------------------------------------------------

    def on_batch(self, batch: StartedBatch) -> Callable[[Sequence[BaseException | None]], None] | None:
        """Begin the spans of the sampled requests of a batch. The hook of `Device.listen`.

        It runs in the context of the batch's own task, where it makes the first of these spans the current span.
        """
        spans: list[Span | None] = []
        first: Span | None = None
        for context, waited in zip(batch.contexts, batch.waited_s, strict=True):
            span = (
                None
                if context is None
                else self._request_span(batch, context.run(otel_context.get_current), waited, first)
            )
            first = first or span
            spans.append(span)
        if first is None:
            return None
        otel_context.attach(trace.set_span_in_context(first))  # this context ends with the task

        def end(errors: Sequence[BaseException | None]) -> None:
            for span, error in zip(spans, errors, strict=True):
                if span is not None:
                    if error is not None:
                        _record(span, error)
                    span.end()

        return end

    def _request_span(
        self, batch: StartedBatch, context: otel_context.Context, waited: float, first: Span | None
    ) -> Span | None:
        """Begin the span of a request, if the span of its task is sampled; ``first`` is that of an earlier request."""
        if not trace.get_current_span(context).get_span_context().trace_flags.sampled:
            return None
        return self._tracer.start_span(
            valid_text(f"batch {batch.function}", MOST_NAME),
            context,
            attributes={
                "aiocuda.batch": batch.number,
                "aiocuda.batch_size": batch.size,
                "aiocuda.batch_weight": batch.weight,
                "aiocuda.wait_s": waited,
            },
            links=() if first is None else (Link(first.get_span_context()),),
            start_time=time.time_ns() - int(waited * 1e9),
        )


def _is_sampled() -> bool:
    """Return whether the current span is sampled. A span of another process counts, too, and one that has ended."""
    return trace.get_current_span().get_span_context().trace_flags.sampled


def _record(span: Span, error: BaseException) -> None:
    """Give a span the status and the event of an error."""
    texts = {
        "exception.message": valid_text(str(error), MOST_ERROR),
        "exception.stacktrace": valid_text("".join(traceback.format_exception(error)), MOST_ERROR),
    }
    span.record_exception(error, attributes=texts)
    span.set_status(Status(StatusCode.ERROR, texts["exception.message"]))


def valid_text(text: str, most: int) -> str:
    """Return at most ``most`` characters of a text, and "…" for more, as a text that can be encoded as UTF-8.

    Surrogates without a partner are escaped: a label or the name of a file may have them.
    """
    if len(text) > most:
        text = f"{text[:most]}…"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
