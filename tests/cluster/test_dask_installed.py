"""Dask installs tblib, which changes how exceptions are pickled and copied in the whole process."""

from __future__ import annotations

import copy
import pickle

import pytest

from aiocuda import errors
from aiocuda.serving import BatchError
from aiocuda.serving._errors import copy_of

pytest.importorskip("distributed")
pickling_support = pytest.importorskip("tblib.pickling_support")

CLASSES = [getattr(errors, name) for name in errors.__all__ if not name.endswith("Warning")]


@pytest.mark.parametrize("error_class", CLASSES)
@pytest.mark.parametrize("way", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy_of])
def test_errors_are_pickled_and_copied(error_class: type[errors.AiocudaError], way: object) -> None:
    assert callable(way)
    error = error_class("text", code=7)
    error.add_note("note")
    twin = way(error)
    assert (type(twin), twin.args, twin.code, twin.__notes__) == (error_class, ("text",), 7, ["note"])


class Odd(Exception):  # noqa: N818 - an exception as programs have them
    """Its class cannot make a copy. tblib can, without `__init__`."""

    def __init__(self, *, code: int) -> None:
        super().__init__("odd")


def test_whether_an_exception_can_be_copied_does_not_depend_on_dask() -> None:
    error = Odd(code=1)
    pickling_support.install(error)
    assert type(copy.copy(error)) is Odd
    twin = copy_of(error)
    assert type(twin) is BatchError
    assert twin.__cause__ is error


def test_copies_of_one_exception_share_nothing() -> None:
    error = ValueError("x")
    error.add_note("from the function")
    one, two = copy_of(error), copy_of(error)
    one.add_note("mine")
    assert two.__notes__ == error.__notes__ == ["from the function"]
