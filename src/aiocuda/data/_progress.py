"""Progress: which epoch a loader is in, and which of its batches were delivered."""

from __future__ import annotations

from ._options import LoaderOptions
from ._order import Order
from ._state import LoaderState

__all__ = ["Progress"]


class Progress:
    """Which epoch a loader is in, and which of its batches were delivered.

    Batches may be delivered out of order. The position is that after the longest sequence of delivered batches; those
    after it are counted one by one.
    """

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        self._epoch = 0  # that runs, or ran last, or begins next
        self._position = 0
        self._batches = 0
        self._ends: dict[int, int] = {}  # the position after each batch that was delivered ahead, by its number
        self._ahead: set[int] = set()  # numbers of those that a loaded state has named: their ends are not known
        self._is_loaded = False  # a state was loaded, and its epoch has not begun
        self._has_begun = False

    def begin(self, number: int | None) -> tuple[Order, frozenset[int]]:
        """Begin an epoch, by default the next one. Return its order, and the batches that it leaves out."""
        resumes = self._is_loaded and (number is None or number == self._epoch)
        if not resumes:
            if number is None:
                number = self._epoch + self._has_begun
            self._set(LoaderState(epoch=number))
        self._is_loaded = False
        self._has_begun = True
        order = self._options.order(self._epoch, self._position, self._batches)
        return order, frozenset(self._ahead)

    def delivered(self, number: int, end: int) -> None:
        """Count a delivered batch."""
        self._ends[number] = end
        self._advance()

    def _advance(self) -> None:
        size = self._options.batch_size * self._options.shard[1]
        while self._batches in self._ends or self._batches in self._ahead:
            known = self._ends.pop(self._batches, None)
            self._ahead.discard(self._batches)
            self._position = self._position + size if known is None else known
            self._batches += 1

    def end_epoch(self) -> None:
        """The epoch has ended: the next one begins at its start."""
        self._set(LoaderState(epoch=self._epoch + 1))
        self._has_begun = False

    def state(self) -> LoaderState:
        """Return the state after the delivered batches."""
        shuffle = self._options.shuffle
        return LoaderState(
            epoch=self._epoch,
            position=self._position,
            batches=self._batches,
            ahead=tuple(sorted({*self._ends, *self._ahead})),
            samples=self._options.length if self._options.kind == "map" else None,
            shuffle=None if shuffle is None else (shuffle.seed, shuffle.window),
        )

    def load(self, state: LoaderState) -> None:
        """Go on after the batches of a state."""
        options = self._options
        samples = options.length if options.kind == "map" else None
        state.check_source(samples, options.shuffle, options.shard[1], options.batch_size)
        self._set(state)
        self._is_loaded = True

    def _set(self, state: LoaderState) -> None:
        self._epoch, self._position, self._batches = state.epoch, state.position, state.batches
        self._ends.clear()
        self._ahead = set(state.ahead)
