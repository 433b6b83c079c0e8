"""Kills ``examples/training.py`` again and again, and compares what it ends with to a run that nothing has killed.

``python -m tests.examples.killed_training FOLDER RANKS THREAD PROCESS SEED``: so many kills while threads decode, and
while processes do. The ranks are forks of this process, which has imported PyTorch. Two ranks are started by torchrun,
too. It exits with 1 and names what differs.
"""

from __future__ import annotations

import importlib
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from aiocuda import data
from tests.project.tree import ROOT

PROGRAM = ROOT / "examples" / "training.py"


class Rank:
    """A rank of the program, in a fork of this process.

    Attributes
    ----------
    lines
        What it prints.
    """

    def __init__(self, arguments: list[str], variables: dict[str, str]) -> None:
        reader, writer = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.dup2(writer, 1)
            os.environ.update(variables)
            sys.argv = [str(PROGRAM), *arguments]
            runpy.run_path(str(PROGRAM), run_name="__main__")
            os._exit(0)
        os.close(writer)
        self.lines: IO[str] = os.fdopen(reader)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        os.kill(self._pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for its end. Return its exit status."""
        self.lines.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run(checkpoint: Path, executor: str, ranks: int, chance: random.Random | None = None) -> bool:
    """Run the program, and kill it by chance. Return whether it has ended by itself."""
    variables = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = ["--checkpoint", str(checkpoint), "--executor", executor]
    running = [Rank(arguments, {**variables, "RANK": str(rank)}) for rank in range(ranks)]
    printed = running[0].lines
    if chance is None:
        printed.read()
    else:
        for _ in range(chance.randint(0, 3)):  # each checkpoint is a line
            printed.readline()
        time.sleep(chance.random() * 0.1)  # noqa: TID251 - a random moment of the next steps
        chance.shuffle(running)  # the first one is lost, and then the others
        for rank in running:
            rank.kill()
    statuses = {rank.end() for rank in running}
    if chance is None and statuses != {0}:  # else this would run for ever
        sys.exit(f"{ranks} ranks, {executor}: exit statuses {statuses}")
    return statuses == {0}


def differences(found: Any, expected: Any, place: str = "checkpoint") -> list[str]:
    """Return the places where two checkpoints differ, tensors to the bit."""
    torch: Any = importlib.import_module("torch")
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return [each for key in expected for each in differences(found[key], expected[key], f"{place}[{key!r}]")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [each for at, pair in enumerate(zip(found, expected, strict=True))
                for each in differences(*pair, f"{place}[{at}]")]  # fmt: skip
    if isinstance(expected, torch.Tensor):
        return [] if torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (found, expected))) else [place]
    return [] if found == expected else [place]


def killed_until_the_end(folder: Path, executor: str, ranks: int, kills: int, chance: random.Random) -> None:
    """Kill the program so many times, and let it end. Where it ends earlier, begin again."""
    whole = loaded(folder / "whole.pt")
    killed = ends = 0
    while killed < kills:
        checkpoint, ended = folder / f"{executor}-{ends}.pt", False
        while not ended:
            ended = run(checkpoint, executor, ranks, chance if killed < kills else None)
            killed += not ended
        ends += 1
        if found := differences(loaded(checkpoint), whole):
            sys.exit(f"{ranks} ranks, {executor}, after {killed} kills: {found}")
    print(f"{ranks} ranks, {executor}: {killed} kills, {ends} checkpoints as without")  # noqa: T201 - for the test


def another_number_of_ranks(checkpoint: Path, ranks: int) -> None:
    """Begin with these ranks, and go on with one less."""
    while not checkpoint.exists():
        run(checkpoint, "thread", ranks, random.Random(0))
    assert run(checkpoint, "thread", ranks - 1)
    assert loaded(checkpoint)["loader"]["epoch"] == 2


def torchrun(checkpoint: Path, ranks: int) -> None:
    """Let torchrun start the ranks, kill one of them, which ends the others, and start all again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(PROGRAM), "--checkpoint", str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        assert len(pids) == ranks
        os.kill(int(pids[-1]), signal.SIGKILL)
        process.stdout.read()
    assert process.returncode != 0
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if found := differences(loaded(checkpoint), loaded(checkpoint.with_name("whole.pt"))):
        sys.exit(f"torchrun: {found}")
    print(f"{ranks} ranks of torchrun: one killed, as without")  # noqa: T201 - for the test


def main(folder: Path, ranks: int, thread: int, process: int, seed: int) -> None:
    for name in ("torch.distributed", "torch._dynamo", "numpy"):
        importlib.import_module(name)
    for name in data.__all__:
        getattr(data, name)
    chance = random.Random(seed)
    assert run(folder / "whole.pt", "thread", ranks)
    killed_until_the_end(folder, "thread", ranks, thread, chance)
    killed_until_the_end(folder, "process", ranks, process, chance)
    if ranks == 2:
        torchrun(folder / "torchrun.pt", ranks)
    if ranks == 3:
        another_number_of_ranks(folder / "other.pt", ranks)


def loaded(checkpoint: Path) -> Any:
    """Return what a checkpoint holds, on the CPU: a process that has used a GPU cannot fork ranks that use it."""
    return importlib.import_module("torch").load(checkpoint, map_location="cpu", weights_only=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
