"""Errors with the cure for common mistakes: names of other libraries, and operators that a class does not have.

The decorators add nothing that a type checker sees, so a mistake stays an error for it as well. Only `figures` adds a
``__getattr__``: with one, CPython 3.11 looks up every attribute of the class more slowly.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from ..errors import InvalidTypeError, UnsupportedError
from ._names import CURES

__all__ = ["add_reader", "figures", "keywords", "lacking", "lacks", "or_none", "refuses", "unknown_keyword"]

C = TypeVar("C", bound=type[Any])
P = ParamSpec("P")
R = TypeVar("R")

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")

#: Methods with which programs ask for a dict.
_TO_DICT = frozenset(("_asdict", "as_dict", "asdict", "dict", "get", "items", "keys", "to_dict", "values"))

#: The operators that `refuses` covers.
_OPERATORS = (
    *(f"__{name}__" for name in _BINARY),
    *(f"__r{name}__" for name in _BINARY),
    *("__lt__", "__le__", "__gt__", "__ge__"),
)


class _Lacking:
    """A class attribute that is always an AttributeError, so that `hasattr` is False."""

    __slots__ = ("_cure", "_name")

    def __init__(self, name: str, cure: str) -> None:
        self._name = name
        self._cure = cure

    def __get__(self, instance: object, owner: type) -> NoReturn:
        what = owner.__name__ if instance is None else _shown(instance)
        raise AttributeError(f"{what} has no {self._name!r}: {self._cure}", name=self._name, obj=instance)

    def __set__(self, instance: object, value: object) -> NoReturn:
        self.__get__(instance, type(instance))


def lacks(cls: C, cures: Mapping[str, str] | None = None) -> C:
    """Decorate a class: access to one of the names of ``cures`` raises an AttributeError with the cure.

    Without ``cures``, they are those of `CURES` for the class. ``dir`` of an instance does not list the names.
    """
    cures = CURES[cls.__name__] if cures is None else cures
    for name, cure in cures.items():
        assert not hasattr(cls, name), name
        setattr(cls, name, _Lacking(name, cure))
    listed: Any = cls.__dir__
    setattr(cls, "__dir__", lambda self: [name for name in listed(self) if name not in cures])  # noqa: B010
    return cls


def figures(cls: C) -> C:
    """Decorate a class of statistics: another attribute, and ``statistics[name]``, raise an error that lists its own.

    The class gets a ``__getattr__``, because no hot path reads statistics. Python calls it also for the names of
    `lacks`, so it has their cures.
    """
    own = [*cls.__annotations__, *(name for name, each in vars(cls).items() if isinstance(each, property))]
    cures = CURES.get(cls.__name__, {})
    as_dict = "statistics._asdict()" if issubclass(cls, tuple) else "dataclasses.asdict(statistics)"

    def lack(self: object, name: str) -> NoReturn:
        cure = cures.get(name)
        if cure is None and name in _TO_DICT:
            cure = f"{as_dict} is a dict of its attributes"
        elif cure is None:
            cure = f"it has {', '.join(difflib.get_close_matches(name, own, len(own), 0.0))}"  # the nearest first
        raise AttributeError(f"{cls.__name__} has no {name!r}: {cure}", name=name, obj=self)

    def item(self: Any, key: Any) -> Any:
        if isinstance(self, tuple) and not isinstance(key, str):
            return tuple.__getitem__(self, key)
        cure = f"statistics.{key if key in own else own[0]}, and {as_dict} is a dict of all"
        raise InvalidTypeError(f"{cls.__name__} has attributes and no items: {cure}")

    setattr(cls, "__getattr__", lack)  # noqa: B010
    setattr(cls, "__getitem__", item)  # noqa: B010
    return cls


def lacking(module: str, name: str) -> NoReturn:
    """Raise the AttributeError of a module's ``__getattr__``, with the cure that `MODULE_CURES` has for the name."""
    from ._module_names import MODULE_CURES  # most programs never need it

    cure = f": {MODULE_CURES[module][name]}" if name in MODULE_CURES[module] else ""
    raise AttributeError(f"module {module!r} has no attribute {name!r}{cure}", name=name)


