"""Row 83: the arguments of `open_cluster`."""

from __future__ import annotations

from typing import Any

from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.cluster import open_cluster
from tests.bad_input.case import Case, each_of


def _argument(name: str, value: Any, error: type[Exception], text: str, **others: Any) -> Case:
    options: dict[str, Any] = {"engine": "local", "replicas": 2} | others
    return Case(
        83, f"{name} {value!r}", each_of(lambda _, given: open_cluster(**options | {name: given}), value), error, text
    )


CASES: list[Case] = [
    _argument("engine", "locl", InvalidArgumentError, "no engine is called 'locl'; there are 'local' and 'dask'"),
    _argument("engine", None, InvalidTypeError, "engine is 'local' or 'dask', not None"),
    _argument("engine", "dask", InvalidArgumentError, "the engine 'dask' needs client="),
    _argument("client", 7, InvalidArgumentError, "client= is for the engine 'dask'"),
    *(
        _argument("replicas", value, error, text)
        for value, error, text in (
            (0, InvalidArgumentError, "replicas is at least 1, not 0"),
            (-1, InvalidArgumentError, "not -1"),
            (10**9, InvalidArgumentError, "replicas is at most 1024"),
            (2.0, InvalidTypeError, "replicas is an integer, not 2.0"),
            (True, InvalidTypeError, "not True"),
            ("2", InvalidTypeError, "not '2'"),
            (None, InvalidTypeError, "not None"),
        )
    ),
    *(
        _argument("restarts", value, error, text)
        for value, error, text in (
            (-1, InvalidArgumentError, "restarts is at least 0, not -1"),
            (1.5, InvalidTypeError, "restarts is an integer, not 1.5"),
            (float("nan"), InvalidTypeError, "not nan"),
        )
    ),
]
