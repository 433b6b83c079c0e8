"""SourceState: the state of a source of batches after those that were delivered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final, TypeVar

from .._base._user_code import add_note
from ..errors import InvalidTypeError

__all__ = ["UNKNOWN", "SourceState"]

T = TypeVar("T")

#: In place of a state: it has not been taken, or there is none.
UNKNOWN: Final[Any] = object()

#: The methods of an object with a state: PyTorch's names, and Grain's.
NAMES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


class SourceState:
    """The state of a source, or of its iterator, during one pass over it.

    `iterate` and `take` are called where the source is read: on its thread, or on the loop. Each state is a deep copy,
    since a source may change its own one in place.

    Attributes
    ----------
    after
        The state after the delivered batches; `UNKNOWN` before `iterate` has ended, and without a state.
    has_begun : bool
        True if the source has been iterated.

    Parameters
    ----------
    source
    loaded
        The state with which the pass begins; `UNKNOWN` for that of the source.
    """

    def __init__(self, source: Any, loaded: Any = UNKNOWN) -> None:
        self._source = source
        self._owner = source if _methods_of(source) else None  # of the state
        self._loaded = loaded
        self._is_at_end = False
        self.after = self._before = loaded
        self.has_begun = False

    def iterate(self, begin: Callable[[Any], T]) -> T:
        """Return the iterator of the source by ``begin``, in the loaded state. **May block.**"""
        if self._owner is not None and self._loaded is not UNKNOWN:
            self._load(self._loaded)
        iterator = begin(self._source)
        if self._owner is None:
            if _methods_of(iterator):
                self._owner = iterator
            if self._loaded is not UNKNOWN:
                self._load(self._loaded)
        if self.after is UNKNOWN:
            self.after = self.take()
        self.has_begun = True
        return iterator

    def take(self) -> Any:
        """Return the present state; `UNKNOWN` without one, or if its method is not implemented. **May block.**"""
        methods = None if self._owner is None else _methods_of(self._owner)
        if methods is None:
            return UNKNOWN
        try:
            return copy.deepcopy(methods[0]())
        except NotImplementedError:
            self._owner = None
            return UNKNOWN
        except Exception as error:
            add_note(error, "in the state of the source of to_device()")
            raise

    def deliver(self, after: Any, *, is_end: bool = False) -> None:
        """Note that the consumer gets the batch that was read before this state, or the end."""
        self._before, self.after = self.after, after
        self._is_at_end = is_end

    def take_back(self) -> None:
        """The newest batch did not reach the consumer: it is delivered again."""
        self.after = self._before

    @property
    def is_ahead(self) -> bool:
        """True if the source itself has a state, which is ahead of the delivered batches."""
        return self.has_begun and self._owner is self._source and not self._is_at_end

    @property
    def start_of_next(self) -> Any:
        """The state with which the next pass begins; `UNKNOWN` for a new iteration."""
        return UNKNOWN if self._is_at_end or self._owner is None else self.after

    def set_back(self) -> None:
        """Load the state after the delivered batches into the source. **May block.**"""
        if self.is_ahead:
            self._load(self.after)

    def error(self) -> InvalidTypeError:
        """Return the error for a source without a state."""
        return InvalidTypeError(
            f"the source of these batches, of type {type(self._source).__name__}, has no state: neither it nor its "
            "iterator has the methods state_dict and load_state_dict, or get_state and set_state"
        )

    def _load(self, state: Any) -> None:
        methods = _methods_of(self._owner)
        if methods is None:
            raise self.error()
        methods[1](copy.deepcopy(state))


def _methods_of(owner: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return the methods that return and load the state of an object; None if it has none."""
    for names in NAMES:
        get, load = (getattr(owner, name, None) for name in names)
        if callable(get) and callable(load):
            return get, load
    return None