def refuses(cure: str = "", /, *more: str, **cures: str) -> Callable[[C], C]:
    """Return a class decorator: arithmetic, ``<`` and so on, and ``more`` raise an `InvalidTypeError` with the cure.

    ``cures`` has special methods with cures of their own. Without ``cure``, only they are refused.

    An operand of another array library decides itself: it may accept the object by ``__cuda_array_interface__``.
    """

    def decorate(cls: C) -> C:
        def refuse(self: Any, *others: Any) -> Any:
            for other in others:
                kind = type(other)
                if not isinstance(other, cls) and (
                    hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "__dlpack__")
                ):
                    return NotImplemented
            raise InvalidTypeError(f"{self!r} {cure}")

        for name in _OPERATORS if cure else ():
            setattr(cls, name, refuse)
        for name, each in {**dict.fromkeys(more, cure), **cures}.items():
            setattr(cls, name, functools.partialmethod(_refuse, each))
            if name in ("__enter__", "__aenter__"):  # `with` looks for both
                setattr(cls, name.replace("enter", "exit"), vars(cls)[name])
            elif name == "__call__":
                cls._is_function = False  # see `is_function`
        return cls

    return decorate


def _refuse(thing: object, cure: str, *args: object, **kwargs: object) -> NoReturn:
    raise InvalidTypeError(f"{_shown(thing)} {cure}")


def _shown(thing: object) -> str:
    text = repr(thing)
    return text if len(text) <= 200 else f"a {type(thing).__name__}"  # of a dataclass with many figures


def or_none(method: Callable[P, R]) -> Callable[P, R]:
    """Let missing arguments be None when a method is called, which has the error with the cure. It costs no call.

    A type checker and `inspect.signature` still say that they are required.
    """
    function: Any = method
    function.__signature__ = inspect.signature(method)
    given = function.__defaults__ or ()
    function.__defaults__ = (None,) * (function.__code__.co_argcount - 1 - len(given)) + given
    return method


def keywords(
    cure: str, positional: str = "", /, *more: str, **cures: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: a keyword argument that the method lacks raises an `InvalidTypeError` with the cure.

    ``cures`` has the cures of single names, ``cure`` that of all others, and ``positional`` that of too many positional
    arguments, and of missing ones. ``more`` are names that it takes by ``**``. A hot path takes ``**unknown`` instead,
    and raises `unknown_keyword`, which costs no call.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        code = method.__code__
        names = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]).union(more)
        signature = functools.cache(functools.partial(inspect.signature, method))  # imports take less time
        called = method.__qualname__.removesuffix(".__init__")

        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.keys() <= names:
                raise unknown_keyword(called, kwargs.keys() - names, cure, cures, names)
            if positional:
                try:
                    signature().bind(*args, **kwargs)
                except TypeError as error:
                    raise InvalidTypeError(f"{called}: {error}: {positional}") from None
            return method(*args, **kwargs)

        return checked

    return decorate


def unknown_keyword(
    called: str, names: Iterable[str], cure: str, cures: Mapping[str, str], known: Iterable[str] = ()
) -> InvalidTypeError:
    """Return the error for keyword arguments that a method lacks; see `keywords`. ``known`` are those that it has."""
    name = min(names, key=lambda each: (each not in cures, each))  # rather one with a cure of its own
    near = [] if name in cures else difflib.get_close_matches(name, sorted(known), 1)
    cure = "; ".join([cures.get(name, cure), *(f"the nearest name is {each!r}" for each in near)])
    return InvalidTypeError(f"{called} has no parameter {name!r}: {cure}")


def add_reader(loop: asyncio.AbstractEventLoop, descriptor: int, callback: Callable[[], object]) -> None:
    """Do ``loop.add_reader``. A loop that lacks it raises an `UnsupportedError` with the cure."""
    try:
        loop.add_reader(descriptor, callback)
    except NotImplementedError as error:
        cure = str(error) or "run the program by asyncio.run(main()), or with uvloop"
        kind = type(loop)
        raise UnsupportedError(
            f"the event loop {kind.__module__}.{kind.__qualname__} has no add_reader, by which devices and processes "
            f"wake it: {cure}"
        ) from None
