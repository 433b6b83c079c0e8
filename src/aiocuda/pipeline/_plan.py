"""Plan: the order of a pipeline's stages, and which of them share a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._base._checks import several
from ..errors import InvalidArgumentError, InvalidTypeError
from ._slot import SlotState
from ._stage import Stage

__all__ = ["Plan"]


class Plan:
    """The graph of a pipeline's stages. A stage is known by its position; its prerequisites have smaller positions.

    Attributes
    ----------
    stages : tuple of Stage
    names : list of str
    prerequisites, successors : list of tuple of int
        The stages directly before each stage, and directly after it.
    ancestors : list of tuple of int
        All stages before each stage, in order.
    roots : list of int
        The stages without prerequisites.
    states : list of str
        The state of a slot while each stage has it.
    awaits : bool
        True if at least one stage awaits.
    is_chain : bool
        True if no stage awaits, and each has the one before it as its only prerequisite.
    is_plain : bool
        True if it is a chain of stages that are nothing but functions: none is prepared or replayed.
    stream_groups : list of tuple of int
        Groups of stages that share a stream; each stage is in one group.
    replayed : tuple of int
        The stages that are captured once for each slot, and replayed.
    """

    __slots__ = ("ancestors", "awaits", "is_chain", "is_plain", "names", "prerequisites", "replayed", "roots",
                 "stages", "states", "stream_groups", "successors")  # fmt: skip

    def __init__(
        self,
        stages: Sequence[Stage],
        streams: Iterable[Iterable[str]] | None = None,
        replay: bool | Iterable[str] = False,
    ) -> None:
        self.stages = _checked(stages)
        self.names = [stage.name for stage in self.stages]
        positions = range(len(self.stages))
        self.prerequisites = [self._prerequisites(position) for position in positions]
        self.successors = [
            tuple(each for each in positions if position in self.prerequisites[each]) for position in positions
        ]
        self.roots = [position for position in positions if not self.prerequisites[position]]
        self.ancestors: list[tuple[int, ...]] = []
        for direct in self.prerequisites:
            self.ancestors.append(tuple(sorted({*direct, *(far for one in direct for far in self.ancestors[one])})))
        self.states = self._states()
        self.awaits = any(stage.awaits for stage in self.stages)
        self.is_chain = not self.awaits and all(
            prerequisites == ((position - 1,) if position else ())
            for position, prerequisites in enumerate(self.prerequisites)
        )
        self.stream_groups = self._stream_groups(streams)
        self.replayed = self._positions_to_replay(replay)
        self.is_plain = self.is_chain and not self.replayed and all(stage.prepare is None for stage in self.stages)

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
        """Return the state for each stage: uploading if it is first, downloading if it is last, else processing.

        First means that no stage that enqueues comes before it; last, that none comes after it. A stage that is both
        processes. If no stage enqueues, all stages count as if they did.
        """
        enqueuing = {position for position, stage in enumerate(self.stages) if not stage.awaits}
        enqueuing = enqueuing or set(range(len(self.stages)))
        with_later = {ancestor for position in enqueuing for ancestor in self.ancestors[position]}
        states: list[SlotState] = []
        for position, ancestors in enumerate(self.ancestors):
            is_first, is_last = enqueuing.isdisjoint(ancestors), position not in with_later
            states.append("processing" if is_first == is_last else "uploading" if is_first else "downloading")
        return states

    def _stream_groups(self, streams: Iterable[Iterable[str]] | None) -> list[tuple[int, ...]]:
        groups = []
        grouped: set[int] = set()
        expected = "streams is a sequence of sequences of stages' names"
        for group in () if streams is None else several(streams, expected):
            positions = tuple(sorted(self._position(name) for name in several(group, expected)))
            if grouped.intersection(positions) or len(set(positions)) < len(positions):
                raise InvalidArgumentError(f"streams={streams!r} names a stage twice: each has one stream")
            for position in positions if len(positions) > 1 else ():
                if self.stages[position].awaits:
                    raise InvalidArgumentError(f"{self.stages[position]!r} has a stream of its own: it shares none")
            grouped.update(positions)
            if positions:
                groups.append(positions)
        groups += [(position,) for position in range(len(self.stages)) if position not in grouped]
        return sorted(groups)

    def _positions_to_replay(self, replay: bool | Iterable[str]) -> tuple[int, ...]:
        """Return the positions of the stages that run as graphs. ``replay`` is the argument of the pipeline."""
        if isinstance(replay, bool):
            return tuple(position for position, stage in enumerate(self.stages) if replay and not stage.awaits)
        if isinstance(replay, str) or not isinstance(replay, Iterable):
            raise InvalidTypeError(f"replay is True, False or a sequence of stages' names, not {replay!r}")
        positions = tuple(sorted({self._position(name, "replay") for name in replay}))
        for position in positions:
            if self.stages[position].awaits:
                raise InvalidArgumentError(
                    f"{self.stages[position]!r} works on the host, which a graph cannot do: leave it out of replay"
                )
        return positions

    def _position(self, name: str, argument: str = "streams") -> int:
        if not isinstance(name, str) or name not in self.names:
            raise InvalidArgumentError(
                f"{argument} names the stage {name!r}, and there are {', '.join(map(repr, self.names))}", stage=name
            )
        return self.names.index(name)

    def reordered(self, names: Sequence[str]) -> Plan:
        """Return the plan of the same stages in another order."""
        order = several(names, "the order is a sequence of the stages' names, each once")
        positions = [self._position(name, "the order") for name in order]
        for name in self.names:
            if order.count(name) != 1:
                raise InvalidArgumentError(
                    f"the order {', '.join(map(repr, order)) or 'of no stage'} has {name!r} {order.count(name)} times: "
                    "name every stage once",
                    stage=name,
                )
        groups = [[self.names[position] for position in group] for group in self.stream_groups]
        return Plan(
            [self.stages[position] for position in positions], groups, [self.names[each] for each in self.replayed]
        )

    def longest_path(self, seconds: Sequence[float]) -> tuple[float, list[int]]:
        """Return the length of the longest path through the stages, which take these seconds, and its stages."""
        paths: list[tuple[float, list[int]]] = []
        for position, own in enumerate(seconds):
            length, path = max((paths[one] for one in self.prerequisites[position]), default=(0.0, []), key=_length)
            paths.append((length + own, [*path, position]))
        return max(paths, key=_length)

    def __str__(self) -> str:
        """The names in order; a stage that does not follow the one before it is shown with its prerequisites."""
        text = ""
        for position, name in enumerate(self.names):
            if self.prerequisites[position] == (position - 1,):
                text += f" → {name}"
            else:
                sources = "+".join(self.names[one] for one in self.prerequisites[position])
                text += f"{', ' * bool(text)}{sources}{' → ' * bool(sources)}{name}"
        return text


def _length(path: tuple[float, list[int]]) -> float:
    return path[0]


def _checked(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    checked = tuple(several(stages, "stages is a sequence of aiocuda.Stage"))
    for stage in checked:
        if not isinstance(stage, Stage):
            raise InvalidTypeError(
                f"stages is a sequence of aiocuda.Stage, Stage(name, function), and one of them is {stage!r}"
            )
    if not checked:
        raise InvalidArgumentError("a pipeline needs at least one stage")
    names = [stage.name for stage in checked]
    if len(set(names)) < len(names):
        raise InvalidArgumentError(f"two stages have the same name: {', '.join(map(repr, names))}")
    return checked
