from __future__ import annotations

import threading
import time

from aiocuda.driver.host._runner import Runner
from aiocuda.driver.software.rules import Command, Machine
from tests.driver.host.kit import PATIENCE


def some_command() -> Command:
    machine = Machine(devices=1, compute_slots=1)
    return machine.submit(machine.stream(0), "call")


def test_runner_goes_on_with_what_its_task_returns_then_waits() -> None:
    runner = Runner("a runner")
    commands = [some_command() for _ in range(3)]
    carried_out: list[Command] = []
    idle = threading.Event()

    def task(_: Runner, command: Command) -> Command | None:
        carried_out.append(command)
        if len(carried_out) < len(commands):
            return commands[len(carried_out)]
        idle.set()
        return None

    runner.assign(task, commands[0])
    assert idle.wait(PATIENCE)
    assert carried_out == commands
    assert runner.is_alive
    runner.dismiss()
    runner.dismiss()
    runner._thread.join(PATIENCE)
    assert not runner.is_alive


def test_sleep_is_never_too_short_and_a_tiny_one_comes_to_its_end() -> None:
    for microseconds in (0, 1, 5, 50) * 100:  # each on a runner that has never slept: the first sleep is special
        runner = Runner("a runner")
        when = time.monotonic() + microseconds * 1e-6
        runner.sleep_until(when)
        assert time.monotonic() >= when
        runner.dismiss()


def test_dismissal_ends_a_sleep() -> None:
    runner = Runner("a runner")
    asleep = threading.Event()

    def task(runner: Runner, _: Command) -> None:
        asleep.set()
        runner.sleep_until(time.monotonic() + 1e9)

    runner.assign(task, some_command())
    assert asleep.wait(PATIENCE)
    runner.dismiss()
    runner._thread.join(PATIENCE)
    assert not runner.is_alive
    runner.sleep_until(time.monotonic() + 1e9)  # and it never sleeps again
