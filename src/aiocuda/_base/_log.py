"""Log events for operators, written by structlog through the logger ``aiocuda`` of the standard library.

The application decides what is shown: without a handler and a level for that logger, an event costs one look at the
handlers, and structlog is not imported. The application's structlog configuration is neither used nor changed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import MutableMapping
from contextvars import Context
from typing import Any, Final, Literal, TypeAlias

from ._label import LABEL, printable

__all__ = ["Level", "is_heard", "log", "prepare"]

Level: TypeAlias = Literal["info", "warning", "error"]

_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

#: Fields that a formatter of the standard library adds by itself.
_META: Final = frozenset({"event", "level", "logger", "timestamp"})


class _Event(dict[str, Any]):
    """The fields of an event. As text it is a line ``event key=value …``, for formatters of the standard library."""

    def __str__(self) -> str:
        return " ".join([str(self["event"]), *(f"{key}={self[key]}" for key in self if key not in _META)])


def is_heard(level: Level) -> bool:
    """True if a handler of the application takes events of this level."""
    logger: logging.Logger | None = logging.getLogger("aiocuda")
    assert logger is not None
    if not logger.isEnabledFor(_LEVELS[level]):
        return False
    while logger is not None:
        for handler in logger.handlers:
            if handler.level <= _LEVELS[level] and not isinstance(handler, logging.NullHandler):
                return True
        logger = logger.parent if logger.propagate else None
    return False


def prepare() -> None:
    """Import structlog if events are heard. It takes up to 0.1 s, so opening a device does it on a worker thread."""
    if is_heard("error"):
        _logger()


def log(level: Level, event: str, context: Context | None = None, /, **fields: object) -> None:
    """Write an event.

    Parameters
    ----------
    level
        ``"info"``, ``"warning"`` or ``"error"``.
    event
        The name of the event, such as ``"device_opened"``.
    context
        The context variables of the task that submitted the work; None takes the present ones. structlog's own, which
        ``structlog.contextvars.bind_contextvars`` sets, become fields of the event.
    fields
        Strings, numbers or None.
    """
    if not is_heard(level):
        return
    name = fields.pop("label", None) or (LABEL.get() if context is None else context.get(LABEL, None))
    if name is not None:
        fields["label"] = printable(str(name))
    try:
        method = getattr(_logger(), level)
        if context is None:
            method(event, **fields)
        else:
            context.copy().run(method, event, **fields)  # a copy: a hook of a listener may be running in the context
    except Exception as error:  # a filter of the application has failed; the work must go on
        loop = asyncio._get_running_loop()
        if loop is None:
            raise
        loop.call_exception_handler({"message": f"aiocuda: the event {event} was not logged", "exception": error})


@functools.cache
def _logger() -> Any:
    """Return structlog's logger. The first call imports structlog."""
    import structlog

    logger = logging.getLogger("aiocuda")
    logger.addHandler(logging.NullHandler())
    return structlog.wrap_logger(
        logger,
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            _to_record,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    ).bind()


def _to_record(logger: Any, name: str, fields: MutableMapping[str, Any]) -> tuple[tuple[_Event], dict[str, Any]]:
    """Return the arguments of the standard library's logger.

    The message is the event as a dict, as `structlog.stdlib.ProcessorFormatter` and JSON formatters expect it. Each
    field is an attribute of the record, too, unless the record has an attribute of that name.
    """
    attributes = {key: value for key, value in fields.items() if key not in _RECORD and key not in _META}
    return (_Event(fields),), {"extra": {**attributes, "_logger": logger, "_name": name}}


#: The attributes that a record has without ``extra``.
_RECORD: Final = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime"})
