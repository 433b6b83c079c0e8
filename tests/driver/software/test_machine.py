from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Literal

import pytest

from aiocuda.driver.software.rules import Command, EngineKind, Machine, State
from aiocuda.errors import InvalidArgumentError, StaleHandleError, WrongDeviceError


class Bench:
    """A machine with named commands and a clock that the test sets."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine if machine is not None else Machine(devices=2, compute_slots=16)
        self.commands: dict[str, Command] = {}
        self.log: list[str] = []
        self.next: float | None = None

    def stream(self, device: int = 0, priority: int = 0) -> int:
        return self.machine.stream_create(device, priority)

    def work(self, name: str, stream: int, kind: EngineKind = "compute", seconds: float | None = None) -> Command:
        on = self.machine.stream(stream)
        engine = self.machine.engine(on.device, kind)
        command = self.machine.submit(on, "kernel" if kind == "compute" else kind, name, engine, seconds)
        self.commands[name] = command
        return command

    def call(self, name: str, stream: int) -> None:
        self.machine.submit(self.machine.stream(stream), "call", name)

    def event(self, device: int = 0) -> int:
        return self.machine.event_create(device, timing=False)

    def record(self, stream: int, event: int | None = None) -> int:
        event = self.event(self.machine.stream(stream).device) if event is None else event
        self.machine.record(self.machine.event(event), self.machine.stream(stream))
        return event

    def wait(self, stream: int, event: int) -> None:
        self.machine.wait(self.machine.stream(stream), self.machine.event(event))

    def is_done(self, event: int) -> bool:
        return self.machine.event(event).is_done

    def step(self, now: float = 0.0) -> list[str]:
        """What came of it: ``name+`` for a start, ``name-`` for an end."""
        step = self.machine.step(now)
        self.next = step.next
        return [f"{command.action}-" for command in step.ends] + [f"{command.action}+" for command in step.starts]

    def finish(self, name: str, now: float = 0.0) -> list[str]:
        self.machine.finish(self.commands[name], now)
        return self.step(now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Order within a stream


def test_commands_of_a_stream_run_one_after_the_other(bench: Bench) -> None:
    stream = bench.stream()
    for name in "abc":
        bench.work(name, stream)
    assert bench.step() == ["a+"]
    assert bench.step() == []
    assert bench.finish("a") == ["b+"]
    assert bench.finish("b") == ["c+"]
    assert bench.finish("c") == []
    assert bench.machine.stream(stream).is_idle


def test_commands_without_time_keep_their_place(bench: Bench) -> None:
    stream = bench.stream()
    bench.call("before", stream)
    bench.work("work", stream)
    bench.call("after", stream)
    assert bench.step() == ["before-", "work+"]
    assert bench.finish("work") == ["after-"]


def test_command_goes_through_all_its_states(bench: Bench) -> None:
    first, second = bench.stream(), bench.stream()
    bench.work("first", first, "upload")
    command = bench.work("second", second, "upload")
    seen = [command.state]
    bench.step()
    seen.append(command.state)
    bench.finish("first")
    seen.append(command.state)
    bench.finish("second", 3.0)
    seen.append(command.state)
    assert seen == [State.QUEUED, State.READY, State.RUNNING, State.DONE]
    assert command.done
    assert command.ended == 3.0


def test_streams_do_not_hold_one_another(bench: Bench) -> None:
    for name in "abcdefgh":
        bench.work(name, bench.stream())
    assert bench.step() == [f"{name}+" for name in "abcdefgh"]
    assert bench.finish("e") == []


# Engines


def test_two_uploads_share_an_engine_and_all_else_overlaps(bench: Bench) -> None:
    kinds: dict[str, EngineKind] = {"up1": "upload", "up2": "upload", "down": "download", "kernel": "compute"}
    for name, kind in kinds.items():
        bench.work(name, bench.stream(), kind)
    assert sorted(bench.step()) == ["down+", "kernel+", "up1+"]
    assert bench.finish("down") == []
    assert bench.finish("up1") == ["up2+"]


def test_devices_have_engines_of_their_own(bench: Bench) -> None:
    bench.work("here", bench.stream(0), "upload")
    bench.work("there", bench.stream(1), "upload")
    assert sorted(bench.step()) == ["here+", "there+"]


def test_compute_engine_runs_as_many_as_it_has_slots() -> None:
    bench = Bench(Machine(devices=1, compute_slots=16))
    for index in range(17):
        bench.work(str(index), bench.stream())
    assert bench.step() == [f"{index}+" for index in range(16)]
    assert bench.finish("7") == ["16+"]


def test_free_engine_takes_the_highest_priority_then_the_first_to_arrive(bench: Bench) -> None:
    bench.work("running", bench.stream(), "upload")
    bench.step()
    for name, priority in {"low1": 0, "low2": 0, "middle": -1, "high1": -5, "high2": -5}.items():
        bench.work(name, bench.stream(priority=priority), "upload")
        bench.step()
    order = ["running", "high1", "high2", "middle", "low1", "low2"]
    for name, following in itertools.pairwise(order):
        assert bench.finish(name) == [f"{following}+"]


def test_chooser_decides_which_ready_command_starts() -> None:
    asked: list[list[str]] = []

    def last(point: Literal["start", "settle"], candidates: Sequence[Command]) -> int:
        if point == "start":
            asked.append([command.action for command in candidates])
        return len(candidates) - 1

    bench = Bench(Machine(1, 16, last))
    bench.work("a", bench.stream(), "upload")
    bench.step()
    for name in "bcd":
        bench.work(name, bench.stream(), "upload")
        bench.step()
    assert bench.finish("a") == ["d+"]
    assert bench.finish("d") == ["c+"]
    assert bench.finish("c") == ["b+"]
    assert asked == [["b", "c", "d"], ["b", "c"]]


def test_chooser_decides_which_stream_moves_on_first() -> None:
    def last(point: Literal["start", "settle"], candidates: Sequence[Command]) -> int:
        return len(candidates) - 1 if point == "settle" else 0

    bench = Bench(Machine(1, 16, last))
    first, second = bench.stream(), bench.stream()
    bench.call("a", first)
    bench.call("b", first)
    bench.call("c", second)
    assert bench.step() == ["c-", "a-", "b-"]


# Time


def test_timed_commands_end_at_their_time_and_not_before(bench: Bench) -> None:
    stream = bench.stream()
    command = bench.work("a", stream, "upload", seconds=2.0)
    event = bench.record(stream)
    assert bench.step(10.0) == ["a+"]
    assert bench.next == 12.0
    assert bench.step(11.999) == []
    assert not bench.is_done(event)
    assert bench.step(12.0) == ["a-"]
    assert bench.is_done(event)
    assert (command.started, command.ended) == (10.0, 12.0)
    assert bench.next is None


def test_late_step_finds_everything_at_the_time_when_it_happened(bench: Bench) -> None:
    stream = bench.stream()
    ends = {}
    for name in "abc":
        ends[name] = bench.work(name, stream, "upload", seconds=1.0)
    bench.step(0.0)
    assert bench.step(100.0) == ["a-", "b-", "c-", "b+", "c+"]
    assert [command.ended for command in ends.values()] == [1.0, 2.0, 3.0]


def test_many_commands_of_no_length_end_in_one_step(bench: Bench) -> None:
    stream = bench.stream()
    for index in range(5_000):
        bench.work(str(index), stream, seconds=0.0)
    bench.step(1.0)
    assert bench.machine.stream(stream).is_idle


def test_only_a_running_command_of_unknown_length_is_ended_from_outside(bench: Bench) -> None:
    stream = bench.stream()
    timed = bench.work("timed", bench.stream(), seconds=1.0)
    bench.work("running", stream)
    behind = bench.work("behind", stream)
    bench.step()
    for command in (timed, behind):
        with pytest.raises(RuntimeError, match="cannot be finished"):
            bench.machine.finish(command, 0.0)
    bench.finish("running")
    with pytest.raises(RuntimeError, match="not running"):
        bench.machine.finish(bench.commands["running"], 0.0)


# Events


def test_event_is_done_with_what_was_before_its_record(bench: Bench) -> None:
    stream = bench.stream()
    bench.work("before", stream)
    event = bench.record(stream)
    bench.work("after", stream)
    bench.step()
    assert not bench.is_done(event)
    bench.finish("before")
    assert bench.is_done(event)


def test_never_recorded_event_is_done_and_delays_no_stream(bench: Bench) -> None:
    stream, event = bench.stream(), bench.event()
    assert bench.is_done(event)
    bench.wait(stream, event)
    bench.work("work", stream)
    assert bench.step() == ["work+"]


def test_wait_holds_until_the_record_and_only_its_own_stream(bench: Bench) -> None:
    left, right = bench.stream(), bench.stream()
    bench.work("left", left)
    event = bench.record(left)
    bench.wait(right, event)
    bench.work("right", right)
    bench.work("free", bench.stream())
    assert bench.step() == ["left+", "free+"]
    assert bench.finish("left") == ["right+"]


def test_wait_holds_on_the_record_it_saw_when_the_event_is_recorded_anew(bench: Bench) -> None:
    first, second, waiting = bench.stream(), bench.stream(), bench.stream()
    bench.work("first", first)
    bench.work("second", second)
    event = bench.record(first)
    bench.wait(waiting, event)
    bench.work("waiting", waiting)
    bench.record(second, event)
    bench.step()
    assert bench.finish("first") == ["waiting+"]
    assert not bench.is_done(event)
    bench.finish("second")
    assert bench.is_done(event)


def test_wait_after_the_new_record_does_not_hold_on_the_old_one(bench: Bench) -> None:
    held, free, waiting = bench.stream(), bench.stream(), bench.stream()
    bench.work("held", held)
    event = bench.record(held)
    bench.record(free, event)
    bench.step()
    bench.wait(waiting, event)
    bench.work("waiting", waiting)
    assert bench.step() == ["waiting+"]


def test_waits_across_devices_hold(bench: Bench) -> None:
    here, there = bench.stream(0), bench.stream(1)
    bench.work("here", here)
    event = bench.record(here)
    bench.wait(there, event)
    bench.work("there", there)
    assert bench.step() == ["here+"]
    assert bench.finish("here") == ["there+"]


def test_record_on_a_stream_of_another_device_is_refused(bench: Bench) -> None:
    event = bench.event(device=1)
    with pytest.raises(WrongDeviceError, match=r"event \d+ belongs to device 1") as caught:
        bench.record(bench.stream(0), event)
    assert vars(caught.value) == {"device": 1, "expected": 0}
    assert bench.is_done(event)


# Handles


def test_destroyed_stream_still_runs_what_it_accepted(bench: Bench) -> None:
    stream = bench.stream()
    bench.work("a", stream)
    bench.work("b", stream)
    event = bench.record(stream)
    bench.step()
    bench.machine.stream_destroy(stream)
    with pytest.raises(StaleHandleError, match=f"{stream} is not a stream"):
        bench.machine.stream(stream)
    assert [each.handle for each in bench.machine.busy_streams()] == [stream]
    assert bench.finish("a") == ["b+"]
    bench.finish("b")
    assert bench.is_done(event)
    assert bench.machine.busy_streams() == []


def test_wait_holds_on_after_its_event_is_destroyed(bench: Bench) -> None:
    left, right = bench.stream(), bench.stream()
    bench.work("left", left)
    event = bench.record(left)
    bench.wait(right, event)
    bench.machine.event_destroy(event)
    bench.work("right", right)
    assert bench.step() == ["left+"]
    assert bench.finish("left") == ["right+"]
    with pytest.raises(StaleHandleError, match=f"{event} is not an event"):
        bench.machine.event_destroy(event)


def test_handles_are_never_used_twice_nor_for_another_kind(bench: Bench) -> None:
    handles = []
    for _ in range(3):
        handles += [bench.stream(), bench.event()]
        bench.machine.stream_destroy(handles[-2])
        bench.machine.event_destroy(handles[-1])
    assert len(set(handles)) == 6
    assert 0 not in handles
    event = bench.event()
    with pytest.raises(StaleHandleError):
        bench.machine.stream(event)


def test_default_stream_is_there_and_stays(bench: Bench) -> None:
    bench.work("a", 0)
    assert bench.step() == ["a+"]
    with pytest.raises(InvalidArgumentError, match="default stream"):
        bench.machine.stream_destroy(0)


# Against a model


@pytest.mark.parametrize("seed", range(20))
def test_random_choices_keep_every_order(seed: int) -> None:
    """Whatever a chooser decides: streams in order, waits kept, engines within their slots, nothing left over."""
    rng = random.Random(seed)
    machine = Machine(2, 4, lambda _, candidates: rng.randrange(len(candidates)))
    streams = [machine.stream(machine.stream_create(rng.randrange(2), rng.randrange(-5, 1))) for _ in range(6)]
    events = [machine.event(machine.event_create(device, timing=False)) for device in (0, 1) for _ in range(3)]
    before: dict[Command, list[Command]] = {}  # by the rules, from the order of the calls alone
    recorded: dict[int, list[Command]] = {}
    needs: dict[int, list[Command]] = {stream.handle: [] for stream in streams}
    running: list[Command] = []
    ended: set[Command] = set()
    now = 0.0

    def step() -> None:
        for command in machine.step(now).starts:
            assert not [other for other in before[command] if other not in ended]
            running.append(command)
            assert command.engine is not None
            same = [each for each in running if each.engine is command.engine]
            assert len(same) <= command.engine.slots

    def end_one() -> None:
        nonlocal now
        now += 1.0
        command = running.pop(rng.randrange(len(running)))
        ended.add(command)
        machine.finish(command, now)
        step()

    for _ in range(400):
        stream = rng.choice(streams)
        match rng.randrange(5):
            case 0:
                event = rng.choice([each for each in events if each.device == stream.device])
                machine.record(event, stream)
                recorded[event.handle] = list(needs[stream.handle])
            case 1:
                event = rng.choice(events)
                machine.wait(stream, event)
                needs[stream.handle] += recorded.get(event.handle, [])
            case _:
                kinds: tuple[EngineKind, ...] = ("upload", "download", "compute")
                engine = machine.engine(stream.device, rng.choice(kinds))
                command = machine.submit(stream, "kernel", None, engine)
                before[command] = list(needs[stream.handle])
                needs[stream.handle].append(command)
        step()
        for event in events:
            assert event.is_done == ended.issuperset(recorded.get(event.handle, []))
        while running and rng.random() < 0.3:
            end_one()
    while running:
        end_one()
    assert len(ended) == len(before)
    assert all(stream.is_idle for stream in streams)
