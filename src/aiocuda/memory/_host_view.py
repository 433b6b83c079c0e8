"""HostView: an array over managed memory that the host must not access while the device works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

__all__ = ["HostView"]


class HostView(np.ndarray[Any, np.dtype[Any]]):
    """An array that checks before each access whether the host may access the memory now.

    Indexing, assignment, iteration, arithmetic, NumPy's functions and the methods named below check. Slices check, too.
    Accesses that bypass this class cannot: ``np.asarray(view)``, a memoryview, a pointer, a C extension. The result of
    a computation is an ordinary array.
    """

    _check: Callable[[], None]

    @classmethod
    def of(cls, array: npt.NDArray[Any], check: Callable[[], None]) -> Self:
        """Return a view of the same memory; ``check`` raises while the host must not access it."""
        return array.view(cls)._guarded_by(check)

    def _guarded_by(self, check: Callable[[], None]) -> Self:
        self._check = check
        return self

    def __array_finalize__(self, obj: Any) -> None:
        self._check = getattr(obj, "_check", _allow)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", ())
        for each in (*inputs, *out):
            if isinstance(each, HostView):
                each._check()
        if out:
            kwargs["out"] = tuple(_plain(each) for each in out)
        result = getattr(ufunc, method)(*map(_plain, inputs), **kwargs)
        return out[0] if len(out) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._check()
        result = super().__array_function__(func, types, args, kwargs)
        return _plain(result) if isinstance(result, HostView) and not np.may_share_memory(result, self) else result

    def __getitem__(self, index: Any) -> Any:
        self._check()
        return super().__getitem__(index)


def _plain(array: Any) -> Any:
    return array.view(np.ndarray) if isinstance(array, HostView) else array


def _allow() -> None:
    """Allow each access: the array is a copy in host memory."""


def _checked(name: str) -> Callable[..., Any]:
    """Return a method that calls ``check``, then the method of `numpy.ndarray`."""
    plain = getattr(np.ndarray, name)

    def method(self: HostView, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return plain(self.view(np.ndarray), *args, **kwargs)

    method.__name__ = name
    method.__doc__ = plain.__doc__
    return method


for _name in (
    *("__setitem__", "__iter__", "__contains__", "__copy__", "__deepcopy__", "__repr__", "__str__", "__format__"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__reduce__", "__reduce_ex__"),
    *("argmax", "argmin", "argpartition", "argsort", "astype", "byteswap", "choose", "clip", "compress", "copy"),
    *("cumprod", "cumsum", "dot", "dump", "dumps", "fill", "flatten", "item", "max", "mean", "min", "nonzero"),
    *("partition", "prod", "put", "repeat", "round", "searchsorted", "sort", "std", "sum", "take", "tobytes"),
    *("tofile", "tolist", "trace", "var"),
):
    setattr(HostView, _name, _checked(_name))
