"""Steps of a part: each is a process with a time limit, whose output, results and end are kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = "{rows}"  # in a step's words: the file that it writes its results to, a JSON object in each line
LEAST_S = 20.0  # no step begins with less time left
GRACE_S = 15.0  # from the request to end until a process is killed: benchmarks end their servers
LAST_LINES = 30  # of the output of a step that failed

Row = dict[str, Any]


class Step(NamedTuple):
    """One step: a module of Python and its arguments, as after `python -m`. `tool`: words before the interpreter."""

    name: str
    words: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = {}
    tool: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """End of a step.

    `status`: its exit status; None if it had no time, or not enough. `rows`: its results, as far as it has come."""

    name: str
    command: str
    status: int | None
    seconds: float
    last: tuple[str, ...]  # lines of its output
    rows: list[Row]

    @property
    def verdict(self) -> str:
        if self.status is None:
            return "no time" if self.seconds == 0 else "stopped"
        return "passed" if self.status == 0 else f"failed ({self.status})"


def run_steps(steps: Sequence[Step], limit_s: float, log: Path) -> Iterator[Outcome]:
    """Run the steps one after the other within `limit_s` seconds, and yield the outcome of each.

    Their output is appended to `log`."""
    ends = time.monotonic() + limit_s
    for step in steps:
        left_s = ends - time.monotonic() - GRACE_S
        if left_s < LEAST_S:
            yield Outcome(step.name, shown(step), None, 0, (), [])
        else:
            yield run(step, min(step.limit_s, left_s), log)


def run(step: Step, limit_s: float, log: Path) -> Outcome:
    """Run one step. After `limit_s` seconds it is interrupted, as by Ctrl-C, and after GRACE_S more killed."""
    rows = log.with_name(f"{log.stem}-rows.json")
    rows.unlink(missing_ok=True)
    words = [word.replace(ROWS, str(rows)) for word in step.words]
    began = time.monotonic()
    with log.open("ab") as output:
        output.write(f"\n==== {step.name}: {shown(step)}\n".encode())
        output.flush()
        start = output.tell()
        command, environment = [*step.tool, sys.executable, "-m", *words], os.environ | dict(step.environment)
        status: int | None = None
        with (
            started(command, REPOSITORY, environment, output) as process,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            status = process.wait(limit_s)
    with log.open("rb") as written:
        written.seek(start)
        lines = written.read().decode(errors="replace").splitlines()
    last = tuple([line.rstrip() for line in lines if line.strip()][-LAST_LINES:])
    found = rows_of(rows)
    rows.unlink(missing_ok=True)
    return Outcome(step.name, shown(step), status, time.monotonic() - began, last, found)


@contextlib.contextmanager
def started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], output: IO[bytes], *, whole: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, with what it writes in `output`, and end it after the block.

    It can be interrupted, although a shell's background jobs ignore that. An interrupt of this process that comes while
    it starts the other one is raised in the block, so that the other one ends."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=prepare,
        )  # fmt: skip
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            yield process
        finally:
            end(process, whole=whole)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end(process: subprocess.Popen[bytes], *, whole: bool = False) -> None:
    """Interrupt a process that still runs, and kill what is left of its session. `whole`: as Ctrl-C in a terminal does,
    also those that it has started, for which a make waits."""
    if process.poll() is None:
        if whole:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows_of(path: Path) -> list[Row]:
    """Return the rows in a file that may be missing, or end within a line."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def shown(step: Step) -> str:
    """Format a step as the command that repeats it."""
    variables = [f"{name}={value}" for name, value in step.environment.items() if name != "PYTHONPATH"]
    words = [word if word.replace("-", "").isalnum() else repr(word) for word in step.words if word != ROWS]
    return " ".join([*variables, *step.tool, "python -m", *words])
