"""Plan: which stage of a pipeline comes behind which, and which of them share a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._checks import several
from ..errors import InvalidArgumentError, InvalidTypeError
from ._slot import SlotState
from ._stage import Stage

__all__ = ["Plan"]


class Plan:
    """Stages as a graph. They are known by their positions, and no stage comes before one that it is behind.

    Attributes
    ----------
    stages : tuple of Stage
    names : list of str
    before, behind : list of tuple of int
        The stages right before each, and right behind it.
    ancestors : list of tuple of int
        All that come before each, in order.
    roots : list of int
        Those that nothing comes before.
    states : list of str
        What a slot is while each stage has it.
    groups : list of tuple of int
        Those that share a stream; each stage is in one of them.
    replayed : frozenset of int
        Those whose work is captured once for each slot, and launched from then on.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        streams: Iterable[Iterable[str]] | None = None,
        replay: bool | Iterable[str] = False,
    ) -> None:
        self.stages = _checked(stages)
        self.names = [stage.name for stage in self.stages]
        self.before = [self._prerequisites(position) for position in range(len(self.stages))]
        every = range(len(self.stages))
        self.behind = [tuple(one for one in every if position in self.before[one]) for position in every]
        self.roots = [position for position in every if not self.before[position]]
        self.ancestors: list[tuple[int, ...]] = []
        for before in self.before:
            self.ancestors.append(tuple(sorted({*before, *(far for one in before for far in self.ancestors[one])})))
        self.states = self._states()
        self.awaits = any(stage.awaits for stage in self.stages)
        self.groups = self._groups(streams)
        self.replayed = self._replayed(replay)

    def _prerequisites(self, position: int) -> tuple[int, ...]:
        stage = self.stages[position]
        if stage.after is None:
            return (position - 1,) if position else ()
        earlier = self.names[:position]
        for name in stage.after:
            if name not in earlier:
                raise InvalidArgumentError(
                    f"stage {stage.name!r} comes after {name!r}, which is no stage before it in the list; "
                    f"there {'are ' + ', '.join(map(repr, earlier)) if earlier else 'is none'}",
                    after=name,
                )
        return tuple(sorted({earlier.index(name) for name in stage.after}))

    def _states(self) -> list[SlotState]:
        """Uploading where no stage that enqueues came before, downloading where none comes behind, else processing.

        Where that would be both, it is processing. If no stage enqueues, all count as if they did.
        """
        marks = {position for position, stage in enumerate(self.stages) if not stage.awaits}
        marks = marks or set(range(len(self.stages)))
        heirs = {far for position in marks for far in self.ancestors[position]}
        states: list[SlotState] = []
        for position, before in enumerate(self.ancestors):
            first, last = marks.isdisjoint(before), position not in heirs
            states.append("processing" if first == last else "uploading" if first else "downloading")
        return states

    def _groups(self, streams: Iterable[Iterable[str]] | None) -> list[tuple[int, ...]]:
        groups = []
        taken: set[int] = set()
        named = "streams is a sequence of sequences of stages' names"
        for group in () if streams is None else several(streams, named):
            positions = tuple(sorted(self._position(name) for name in several(group, named)))
            if taken.intersection(positions) or len(set(positions)) < len(positions):
                raise InvalidArgumentError(f"streams={streams!r} names a stage twice: each has one stream")
            for position in positions if len(positions) > 1 else ():
                if self.stages[position].awaits:
                    raise InvalidArgumentError(f"{self.stages[position]!r} has a stream of its own: it shares none")
            taken.update(positions)
            if positions:
                groups.append(positions)
        groups += [(position,) for position in range(len(self.stages)) if position not in taken]
        return sorted(groups)

    def _replayed(self, replay: bool | Iterable[str]) -> frozenset[int]:
        if isinstance(replay, bool):
            return frozenset(one for one, stage in enumerate(self.stages) if replay and not stage.awaits)
        if isinstance(replay, str) or not isinstance(replay, Iterable):
            raise InvalidTypeError(f"replay is True, False or a sequence of stages' names, not {replay!r}")
        found = frozenset(self._position(name, "replay") for name in replay)
        for position in found:
            if self.stages[position].awaits:
                raise InvalidArgumentError(
                    f"{self.stages[position]!r} works on the host, which no graph can: leave it out of replay"
                )
        return found

    def _position(self, name: str, argument: str = "streams") -> int:
        if not isinstance(name, str) or name not in self.names:
            raise InvalidArgumentError(
                f"{argument} names the stage {name!r}, and there are {', '.join(map(repr, self.names))}", stage=name
            )
        return self.names.index(name)

    def longest(self, seconds: Sequence[float]) -> tuple[float, list[int]]:
        """The longest way through the stages, if each takes so long: its length, and the stages on it."""
        ways: list[tuple[float, list[int]]] = []
        for position, own in enumerate(seconds):
            length, way = max((ways[one] for one in self.before[position]), default=(0.0, []), key=_length)
            ways.append((length + own, [*way, position]))
        return max(ways, key=_length)

    def __str__(self) -> str:
        """The names, ``→`` where a stage comes right behind the one before it, else what it comes behind."""
        text = ""
        for position, name in enumerate(self.names):
            if self.before[position] == (position - 1,):
                text += f" → {name}"
            else:
                sources = "+".join(self.names[one] for one in self.before[position])
                text += f"{', ' * bool(text)}{sources}{' → ' * bool(sources)}{name}"
        return text


def _length(way: tuple[float, list[int]]) -> float:
    return way[0]


def _checked(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    found = tuple(several(stages, "stages is a sequence of aiocuda.Stage"))
    for stage in found:
        if not isinstance(stage, Stage):
            raise InvalidTypeError(f"stages is a sequence of aiocuda.Stage, and one of them is {stage!r}")
    if not found:
        raise InvalidArgumentError("a pipeline needs at least one stage")
    names = [stage.name for stage in found]
    if len(set(names)) < len(names):
        raise InvalidArgumentError(f"two stages have the same name: {', '.join(map(repr, names))}")
    return found
