"""Generic, and type parameters with the default Any, which Python's own have only since 3.13."""

from __future__ import annotations

from types import GenericAlias
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Generic

    from typing_extensions import TypeVar

    Item = TypeVar("Item", default=Any)
    Result = TypeVar("Result", default=Any)
    Result_co = TypeVar("Result_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    Item = TypeVar("Item")
    Result = TypeVar("Result")
    Result_co = TypeVar("Result_co", covariant=True)

    class Generic:
        """Takes one argument for several parameters, too: the others have their default."""

        __slots__ = ()

        __class_getitem__ = classmethod(GenericAlias)


__all__ = ["Generic", "Item", "Result", "Result_co"]
