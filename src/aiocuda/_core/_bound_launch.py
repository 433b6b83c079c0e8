"""BoundLaunch: a kernel launch that a stream repeats, with the same grid, block and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ._bound_call import BoundCall

if TYPE_CHECKING:
    from ..driver.protocol import Launcher, RecordedCall
    from ._block_fields import BlockFields
    from ._estimate import Estimate
    from ._ring import Ring
    from ._stream_operation import StreamOperation

__all__ = ["BoundLaunch"]


class BoundLaunch(BoundCall):
    """A kernel launch with everything bound that does not change.

    Attributes
    ----------
    launcher
        The driver's launch, without the record of an event.
    pointers
        The indices of the arguments that are memory.
    converters
        Of the arguments.
    kernel
    """

    __slots__ = ("converters", "kernel", "launcher", "pointers")

    def __init__(
        self, queue: Ring, call: RecordedCall, launcher: Launcher, estimate: Estimate,
        pointers: tuple[int, ...], converters: tuple[Callable[[Any], Any], ...], kernel: Any,
    ) -> None:  # fmt: skip
        super().__init__(queue, "launch", estimate, call, launcher)
        self.launcher = launcher
        self.pointers = pointers
        self.converters = converters
        self.kernel = kernel

    def repeat(
        self, args: tuple[Any, ...], label: str | None = None, values: Sequence[Any] | None = None
    ) -> StreamOperation[None] | None:
        """Enqueue the launch again. Return None if memory is new to the stream: then it needs all checks.

        ``values`` are the arguments if they have been converted already. A measured hot path: it reads `_block` instead
        of calling `block_of`.
        """
        queue = self.queue
        if values is None:
            if len(args) != len(self.converters):
                raise self.kernel.signature.count_error(args)
            values = []
            for convert, argument in zip(self.converters, args):  # noqa: B905 - just counted
                values.append(convert(argument))
        for index in self.pointers:
            memory: BlockFields = args[index]._block
            used = memory.uses.get(queue)
            # If that operation failed or was skipped, so were the waits before it.
            if used is None or (used.extra is not None and used.failure is not None) or not memory.ready:
                return None
        operation = self.enqueue(values, args, label)
        for index in self.pointers:
            args[index]._block.uses[queue] = operation
        return operation
